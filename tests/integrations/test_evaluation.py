"""An evaluation of the suspended model, by the class and by the callback, leaves training as it is without."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from kbitwrap import KbitPreparedModel, LifecycleState, StateError
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once, few
from support.trainers import (
    EVERY_STEP,
    NAME,
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


@pytest.mark.thorough
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


@pytest.mark.parametrize(("precision", "by_callback"), each_once(["full", "compute"], [False, True]))
def test_what_an_optimizer_writes_for_an_evaluation_is_written_before_it_is_rounded(
    tmp_path: Path, precision: str, by_callback: bool
) -> None:
    def run(**settings: Any) -> RecordingTrainer:
        prepared = prepare(precision)
        model = adapt(prepared.model, modules_to_save=True)
        callback = KbitTrainerCallback(prepared, suspend_evaluation=by_callback and bool(settings))
        cls = RecordingTrainer if by_callback else EvaluatingTrainer
        trainer = trainer_for(model, tmp_path, callbacks=[callback], cls=cls, **settings)
        trainer.wrapper = prepared  # type: ignore[attr-defined]
        trainer.optimizer = Averaging([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        trainer.train()
        trainer.optimizer.train()
        return trainer

    rows = dataset(load_base())
    evaluated = run(eval_strategy="steps", eval_steps=1, eval_on_start=True, eval_dataset=rows)
    assert outcome(evaluated) == outcome(run())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_in_ones_own_loop_it_is_written_before_the_suspension_and_an_error_says_so() -> None:
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
    with pytest.raises(RuntimeError, match="expected dtype") as caught, prepared.suspended():
        optimizer.eval()
    assert "call optimizer.eval() before the suspension" in caught.value.__notes__[0]


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


# ----------------------------------------------------------------------------------------------------
# Evaluation in the original state, by the callback.
# ----------------------------------------------------------------------------------------------------


class StateRecordingTrainer(RecordingTrainer):
    """Records in which state the model is evaluated and saved, and what it is like when it is evaluated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrapper: KbitPreparedModel | None = None
        self.states: list[tuple[str, LifecycleState]] = []
        self.dtypes: set[torch.dtype] = set()
        self.breaks: type[BaseException] | None = None

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.wrapper is not None
        self.states.append(("evaluated", self.wrapper.state))
        self.dtypes |= {p.dtype for fqn, p in self.wrapper.model.named_parameters() if "lora_" not in fqn}
        if self.breaks is not None:
            raise self.breaks("in the loop")
        return super().prediction_step(*args, **kwargs)

    def _save_checkpoint(self, *args: Any) -> None:
        assert self.wrapper is not None
        self.states.append(("saved", self.wrapper.state))
        super()._save_checkpoint(*args)


def suspending(
    prepared: KbitPreparedModel,
    folder: Path,
    *,
    adapter: dict[str, Any] | None = None,
    cls: type[RecordingTrainer] = StateRecordingTrainer,
    others: list[TrainerCallback] | None = None,
    **kwargs: Any,
) -> Any:
    """A trainer whose callback suspends, with others after it."""
    callbacks = [KbitTrainerCallback(prepared, suspend_evaluation=True), *(others or [])]
    kwargs = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": dataset(prepared.model)} | kwargs
    trainer = trainer_for(adapt(prepared.model, **adapter or {}), folder, cls=cls, callbacks=callbacks, **kwargs)
    trainer.wrapper = prepared
    return trainer


@every_run
def test_training_with_a_suspending_callback_is_that_without(
    tmp_path: Path, precision: str, run: dict[str, Any]
) -> None:
    without = trainer_with_callback(prepare(precision), tmp_path / "without", **run, **EVERY_STEP)
    without.train()
    prepared = prepare(precision)
    trainer = suspending(prepared, tmp_path / "with", **run, eval_on_start=True, eval_delay=0, **EVERY_STEP)
    trainer.train()
    evaluation = [("evaluated", LifecycleState.SUSPENDED)]
    assert trainer.states == evaluation + NUM_STEPS * [*evaluation, ("saved", LifecycleState.PREPARED)]
    assert trainer.dtypes == {torch.bfloat16, torch.uint8}
    assert outcome(trainer) == outcome(without)
    assert prepared.state is LifecycleState.PREPARED
    for step in range(1, NUM_STEPS + 1):
        saved = [tmp_path / name / f"checkpoint-{step}" / "adapter_model.safetensors" for name in ("with", "without")]
        assert saved[0].read_bytes() == saved[1].read_bytes()

    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    prepared.restore()
    assert trainer.evaluate()["eval_loss"] == losses[-1]
    assert len(set(losses)) > 1


