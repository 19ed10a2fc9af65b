"""The Trainer's callback: what is in a checkpoint, what is refused, and evaluation in the original state."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from kbitwrap import (
    KbitPreparedModel,
    LifecycleState,
    Manifest,
    ManifestMismatchError,
    StateError,
)
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation, prepared_trainer
from support import forks, zoo
from support.pairwise import pairwise
from support.snapshot import Snapshot
from support.thorough import each_once, few
from support.trainers import NUM_STEPS, RecordingTrainer, adapt, dataset, trained_weights, trainer_for

NAME = "kbitwrap.json"
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
PRECISIONS = ("full", "compute", "norms", "adapted", "none")


def prepare(precision: str = "norms", quant: str = "nf4", **fields: Any) -> KbitPreparedModel:
    return KbitPreparedModel(zoo.load("llama", quant), precision=precision, **fields).prepare()


def trainer_with_callback(
    prepared: KbitPreparedModel, folder: Path, *, adapter: dict[str, Any] | None = None, **kwargs: Any
) -> RecordingTrainer:
    peft_model = adapt(prepared.model, **adapter or {})
    return trainer_for(peft_model, folder, callbacks=[KbitTrainerCallback(prepared)], **kwargs)


FEW, BOOLS = ("full", "norms"), (False, True)


def every_run(test: Callable[..., None]) -> Callable[..., None]:
    """Each precision, with a trained head and without, under autocast and without."""
    runs = {
        f"{'bf16' if bf16 else 'plain'}-{'lora-and-head' if head else 'lora'}": {
            "bf16": bf16,
            "adapter": {"modules_to_save": head},
        }
        for bf16 in (False, True)
        for head in (False, True)
    }
    return pytest.mark.parametrize(("run", "precision"), each_once(list(runs.values()), ["full", "compute", "norms"]))(
        test
    )


def outcome(trainer: RecordingTrainer) -> tuple[list[float], dict[str, object]]:
    return trainer.losses, trained_weights(trainer.model)


# ----------------------------------------------------------------------------------------------------
# What is in a checkpoint.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
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


def test_what_is_not_prepared_is_not_trained(tmp_path: Path) -> None:
    base = adapt(zoo.load("llama"))
    other = prepare()
    restored = prepare()
    peft_model = adapt(restored.model)
    restored.restore()
    cases = [
        (base, None, "is not prepared"),
        (base, other, "not the given wrapper's model"),
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
        prepared = KbitPreparedModel(zoo.load("llama", None), freeze=False).prepare()
    model = prepared.model

    def trainer(folder: Path) -> RecordingTrainer:
        return trainer_for(model, folder, callbacks=[KbitTrainerCallback(prepared)], **EVERY_STEP)

    first = trainer(tmp_path)
    first.train()
    # Training has changed every parameter; what is trained is no difference.
    second = trainer(tmp_path)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert second.losses == first.losses[2:]


# ----------------------------------------------------------------------------------------------------
# Resuming.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[list[float], dict[str, object]]]:
    """A training under ``"full"``, its checkpoint after the second step, and what it comes to."""
    folder = tmp_path_factory.mktemp("run")
    trainer = trainer_with_callback(prepare("full"), folder, save_strategy="steps", save_steps=2)
    trainer.train()
    return folder / "checkpoint-2", outcome(trainer)


def resume(prepared: KbitPreparedModel | nn.Module, checkpoint: Path, folder: Path, **kwargs: Any) -> RecordingTrainer:
    model, wrapper = (prepared, None) if isinstance(prepared, nn.Module) else (prepared.model, prepared)
    trainer = trainer_for(adapt(model), folder, callbacks=[KbitTrainerCallback(wrapper)], **kwargs)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except ManifestMismatchError:
        assert trainer.losses == []
        raise
    return trainer


@pytest.mark.parametrize("order", ["prepare-first", "adapter-first"])
def test_resuming_on_the_same_preparation_goes_on(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]], order: str
) -> None:
    checkpoint, (losses, weights) = run
    if order == "prepare-first":
        trainer = resume(prepare("full"), checkpoint, tmp_path, **EVERY_STEP)
    else:
        peft_model = adapt(zoo.load("llama"))
        prepared = KbitPreparedModel.from_manifest(peft_model, checkpoint / NAME).prepare()
        trainer = trainer_for(peft_model, tmp_path, callbacks=[KbitTrainerCallback(prepared)], **EVERY_STEP)
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert outcome(trainer) == (losses[2:], weights)
    assert Manifest.load(tmp_path / "checkpoint-3" / NAME).prepare_config().precision == "full"


def changed(name: str) -> nn.Module:
    model = zoo.load("llama")
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.view(-1)[0] += 1
    return model


OTHERS: dict[str, tuple[Callable[[], KbitPreparedModel | nn.Module], str]] = {
    "unprepared": (lambda: zoo.load("llama"), "prepared"),
    "norms": (lambda: prepare("norms"), "config.precision"),
    "compute": (lambda: prepare("compute"), "config.precision"),
    "int8": (lambda: prepare("full", "int8"), "model.quantization.method"),
    "dtype": (
        lambda: KbitPreparedModel(zoo.load("llama", "nf4", torch.float16), precision="full").prepare(),
        "model.dtype",
    ),
    "weight": (lambda: KbitPreparedModel(changed("model.norm.weight"), precision="full").prepare(), "tensors"),
    "kwargs": (
        lambda: prepare("full", gradient_checkpointing_kwargs={"use_reentrant": True}),
        "config.gradient_checkpointing_kwargs.use_reentrant",
    ),
}


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in-place", "elsewhere"])
@pytest.mark.parametrize("case", OTHERS)
def test_resuming_on_another_base_is_refused(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]], case: str, elsewhere: bool
) -> None:
    make, what = OTHERS[case]
    output = tmp_path if elsewhere else run[0].parent
    with pytest.raises(ManifestMismatchError, match=r"No step was taken.*from_manifest") as caught:
        resume(make(), run[0], output)
    assert what in caught.value.different[""]
    assert f"{what}: expected" in str(caught.value)
    assert (str(run[0] / NAME) in str(caught.value)) != elsewhere
    if case == "weight":
        names = {fqn for fqn in caught.value.different if fqn}
        assert names == (set() if elsewhere else {"model.norm.weight"})
    # The folder is known where the arguments name it, as scripts do.
    with pytest.raises(ManifestMismatchError) as caught:
        resume(make(), run[0], tmp_path, resume_from_checkpoint=str(run[0]))
    assert str(run[0] / NAME) in str(caught.value)


def test_settings_that_change_no_number_are_no_difference(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]]
) -> None:
    prepared = prepare("full", memory_budget="1GiB", keep_originals=True, empty_cache=False)
    assert outcome(resume(prepared, run[0], tmp_path)) == (run[1][0][2:], run[1][1])


def test_the_manifest_of_another_checkpoint_is_not_used(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]]
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    prepare("none").manifest().save(tmp_path / "checkpoint-2" / NAME)
    with pytest.raises(ManifestMismatchError) as caught:
        resume(prepare("norms"), run[0], tmp_path)
    assert caught.value.different[""]["config.precision"] == ("full", "norms")
    assert str(tmp_path) not in str(caught.value)


def test_a_checkpoint_without_a_record_is_a_warning(tmp_path: Path) -> None:
    trainer = trainer_for(adapt(prepare("norms").model), tmp_path, **EVERY_STEP)
    trainer.train()
    resumed = trainer_with_callback(prepare("norms"), tmp_path, **EVERY_STEP)
    with pytest.warns(UserWarning, match="step 1 holds no record of a preparation"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert outcome(resumed) == (trainer.losses[1:], trained_weights(trainer.model))
    # From here on there is one.
    with pytest.raises(ManifestMismatchError):
        resume(prepare("none"), tmp_path / "checkpoint-2", tmp_path)


def test_a_manifest_beside_a_state_without_record_is_compared(tmp_path: Path) -> None:
    prepared = prepare("norms")
    trainer = trainer_for(adapt(prepared.model), tmp_path, **EVERY_STEP)
    trainer.train()
    prepared.manifest().save(tmp_path / "checkpoint-1" / NAME)
    assert resume(prepare("norms"), tmp_path / "checkpoint-1", tmp_path).losses == trainer.losses[1:]
    with pytest.raises(ManifestMismatchError, match=r"config\.precision: expected 'norms', found 'none'"):
        resume(prepare("none"), tmp_path / "checkpoint-1", tmp_path)


def test_another_version_of_transformers_may_write_a_config_differently(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]]
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(run[0], checkpoint)
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    record = state["stateful_callbacks"]["KbitTrainerCallback"]["preparation"]
    record["model"]["config_sha256"] = 64 * "0"
    path.write_text(json.dumps(state))
    with pytest.raises(ManifestMismatchError, match=r"model\.config_sha256"):
        resume(prepare("full"), checkpoint, tmp_path)
    record["transformers"] = "4.56.0"
    path.write_text(json.dumps(state))
    assert resume(prepare("full"), checkpoint, tmp_path).losses == run[1][0][2:]


@pytest.mark.parametrize("name", ["m.json", NAME])
def test_the_record_of_a_derived_callback_is_found(tmp_path: Path, name: str) -> None:
    class Derived(KbitTrainerCallback):
        pass

    prepared = prepare("full")
    callback = Derived(prepared, manifest_name=name)
    trainer_for(adapt(prepared.model), tmp_path, callbacks=[callback], **EVERY_STEP).train()
    with pytest.raises(ManifestMismatchError, match=r"config\.precision: expected 'full', found 'norms'"):
        resume(prepare("norms"), tmp_path / "checkpoint-1", tmp_path)


def test_a_damaged_manifest_hides_no_difference(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]]
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(run[0], checkpoint)
    (checkpoint / NAME).write_text("{")
    with pytest.raises(ManifestMismatchError, match=r"config\.precision") as caught:
        resume(prepare("norms"), checkpoint, tmp_path)
    assert str(checkpoint) not in str(caught.value)
    assert resume(prepare("full"), checkpoint, tmp_path).losses == run[1][0][2:]


@pytest.mark.parametrize("saved", [None, [], [None], "text", {}, {"preparation": 5}])
def test_a_trainer_state_without_a_record_is_a_warning(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]], saved: Any
) -> None:
    checkpoint = tmp_path / "checkpoint-2"
    shutil.copytree(run[0], checkpoint, ignore=shutil.ignore_patterns(NAME))
    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    state["stateful_callbacks"]["KbitTrainerCallback"] = saved
    path.write_text(json.dumps(state))
    trainer = trainer_with_callback(prepare("none"), tmp_path)
    with pytest.warns(UserWarning, match="step 2 holds no record of a preparation"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert len(trainer.losses) == 1


def test_callbacks_made_anew_from_a_checkpoint_compare_too(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]]
) -> None:
    kwargs = {"restore_callback_states_from_checkpoint": True, **EVERY_STEP}
    assert resume(prepare("full"), run[0], tmp_path, **kwargs).losses == run[1][0][2:]
    assert (tmp_path / "checkpoint-3" / NAME).is_file()
    with pytest.raises(ManifestMismatchError):
        resume(prepare("norms"), run[0], tmp_path, **kwargs)


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
@pytest.mark.parametrize(("precision", "call"), each_once(["full", "compute", "adapted"], [1, 4]))
def test_a_search_for_the_batch_size_goes_on_after_each_attempt(tmp_path: Path, precision: str, call: int) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    hook = Allocates(call)
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = adapt(model)
        handle = model.model.layers[0].mlp.register_forward_pre_hook(hook)
        trainer = trainer_for(
            peft_model, tmp_path, callbacks=[KbitTrainerCallback(prepared, suspend_evaluation=True)],
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


PROCESS = """
import json, os, sys, warnings
from pathlib import Path
from support import zoo
from kbitwrap import KbitPreparedModel, Manifest, ManifestMismatchError
from kbitwrap.integrations import KbitTrainerCallback
from support.trainers import adapt, trainer_for

