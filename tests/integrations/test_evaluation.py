"""An evaluation of the suspended model leaves training as it is without."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from kbitwrap import KbitPreparedModel, LifecycleState, StateError
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation
from support import zoo
from support.thorough import few
from support.trainers import (
    EVERY_STEP,
    NUM_STEPS,
    RecordingTrainer,
    adapt,
    dataset,
    load_base,
    outcome,
    prepare,
    trained_weights,
    trainer_for,
    trainer_with_callback,
)


def every_run(test: Callable[..., None]) -> Callable[..., None]:
    """Each precision, with a trained head and without, under autocast and without."""
    runs = [{"bf16": bf16, "adapter": {"modules_to_save": head}} for bf16 in (False, True) for head in (False, True)]
    precisions = ["full", "compute", "norms"]
    chosen = [(runs[0], "norms"), (runs[3], "full")]
    return pytest.mark.parametrize(("run", "precision"), few(itertools.product(runs, precisions), chosen))(test)


# ----------------------------------------------------------------------------------------------------
# Evaluation in the original state.
# ----------------------------------------------------------------------------------------------------


class EvaluatingTrainer(SuspendedEvaluation, RecordingTrainer):
    """Evaluates in the original state, and records in which state the model was and what it was like."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrapper: KbitPreparedModel | None = None
        self.states: list[LifecycleState] = []
        self.broken = False

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.wrapper is not None
        self.states.append(self.wrapper.state)
        if self.broken:
            raise RuntimeError("in the loop")
        base = self.wrapper.model
        if self.wrapper.state is LifecycleState.SUSPENDED:
            assert {p.dtype for fqn, p in base.named_parameters() if "lora_" not in fqn} == {
                torch.bfloat16,
                torch.uint8,
            }
        return super().prediction_step(*args, **kwargs)


def evaluating(prepared: KbitPreparedModel, folder: Path, **kwargs: Any) -> EvaluatingTrainer:
    trainer = trainer_with_callback(prepared, folder, cls=EvaluatingTrainer, **kwargs)
    trainer.wrapper = prepared
    return trainer


@every_run
def test_training_after_a_suspended_evaluation_is_that_without(
    tmp_path: Path, precision: str, run: dict[str, Any]
) -> None:
    without = trainer_with_callback(prepare(precision), tmp_path, **run)
    without.train()
    prepared = prepare(precision)
    rows = dataset(prepared.model)
    trainer = evaluating(
        prepared,
        tmp_path,
        **run,
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        eval_dataset={"one": rows[:2], "two": rows[2:]},  # each has an evaluation of its own
    )
    trainer.train()
    assert set(trainer.states) == {LifecycleState.SUSPENDED}
    assert len(trainer.states) == 2 * (NUM_STEPS + 1)
    assert outcome(trainer) == outcome(without)
    assert prepared.state is LifecycleState.PREPARED


class Averaging(torch.optim.SGD):
    """Trains values, and has their average evaluated, as schedule-free optimizers do."""

    is_evaluated = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert not self.is_evaluated
        super().step()
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            average.lerp_(parameter, 0.5)

    def eval(self) -> None:
        self._swap(is_evaluated=True)

    def train(self) -> None:
        self._swap(is_evaluated=False)

    @torch.no_grad()
    def _swap(self, is_evaluated: bool) -> None:
        for parameter in self.param_groups[0]["params"] if is_evaluated != self.is_evaluated else ():
            average = self.state[parameter].get("average", parameter.clone())
            trained = parameter.clone()
            parameter.lerp_(average, 1)
            self.state[parameter]["average"] = average.copy_(trained)
        self.is_evaluated = is_evaluated


