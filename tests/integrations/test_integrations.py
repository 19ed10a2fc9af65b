"""The Trainer's callback: what is in a checkpoint, and what Trainer and accelerate set is taken back."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, LifecycleState, Manifest, ManifestError, ManifestMismatchError, StateError
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation, prepared_trainer
from support import zoo
from support.pairwise import pairwise
from support.snapshot import Snapshot
from support.thorough import every_other, few
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
    resume,
    trainer_for,
    trainer_with_callback,
)

PRECISIONS = ("full", "compute", "norms", "adapted", "none")


FEW, BOOLS = ("full", "norms"), (False, True)


# ----------------------------------------------------------------------------------------------------
# What is in a checkpoint.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", every_other(PRECISIONS))
def test_every_checkpoint_gets_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    calls = []
    make = KbitPreparedModel.manifest
    monkeypatch.setattr(KbitPreparedModel, "manifest", lambda self: calls.append(self) or make(self))
    prepared = prepare(precision)
    trainer = trainer_with_callback(prepared, tmp_path, **EVERY_STEP)
    trainer.train()
    assert len(calls) == 1
    for step in range(1, NUM_STEPS + 1):
        manifest = Manifest.load(tmp_path / f"checkpoint-{step}" / NAME)
        assert not manifest.diff(prepared.manifest())
        assert manifest.prepare_config() == prepared.config
    assert not prepared.verify()


def test_the_callback_changes_no_loss_and_no_weight(tmp_path: Path) -> None:
    trainer = trainer_with_callback(prepare("full"), tmp_path, **EVERY_STEP)
    trainer.train()
    without = trainer_for(adapt(prepare("full").model), tmp_path / "without")
    without.train()
    assert outcome(trainer) == outcome(without)


def test_the_wrapper_is_found_and_the_file_named(tmp_path: Path) -> None:
    callback = KbitTrainerCallback(manifest_name="base.json")
    trainer = trainer_for(adapt(prepare().model), tmp_path, callbacks=[callback], **EVERY_STEP)
    trainer.train()
    assert Manifest.load(tmp_path / "checkpoint-1" / "base.json").model.class_name == "LlamaForCausalLM"
    assert not (tmp_path / "checkpoint-1" / NAME).exists()


def test_a_search_has_a_folder_for_each_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers asks the libraries of searches, none of which is installed, whose trial this is.
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)
    trainer = trainer_with_callback(prepare(), tmp_path, **EVERY_STEP)
    trainer.hp_search_backend, trainer.hp_space, trainer.hp_name = "optuna", lambda trial: {}, None
    for number in (3, 4):
        trainer.train(trial=SimpleNamespace(number=number, params={}))
        assert (tmp_path / f"run-{number}" / "checkpoint-1" / NAME).is_file()


class MovesCheckpoints(RecordingTrainer):
    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)
        folder = Path(self.args.output_dir)
        (folder / f"checkpoint-{self.state.global_step}").rename(folder / f"moved-{self.state.global_step}")


def test_a_moved_checkpoint_is_a_warning_and_is_still_compared(tmp_path: Path) -> None:
    trainer = trainer_with_callback(
        prepare(), tmp_path, cls=MovesCheckpoints, save_strategy="steps", save_steps=NUM_STEPS
    )
    with pytest.warns(UserWarning, match=r"found no checkpoint-3 in .*trainer_state\.json"):
        trainer.train()
    with pytest.raises(ManifestMismatchError, match=r"config\.precision"):
        resume(prepare("none"), tmp_path / "moved-3", tmp_path / "other")


def test_what_is_neither_prepared_nor_has_adapters_is_not_trained(tmp_path: Path) -> None:
    base = load_base(None)
    other = prepare()
    restored = prepare()
    peft_model = adapt(restored.model)
    restored.restore()
    cases = [
        (base, None, "is not prepared"),
        (adapt(load_base()), other, "not the given KbitPreparedModel's model"),
        (peft_model, restored, "or was restored"),
    ]
    for model, prepared, message in cases:
        trainer = trainer_for(model, tmp_path, callbacks=[KbitTrainerCallback(prepared)])
        with pytest.raises(StateError, match=message) as caught:
            trainer.train()
        assert trainer.losses == []
        assert caught.value.expected == (LifecycleState.PREPARED,)


def test_a_base_without_adapters_is_accepted_where_it_is_trained(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="neither a quantization attribute"):
        prepared = KbitPreparedModel(load_base(None), freeze=False).prepare()
    trainer = trainer_for(prepared.model, tmp_path, callbacks=[KbitTrainerCallback(prepared)], **EVERY_STEP)
    trainer.train()
    assert (tmp_path / "checkpoint-2" / NAME).is_file()
    # It has changed every parameter, which no manifest records.
    with pytest.raises(ManifestError, match="was trained"):
        trainer.train()


class SuspendingTrainer(SuspendedEvaluation, RecordingTrainer):
    """Evaluates in the original state."""


class Allocates:
    """Hook of a module: one of its calls with more than one row asks for more memory than any machine has."""

    def __init__(self, call: int) -> None:
        self.calls, self.call = 0, call

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self.calls += len(args[0]) > 1
        if self.calls == self.call:
            self.calls = 0
            torch.empty(1 << 56, dtype=torch.uint8)


# Each step calls a block once in its forward and once in its backward; after the first step, there is an evaluation.
@pytest.mark.usefixtures("not_repacking")  # repacking gives weights other memory
@pytest.mark.parametrize(
    ("precision", "call"), few(itertools.product(["full", "compute", "adapted"], [1, 4]), [("compute", 4)])
)
def test_a_search_for_the_batch_size_goes_on_after_each_attempt(tmp_path: Path, precision: str, call: int) -> None:
    model = load_base()
    before = Snapshot(model)
    hook = Allocates(call)
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = adapt(model)
        handle = model.model.layers[0].mlp.register_forward_pre_hook(hook)
        trainer = trainer_for(
            peft_model, tmp_path, callbacks=[KbitTrainerCallback(prepared)], cls=SuspendingTrainer,
            auto_find_batch_size=True, per_device_train_batch_size=4, eval_dataset=dataset(model),
            eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1, **EVERY_STEP,
        )  # fmt: skip
        trainer.train()
        handle.remove()
        assert trainer._train_batch_size == 1
        assert trainer.state.global_step == NUM_STEPS
        assert not prepared.verify()
        Manifest.load(tmp_path / f"checkpoint-{NUM_STEPS}" / NAME).check(peft_model)
    peft_model.unload()
    assert before.diff(Snapshot(model), moved=precision in ("full", "compute")) == []


# ----------------------------------------------------------------------------------------------------
# A trainer that was made before its model is prepared; TRL's are in tests/trl.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_trainer_prepared_after_it_was_made_trains_as_one_made_of_a_prepared_model(
    tmp_path: Path, precision: str
) -> None:
    expected = trainer_with_callback(prepare(precision), tmp_path, bf16=True)
    expected.train()
    trainer = trainer_for(adapt(load_base()), tmp_path, bf16=True, **EVERY_STEP)
    base, callbacks = trainer.model.get_base_model(), list(trainer.callback_handler.callbacks)
    before = Snapshot(base.model.norm), set(vars(trainer.model))
    with prepared_trainer(trainer, precision=precision, audit=True) as prepared:
        trainer.train()
        assert not prepared.verify()
    assert outcome(trainer) == outcome(expected)
    assert not prepared.config.gradient_checkpointing  # as the trainer's arguments say
    assert prepared.config.audit
    assert (tmp_path / "checkpoint-1" / NAME).exists()
    assert trainer.callback_handler.callbacks == callbacks
    assert before[0].diff(Snapshot(base.model.norm), moved=precision == "full") == []
    assert set(vars(trainer.model)) == before[1]


# ----------------------------------------------------------------------------------------------------
# Adapted, and what accelerate leaves behind.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inject", [False, True], ids=["peft-model", "injected"])
def test_adapters_are_adopted_when_the_trainer_is_made(tmp_path: Path, inject: bool) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"), precision="adapted").prepare()
    config = zoo.lora_config("llama", task_type="CAUSAL_LM", layers_to_transform=[1])
    if inject:
        zoo.adapt_by_transformers(prepared.model, config)
        model = prepared.model
    else:
        model = peft.get_peft_model(prepared.model, config)
    assert [edit.action for edit in prepared.plan.edits].count("compute") == 0
    trainer_for(model, tmp_path, callbacks=[KbitTrainerCallback(prepared)])
    (edit,) = (edit for edit in prepared.plan.edits if edit.action == "compute")
    assert edit.fqns
    assert all("layers.1." in fqn for fqn in edit.fqns)


@pytest.mark.parametrize(
    ("precision", "inject", "bf16"), few(itertools.product(FEW, BOOLS, BOOLS), pairwise(FEW, BOOLS, BOOLS))
)
def test_what_accelerate_sets_is_taken_back(tmp_path: Path, precision: str, inject: bool, bf16: bool) -> None:
    base = load_base()
    untrained = Snapshot(base)
    prepared = KbitPreparedModel(base, precision=precision).prepare()
    if inject:
        zoo.adapt_by_transformers(base, zoo.lora_config("llama"))
    model = base if inject else adapt(base)
    before = set(vars(model))
    trainer = trainer_for(model, tmp_path, callbacks=[KbitTrainerCallback(prepared)], bf16=bf16)
    trainer.train()
    set_by_accelerate = set(vars(model)) - before
    assert set_by_accelerate == ({"forward", "_original_forward"} if bf16 else set()) | {"_is_accelerate_prepared"}
    trained = {name: vars(model)[name] for name in set_by_accelerate}

    for _ in range(2):
        with prepared.suspended():
            assert set(vars(model)) - before == set()
        assert {name: vars(model)[name] for name in set_by_accelerate} == trained
    losses = [row["eval_loss"] for row in (trainer.evaluate(dataset(base)), trainer.evaluate(dataset(base)))]
    assert losses[0] == losses[1]
    prepared.restore()
    assert set(vars(model)) - before == set()
    if not inject:
        model.unload()
        assert untrained.diff(Snapshot(base), moved=precision == "full") == []


def test_a_forward_of_ones_own_stays(tmp_path: Path) -> None:
    prepared = prepare()
    model = adapt(prepared.model)
    trainer = trainer_for(model, tmp_path, callbacks=[KbitTrainerCallback(prepared)])

    def forward(*args: Any, **kwargs: Any) -> Any:
        return type(model).forward(model, *args, **kwargs)

    model.forward = forward
    trainer.train()
    prepared.restore()
    assert model.forward is forward