warnings.simplefilter("ignore")
folder, precision, checkpoint, rank, port = sys.argv[1:]
model = zoo.load("llama")  # before the variables: of several processes only the first would write the zoo's checkpoint
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
saved, save = [], Manifest.save
Manifest.save = lambda self, path: (saved.append(Path(path).parent.name), save(self, path))
prepared = KbitPreparedModel(model, precision=precision).prepare()
trainer = trainer_for(
    adapt(model), Path(folder), callbacks=[KbitTrainerCallback(prepared)], save_strategy="steps", save_steps=1,
    max_steps=2, ddp_backend="gloo",
)
try:
    trainer.train(resume_from_checkpoint=checkpoint or None)
except ManifestMismatchError:
    saved.append("refused")
print(json.dumps([trainer.args.world_size, len(trainer.losses), saved]))
"""


def test_of_two_processes_one_writes_and_both_refuse(tmp_path: Path) -> None:
    def run_two(precision: str, checkpoint: str) -> list[list[Any]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def run_one(rank: int) -> list[Any]:
            found = forks.run_program(PROCESS, str(tmp_path), precision, checkpoint, str(rank), str(port))
            return json.loads(found.stdout.splitlines()[-1])

        with ThreadPoolExecutor() as pool:
            return list(pool.map(run_one, range(2)))

    assert run_two("full", "") == [[2, 2, ["checkpoint-1", "checkpoint-2"]], [2, 2, []]]
    assert (tmp_path / "checkpoint-1" / NAME).is_file()
    assert run_two("norms", str(tmp_path / "checkpoint-1")) == [[2, 0, ["refused"]], [2, 0, ["refused"]]]


PROGRAM = """
import json, sys, warnings
from pathlib import Path
from support import zoo
from kbitwrap import KbitPreparedModel
from kbitwrap.integrations import KbitTrainerCallback
from support.trainers import adapt, trainer_for