@pytest.mark.parametrize("precision", few(["full", "compute"], ["full"]))
def test_what_an_optimizer_writes_for_an_evaluation_is_written_before_it_is_rounded(
    tmp_path: Path, precision: str
) -> None:
    def run(**settings: Any) -> RecordingTrainer:
        prepared = prepare(precision)
        model = adapt(prepared.model, modules_to_save=True)
        callback = KbitTrainerCallback(prepared)
        trainer = trainer_for(model, tmp_path, callbacks=[callback], cls=EvaluatingTrainer, **settings)
        trainer.wrapper = prepared  # type: ignore[attr-defined]
        trainer.optimizer = Averaging([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        trainer.train()
        trainer.optimizer.train()
        return trainer

    rows = dataset(load_base())
    evaluated = run(eval_strategy="steps", eval_steps=1, eval_on_start=True, eval_dataset=rows)
    assert outcome(evaluated) == outcome(run())


def test_in_ones_own_loop_it_is_written_before_the_suspension() -> None:
    prepared = prepare("full")
    model = adapt(prepared.model, modules_to_save=True)
    optimizer = Averaging([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(**zoo.inputs("llama", model)).loss.backward()
    optimizer.step()
    before = trained_weights(model)
    optimizer.eval()
    assert trained_weights(model) != before
    with prepared.suspended():
        assert model(**zoo.inputs("llama", model)).loss.isfinite()
    optimizer.train()
    assert trained_weights(model) == before


def test_evaluation_is_that_of_the_restored_model(tmp_path: Path) -> None:
    prepared = prepare("full")
    rows = dataset(prepared.model)
    trainer = evaluating(prepared, tmp_path, eval_strategy="steps", eval_steps=NUM_STEPS, eval_dataset=rows)
    trainer.train()
    (inside,) = (row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
    assert trainer.evaluate()["eval_loss"] == inside
    predicted = trainer.predict(rows)
    with prepared.suspended():  # one's own suspension is respected
        assert trainer.evaluate()["eval_loss"] == inside
    assert set(trainer.states) == {LifecycleState.SUSPENDED}
    plain = trainer_for(trainer.model, tmp_path).evaluate(rows)["eval_loss"]
    assert plain != inside
    prepared.restore()
    assert trainer.evaluate()["eval_loss"] == inside
    assert trainer.states[-1] is LifecycleState.RESTORED
    restored = trainer.predict(rows)
    assert (predicted.predictions == restored.predictions).all()
    assert predicted.metrics["test_loss"] == restored.metrics["test_loss"] == inside


def test_a_failed_evaluation_leaves_the_model_prepared(tmp_path: Path) -> None:
    prepared = prepare("full")
    trainer = evaluating(prepared, tmp_path)
    trainer.broken = True
    with pytest.raises(RuntimeError, match="in the loop"):
        trainer.evaluate(dataset(prepared.model))
    assert trainer.states == [LifecycleState.SUSPENDED]
    assert prepared.state is LifecycleState.PREPARED
    assert not prepared.verify()


@pytest.mark.parametrize("options", [{}, EVERY_STEP, {"max_steps": 1}], ids=["training", "saving", "ending"])
def test_no_step_is_trained_while_another_callback_suspends(tmp_path: Path, options: dict[str, Any]) -> None:
    prepared = prepare("full")
    trainer = trainer_for(
        adapt(prepared.model),
        tmp_path,
        at_step_end=lambda model: prepared.suspend(),
        callbacks=[KbitTrainerCallback(prepared)],
        **options,
    )
    with pytest.raises(StateError, match=r"suspended at step 1, by another callback.*prepared\.resume\(\)"):
        trainer.train()
    assert len(trainer.losses) == 1
    assert prepared.state is LifecycleState.SUSPENDED
    with pytest.raises(StateError, match=r"suspended at step 0.*prepared\.resume\(\)"):
        trainer.train()
    assert len(trainer.losses) == 1


def test_a_trainer_can_be_made_for_a_suspended_model(tmp_path: Path) -> None:
    prepared = prepare("full")
    model = adapt(prepared.model)
    with prepared.suspended():
        inside = trainer_for(model, tmp_path, cls=EvaluatingTrainer)
        inside.wrapper = prepared
        inside.evaluate(dataset(prepared.model))
        assert inside.states == [LifecycleState.SUSPENDED]


def test_a_suspended_evaluation_is_not_under_the_autocast_of_training(tmp_path: Path) -> None:
    seen = []

    class Evaluating(SuspendedEvaluation, RecordingTrainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(set(vars(self.model)) & {"forward", "_original_forward"})
            return super().prediction_step(*args, **kwargs)

    prepared = prepare("full")
    rows = dataset(prepared.model)
    trainer = trainer_for(
        adapt(prepared.model), tmp_path, cls=Evaluating, bf16=True, eval_strategy="epoch", eval_dataset=rows
    )
    trainer.train()
    assert seen == [set()]
    assert "_original_forward" in vars(trainer.model)
    prepared.restore()
    assert "_original_forward" not in vars(trainer.model)


class Generating(SuspendedEvaluation, Seq2SeqTrainer):
    pass


@pytest.mark.parametrize("precision", few(["full", "norms"], ["full"]))
def test_generation_in_evaluation_is_that_of_a_base_never_prepared(tmp_path: Path, precision: str) -> None:
    def trainer(model: nn.Module, cls: type[Seq2SeqTrainer]) -> Seq2SeqTrainer:
        torch.manual_seed(0)
        peft_model = peft.get_peft_model(model, zoo.lora_config("t5", task_type="SEQ_2_SEQ_LM"))
        args = Seq2SeqTrainingArguments(
            output_dir=str(tmp_path),
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            max_steps=2,
            learning_rate=1e-2,
            predict_with_generate=True,
            generation_max_length=8,
        )
        batch = zoo.inputs("t5", model)
        rows = [{name: tensor[row] for name, tensor in batch.items()} for row in (0, 1)]
        return cls(model=peft_model, args=args, train_dataset=rows)

    prepared = KbitPreparedModel(zoo.load("t5"), precision=precision).prepare()
    ours = trainer(prepared.model, Generating)
    ours.train()
    tokens = ours.predict(ours.train_dataset).predictions
    assert prepared.state is LifecycleState.PREPARED
    theirs = trainer(zoo.load("t5"), Seq2SeqTrainer)
    state = {fqn: tensor.clone() for fqn, tensor in peft.get_peft_model_state_dict(ours.model).items()}
    peft.set_peft_model_state_dict(theirs.model, state)
    assert (tokens == theirs.predict(ours.train_dataset).predictions).all()