@pytest.mark.parametrize("accumulation", few([1, 2], [2]))
def test_each_epoch_is_evaluated_in_the_original_state(tmp_path: Path, accumulation: int) -> None:
    prepared = prepare("full")
    options = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": accumulation}
    trainer = suspending(
        prepared, tmp_path, eval_strategy="epoch", save_strategy="best", metric_for_best_model="eval_loss", **options
    )
    trainer.train()
    assert [state for what, state in trainer.states if what == "evaluated"] == 2 * [LifecycleState.SUSPENDED]
    assert ("saved", LifecycleState.PREPARED) in trainer.states
    without = trainer_with_callback(prepare("full"), tmp_path / "without", **options)
    without.train()
    assert outcome(trainer) == outcome(without)


def test_the_callback_evaluates_as_prepared_unless_asked(tmp_path: Path) -> None:
    prepared = prepare("full")
    trainer = trainer_with_callback(
        prepared, tmp_path, cls=StateRecordingTrainer, eval_strategy="epoch", eval_dataset=dataset(prepared.model)
    )
    trainer.wrapper = prepared
    trainer.train()
    assert trainer.states == [("evaluated", LifecycleState.PREPARED)]


class Asks(TrainerCallback):
    """Asks for an evaluation, or asks for none."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = self.wanted


class Evaluates(TrainerCallback):
    """Evaluates by itself, after each step."""

    def __init__(self) -> None:
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate()


def test_what_the_callback_cannot_suspend_is_refused(tmp_path: Path) -> None:
    message = r"not in its original state.*SuspendedEvaluation"
    rows = dataset(load_base())
    cases: list[dict[str, Any]] = [
        {"eval_dataset": {"one": rows[:2], "two": rows[2:]}},
        {"eval_strategy": "no", "others": [Evaluates()]},
        {"eval_strategy": "no", "others": [Asks(True)]},
    ]
    for number, options in enumerate(cases):
        prepared = prepare("full")
        trainer = suspending(prepared, tmp_path / str(number), **options)
        for callback in options.get("others", []):
            callback.trainer = trainer
        with pytest.raises(StateError, match=message):
            trainer.train()
        assert len(trainer.losses) == 1
        assert prepared.state is LifecycleState.PREPARED

    for call in (trainer.evaluate, lambda: trainer.predict(rows)):
        with pytest.raises(StateError, match=message):
            call()
        with prepared.suspended():
            call()
    prepared.restore()
    trainer.evaluate()


def test_several_datasets_are_suspended_with_the_class(tmp_path: Path) -> None:
    class Trainer(SuspendedEvaluation, StateRecordingTrainer):
        pass

    prepared = prepare("full")
    rows = dataset(prepared.model)
    trainer = suspending(prepared, tmp_path, cls=Trainer, eval_dataset={"one": rows[:2], "two": rows[2:]})
    trainer.train()
    trainer.evaluate()
    assert trainer.states == 2 * (NUM_STEPS + 1) * [("evaluated", LifecycleState.SUSPENDED)]
    assert prepared.state is LifecycleState.PREPARED


@pytest.mark.parametrize("options", [{}, EVERY_STEP, {"max_steps": 1}], ids=["training", "saving", "ending"])
def test_training_stops_after_a_cancelled_evaluation(tmp_path: Path, options: dict[str, Any]) -> None:
    prepared = prepare("full")
    trainer = suspending(prepared, tmp_path, others=[Asks(False)], **options)
    with pytest.raises(StateError, match=r"at step 1 .*cancelled.*last of the callbacks"):
        trainer.train()
    assert len(trainer.losses) == 1
    assert prepared.state is LifecycleState.PREPARED
    assert not prepared.verify()


@pytest.mark.parametrize("suspend_evaluation", [False, True])
def test_no_step_is_trained_while_another_callback_suspends(tmp_path: Path, suspend_evaluation: bool) -> None:
    prepared = prepare("full")
    callback = KbitTrainerCallback(prepared, suspend_evaluation=suspend_evaluation)
    trainer = trainer_for(
        adapt(prepared.model), tmp_path, at_step_end=lambda model: prepared.suspend(), callbacks=[callback]
    )
    with pytest.raises(StateError, match=r"at step 1 the model was suspended: .* another callback suspended"):
        trainer.train()
    assert len(trainer.losses) == 1
    assert prepared.state is LifecycleState.SUSPENDED


def test_a_trainer_can_be_made_for_a_suspended_model(tmp_path: Path) -> None:
    prepared = prepare("full")
    model = adapt(prepared.model)
    with prepared.suspended():
        inside = trainer_for(model, tmp_path, cls=EvaluatingTrainer)
        inside.wrapper = prepared
        inside.evaluate(dataset(prepared.model))
        assert inside.states == [LifecycleState.SUSPENDED]


def test_a_wrapper_that_is_not_the_models_hides_no_evaluation(tmp_path: Path) -> None:
    stale = prepare("full")
    trainer = suspending(stale, tmp_path)
    stale.restore()
    KbitPreparedModel(stale.model, precision="full").prepare()
    with pytest.raises(StateError, match="not in its original state"):
        trainer.evaluate()


@pytest.mark.parametrize("exception", [RuntimeError, KeyboardInterrupt])
def test_an_evaluation_that_raises_is_taken_back(tmp_path: Path, exception: type[BaseException]) -> None:
    base = load_base()
    untrained = Snapshot(base)
    prepared = KbitPreparedModel(base, precision="full")
    prepared.prepare()
    trainer = suspending(prepared, tmp_path)
    trainer.breaks = exception
    with pytest.raises(exception), prepared:
        trainer.train()
    assert prepared.state is LifecycleState.RESTORED
    trainer.model.unload()
    assert untrained.diff(Snapshot(base), moved=True) == []


def test_nothing_is_trained_after_an_evaluation_that_raised_until_resumed(tmp_path: Path) -> None:
    def callbacks() -> list[TrainerCallback]:
        return [KbitTrainerCallback(suspend_evaluation=True)]

    adapter = {"modules_to_save": True}
    whole = suspending(prepare("full"), tmp_path / "run", adapter=adapter, **EVERY_STEP)
    whole.train()
    checkpoint = str(tmp_path / "run" / "checkpoint-1")

    prepared = prepare("full")
    # Its callback is made anew from the checkpoint, and the old one is not kept by anybody.
    trainer = suspending(prepared, tmp_path, adapter=adapter, restore_callback_states_from_checkpoint=True)
    trainer.breaks = RuntimeError
    other = trainer_for(trainer.model, tmp_path, callbacks=callbacks())
    with pytest.raises(RuntimeError, match="in the loop"):
        trainer.train()
    for train in (trainer.train, other.train, lambda: trainer.train(resume_from_checkpoint=checkpoint)):
        with pytest.raises(StateError, match=r"is suspended, as after an evaluation that raised.*prepared\.resume\(\)"):
            train()
    for call in (prepared.restore, lambda: trainer_for(trainer.model, tmp_path, callbacks=callbacks())):
        with pytest.raises(StateError, match=r"resume\(\) it, or leave suspended"):
            call()
    assert (len(trainer.losses), other.losses) == (1, [])

    assert prepared.resume()
    assert not prepared.verify()
    with prepared.suspended():
        trainer.breaks = None
        trainer.evaluate()  # whose end is not that of the suspension it runs in
        assert prepared.state is LifecycleState.SUSPENDED
    again = trainer_for(trainer.model, tmp_path, callbacks=callbacks())
    again.train(resume_from_checkpoint=checkpoint)
    assert again.losses == whole.losses[1:]
    assert trained_weights(again.model) == trained_weights(whole.model)


def test_a_run_with_a_suspending_callback_resumes(tmp_path: Path) -> None:
    adapter = {"modules_to_save": True}
    whole = suspending(prepare("full"), tmp_path / "run", adapter=adapter, **EVERY_STEP)
    whole.train()
    saved = json.loads((tmp_path / "run" / "checkpoint-1" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["KbitTrainerCallback"]["args"] == {
        "manifest_name": NAME,
        "suspend_evaluation": True,
        "count_lost_updates": False,
    }
    prepared = prepare("full")
    resumed = trainer_for(  # the checkpoint says that it is to suspend
        adapt(prepared.model, **adapter),
        tmp_path / "resumed",
        cls=StateRecordingTrainer,
        callbacks=[KbitTrainerCallback(prepared)],
        restore_callback_states_from_checkpoint=True,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=dataset(prepared.model),
    )
    resumed.wrapper = prepared
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert resumed.losses == whole.losses[1:]
    assert trained_weights(resumed.model) == trained_weights(whole.model)
    assert resumed.states == (NUM_STEPS - 1) * [("evaluated", LifecycleState.SUSPENDED)]


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