warnings.simplefilter("ignore")
folder, modes, cases = Path(sys.argv[1]), sys.argv[2].split("+"), json.loads(sys.argv[3])

def stop(trainer):
    trainer.control.should_training_stop = True
    trainer.control.should_save = True

def train(mode, quant, precision):
    output = folder / ("whole" if mode == "whole" else "stopped") / f"{quant}-{precision}"
    checkpoint = output / "checkpoint-4"
    model = zoo.load("llama", quant)
    if mode == "resume":
        prepared = KbitPreparedModel.from_manifest(model, checkpoint / "kbitwrap.json")
    else:
        prepared = KbitPreparedModel(model, precision=precision)
    with prepared:
        trainer = trainer_for(
            adapt(model, layers_to_transform=[1]), output, callbacks=[KbitTrainerCallback(prepared)],
            max_steps=8, save_strategy="steps", save_steps=4,
            at_step_end=lambda model: mode == "stop" and trainer.state.global_step == 4 and stop(trainer),
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if mode == "resume" else None)
    return trainer.losses, trainer.state.global_step

print(json.dumps([[train(mode, *case) for case in cases] for mode in modes]))
"""
RESUMED = [("nf4", "full"), ("nf4", "compute"), ("nf4", "norms"), ("nf4", "adapted"), ("int8", "norms")]


def test_resuming_in_a_new_process_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    def in_a_process(modes: str) -> list[Any]:
        found = forks.run_program(PROGRAM, str(tmp_path), modes, json.dumps(RESUMED))
        return json.loads(found.stdout.splitlines()[-1])

    wholes, firsts = in_a_process("whole+stop")
    (seconds,) = in_a_process("resume")
    runs = zip(RESUMED, wholes, firsts, seconds, strict=True)
    for case, (whole, num_whole), (first, num_first), (second, num_second) in runs:
        assert (num_whole, num_first, num_second) == (8, 4, 8), case
        assert len(set(whole)) == 8, case
        assert first + second == whole, case


# ----------------------------------------------------------------------------------------------------
# A trainer that was made before its model is prepared; TRL's are in tests/trl.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_trainer_prepared_after_it_was_made_trains_as_one_made_of_a_prepared_model(
    tmp_path: Path, precision: str
) -> None:
    expected = trainer_with_callback(prepare(precision), tmp_path, bf16=True)
    expected.train()
    trainer = trainer_for(adapt(zoo.load("llama")), tmp_path, bf16=True, **EVERY_STEP)
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
    prepared = prepare("adapted")
    config = zoo.lora_config("llama", task_type="CAUSAL_LM", layers_to_transform=[1])
    if inject:
        prepared.model.add_adapter(config)
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
    base = zoo.load("llama")
    untrained = Snapshot(base)
    prepared = KbitPreparedModel(base, precision=precision).prepare()
    if inject:
        base.add_adapter(zoo.lora_config("llama"))
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


@pytest.mark.parametrize("accumulation", [1, 2])
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
    rows = dataset(zoo.load("llama"))
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
    base = zoo.load("llama")
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


@pytest.mark.parametrize("precision", ["full", "norms"])
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
