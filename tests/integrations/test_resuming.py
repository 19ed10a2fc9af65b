"""Resuming from a checkpoint needs the preparation that it was made with."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, Manifest, ManifestMismatchError
from kbitwrap.integrations import KbitTrainerCallback
from support import forks
from support.trainers import (
    EVERY_STEP,
    NAME,
    adapt,
    load_base,
    outcome,
    prepare,
    resume,
    trained_weights,
    trainer_for,
    trainer_with_callback,
)

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


@pytest.mark.parametrize("order", ["prepare-first", "adapter-first"])
def test_resuming_on_the_same_preparation_goes_on(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]], order: str
) -> None:
    checkpoint, (losses, weights) = run
    if order == "prepare-first":
        trainer = resume(prepare("full"), checkpoint, tmp_path, **EVERY_STEP)
    else:
        peft_model = adapt(load_base())
        prepared = KbitPreparedModel.from_manifest(peft_model, checkpoint / NAME).prepare()
        trainer = trainer_for(peft_model, tmp_path, callbacks=[KbitTrainerCallback(prepared)], **EVERY_STEP)
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert outcome(trainer) == (losses[2:], weights)
    assert Manifest.load(tmp_path / "checkpoint-3" / NAME).prepare_config().precision == "full"


def changed(name: str) -> nn.Module:
    model = load_base()
    parameter = model.get_parameter(name)
    with torch.no_grad():
        parameter.view(-1)[0] += 1
    return model


OTHERS: dict[str, tuple[Callable[[], KbitPreparedModel | nn.Module], str]] = {
    "unprepared": (lambda: load_base(), "prepared"),
    "norms": (lambda: prepare("norms"), "config.precision"),
    "compute": (lambda: prepare("compute"), "config.precision"),
    "int8": (lambda: prepare("full", "int8"), "model.quantization.method"),
    "dtype": (
        lambda: KbitPreparedModel(load_base("nf4", torch.float16), precision="full").prepare(),
        "model.dtype",
    ),
    "weight": (lambda: KbitPreparedModel(changed("model.norm.weight"), precision="full").prepare(), "tensors"),
    "kwargs": (
        lambda: prepare("full", gradient_checkpointing_kwargs={"use_reentrant": True}),
        "config.gradient_checkpointing_kwargs.use_reentrant",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_resuming_on_another_base_is_refused(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]], case: str
) -> None:
    make, what = OTHERS[case]
    with pytest.raises(ManifestMismatchError, match=r"No step was taken.*from_manifest.*kbitwrap\.json") as caught:
        resume(make(), run[0], tmp_path)
    assert what in caught.value.different[""]
    assert f"{what}: expected" in str(caught.value)


def test_settings_that_change_no_number_are_no_difference(
    tmp_path: Path, run: tuple[Path, tuple[list[float], dict[str, object]]]
) -> None:
    prepared = prepare("full", memory_budget="1GiB", keep_originals=True, empty_cache=False)
    assert outcome(resume(prepared, run[0], tmp_path)) == (run[1][0][2:], run[1][1])


def test_a_checkpoint_without_a_record_is_a_warning(tmp_path: Path) -> None:
    trainer = trainer_for(adapt(prepare("norms").model), tmp_path, **EVERY_STEP)
    trainer.train()
    resumed = trainer_with_callback(prepare("norms"), tmp_path, **EVERY_STEP)
    with pytest.warns(UserWarning, match="step 1 does not say how its base was prepared"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert outcome(resumed) == (trainer.losses[1:], trained_weights(trainer.model))
    # From here on there is one.
    with pytest.raises(ManifestMismatchError):
        resume(prepare("none"), tmp_path / "checkpoint-2", tmp_path)


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
    with pytest.warns(UserWarning, match="step 2 does not say how its base was prepared"):
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


PROCESS = """
import json, os, sys, warnings
from pathlib import Path
from kbitwrap import KbitPreparedModel, Manifest, ManifestMismatchError
from kbitwrap.integrations import KbitTrainerCallback
from support.trainers import adapt, load_base, trainer_for

warnings.simplefilter("ignore")
folder, precision, checkpoint, rank, port = sys.argv[1:]
model = load_base()  # before the variables: of several processes only the first would write the zoo's checkpoint
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
saved, save = [], Manifest.save
Manifest.save = lambda self, path: (saved.append(Path(path).parent.name), save(self, path))
prepared = None if precision == "unprepared" else KbitPreparedModel(model, precision=precision).prepare()
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


@pytest.mark.thorough
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

    written = ["checkpoint-1", "checkpoint-2", tmp_path.name]
    for precision in ("unprepared", "full"):
        assert run_two(precision, "") == [[2, 2, written], [2, 2, []]]
        assert (tmp_path / "checkpoint-1" / NAME).is_file()
    assert run_two("unprepared", str(tmp_path / "checkpoint-1")) == [[2, 0, ["refused"]], [2, 0, ["refused"]]]
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


@pytest.mark.thorough
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
