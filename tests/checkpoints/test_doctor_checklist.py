"""What the doctor says that it looked at, and faults of the files of a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kbitwrap import DoctorReport, KbitPreparedModel, doctor
from support import trainers, zoo

# Training on after `restore` is not what these do.
pytestmark = pytest.mark.filterwarnings("ignore:restore\\(\\) made:UserWarning")

INTERRUPTED = "a save was interrupted, or a file was damaged"
EMPTY = "an adapter holds no values"
ZERO = "lora_B is zero in every layer"
ADAPTER = "adapter_model.safetensors"


def outcomes(report: DoctorReport, where: Path | str) -> dict[str, str]:
    """What was looked at in one place, and how it came out."""
    return {examined.what: examined.outcome for examined in report.looked_at if examined.where == str(where)}


@pytest.fixture
def run(runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(runs / "run", tmp_path / "run")


# ----------------------------------------------------------------------------------------------------
# What was looked at.
# ----------------------------------------------------------------------------------------------------

OF_AN_ADAPTER = ["files", "lora_B", "adapter values"]
OF_A_CHECKPOINT = [*OF_AN_ADAPTER, "optimizer", "trainer state"]


def test_every_check_of_a_sound_run_is_listed_as_fine(runs: Path) -> None:
    folder = runs / "run"
    report = doctor(folder, base=runs / "base")
    assert (report.findings, report.not_measured) == ((), ())
    assert outcomes(report, folder) == dict.fromkeys(OF_AN_ADAPTER, "fine")
    assert outcomes(report, folder / "checkpoint-2") == dict.fromkeys(OF_A_CHECKPOINT, "fine")
    assert outcomes(report, folder / "checkpoint-3") == dict.fromkeys([*OF_A_CHECKPOINT, "base", "numerics"], "fine")
    said = str(report)
    assert all(f"{one.where}: {one.what}: {one.outcome}: {one.evidence}" in said for one in report.looked_at)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_what_was_looked_at_agrees_with_what_was_found_and_with_what_was_not_measured(run: Path) -> None:
    (run / "checkpoint-3" / "trainer_state.json").unlink()
    report = doctor(run)
    assert [one.evidence for one in report.looked_at if one.outcome == "fault"] == [f.what for f in report.findings]
    unknown = [one.evidence for one in report.looked_at if one.outcome == "not measured"]
    assert [line.partition(": ")[2] for line in report.not_measured] == unknown


def test_the_checks_of_a_checkpoint_with_a_base_are_listed(runs: Path) -> None:
    looked_at = outcomes(doctor(runs / "base"), runs / "base")
    fine = dict.fromkeys(["files", "scales", "dtypes", "layers"], "fine")
    assert looked_at == {**fine, "merge": "not measured"}


def test_the_checks_of_a_live_model_are_listed() -> None:
    model = zoo.load("gemma2")
    with KbitPreparedModel(model):
        peft_model = trainers.adapt(model)
        prepared = outcomes(doctor(peft_model), "PeftModelForCausalLM")
    expected = ["base", "lora_B", "adapter values", "scales", "ties", "layers"]
    assert prepared == {**dict.fromkeys(expected, "fine"), "merge": "not measured"}
    restored = outcomes(doctor(peft_model), "PeftModelForCausalLM")
    assert restored == {**prepared, "base": "not measured", "dtypes": "fine"}


def test_a_base_is_not_measured_beside_an_adapter_without_a_manifest(runs: Path, run: Path) -> None:
    for path in run.rglob("kbitwrap.json"):
        path.unlink()
    for base in (None, runs / "base"):
        report = doctor(run, base=base)
        (line,) = report.not_measured
        assert line.startswith("whether the base is the manifest's, and unchanged: no kbitwrap.json: ")
        assert outcomes(report, run / "checkpoint-3")["base"] == "not measured"


# ----------------------------------------------------------------------------------------------------
# Saves that were interrupted, and files that are damaged.
# ----------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        for name in names:
            (checkpoint / name).unlink()

    return damage


def truncated(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        content = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(content[: len(content) // 2])

    return damage


def emptied(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


AFTER_THE_OPTIMIZER = ("scheduler.pt", "rng_state.pth", "trainer_state.json")
INTERRUPTIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "before the optimizer": (without("optimizer.pt", *AFTER_THE_OPTIMIZER), "trainer_state.json"),
    "the optimizer is gone": (without("optimizer.pt"), "scheduler.pt"),
    "in the optimizer": (truncated("optimizer.pt"), "optimizer.pt: expected a file of tensors, found a damaged one"),
    "before the state": (without("trainer_state.json"), "trainer_state.json"),
    "in the state": (truncated("trainer_state.json"), "trainer_state.json: cannot be read as JSON"),
    "in the adapter": (truncated(ADAPTER), f"{ADAPTER}: cannot be read as safetensors"),
}


@pytest.mark.parametrize("kind", INTERRUPTIONS)
def test_a_save_that_was_interrupted_is_found_and_the_checkpoint_before_it_is_named(kind: str, run: Path) -> None:
    damage, evidence = INTERRUPTIONS[kind]
    damage(run / "checkpoint-3")
    for report in (doctor(run), doctor(run / "checkpoint-3")):
        (finding,) = report.findings
        assert (finding.what, finding.where) == (INTERRUPTED, str(run / "checkpoint-3"))
        assert evidence in finding.evidence
        assert finding.remedy == f"take the checkpoint before it: {run / 'checkpoint-2'}"


def test_a_checkpoint_that_holds_nothing_is_an_interrupted_save(run: Path) -> None:
    emptied(run / "checkpoint-3")
    findings = doctor(run).findings
    assert {(finding.what, finding.where) for finding in findings} == {(INTERRUPTED, str(run / "checkpoint-3"))}


def test_a_damaged_adapter_of_the_last_save_names_the_newest_checkpoint(run: Path) -> None:
    truncated(ADAPTER)(run)
    (finding,) = doctor(run).findings
    assert finding.remedy == f"take the checkpoint before it: {run / 'checkpoint-3'}"
    shutil.rmtree(run / "checkpoint-2")
    truncated(ADAPTER)(run / "checkpoint-3")
    assert "there is none before it" in doctor(run / "checkpoint-3").findings[0].remedy


def test_a_damaged_model_is_a_fault_too(runs: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        folder = shutil.copytree(runs / "base", tmp_path / name)
        truncated(name)(folder)
        (finding,) = doctor(folder).findings
        assert finding.what == INTERRUPTED
        assert name in finding.evidence


def test_checkpoints_that_were_saved_without_an_optimizer_are_sound(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    trainers.trainer_for(trainers.adapt(zoo.load("llama")), tmp_path, **options).train()
    report = doctor(tmp_path)
    assert report.findings == ()
    assert "what the optimizer trained: no optimizer.pt, as save_only_model leaves it out" in report.not_measured


# ----------------------------------------------------------------------------------------------------
# Adapters.
# ----------------------------------------------------------------------------------------------------


CONFIGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "not JSON": lambda config: json.dumps(config)[:40],
    "not an object": lambda config: "[]",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_broken_adapter_config_is_found(kind: str, run: Path) -> None:
    path = run / "checkpoint-3" / "adapter_config.json"
    path.write_text(CONFIGS[kind](json.loads(path.read_text())))
    report = doctor(run)
    (finding,) = report.findings
    assert finding.what == INTERRUPTED
    assert str(path) in finding.evidence
    sound = dict.fromkeys([*OF_A_CHECKPOINT, "numerics"], "fine")
    unread = dict.fromkeys(["lora_B", "adapter values", "optimizer", "base"], "not measured")
    assert outcomes(report, path.parent) == {**sound, **unread, "files": "fault"}


def test_an_adapter_without_a_config_is_found(run: Path) -> None:
    (run / "adapter_config.json").unlink()
    (finding,) = doctor(run).findings
    assert (finding.what, finding.where) == (INTERRUPTED, str(run))


def test_an_adapter_that_was_saved_without_its_values_is_found(run: Path) -> None:
    stored = load_file(run / ADAPTER)
    name = min(stored)
    for tensors, evidence in (({}, "no tensor"), ({**stored, name: torch.empty(0)}, name)):
        save_file(tensors, run / ADAPTER)
        (finding,) = doctor(run).findings
        assert finding.what == EMPTY
        assert evidence in finding.evidence


def test_a_trained_head_beside_a_zero_lora_b_does_not_hide_it_and_is_not_said_to_add_nothing(tmp_path: Path) -> None:
    model = transformers.LlamaForSequenceClassification.from_pretrained(zoo.checkpoint("llama"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2))
    adapted.save_pretrained(tmp_path)
    for subject in (adapted, tmp_path):
        (finding,) = doctor(subject).findings
        assert finding.what == ZERO
        assert finding.evidence.startswith("LoRA adds nothing: ['base_model.model.model.layers.0.self_attn.q_proj")
        assert "score" not in finding.evidence
    with torch.no_grad():
        next(p for name, p in adapted.named_parameters() if "lora_B" in name).fill_(1)
    assert doctor(adapted).findings == ()


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning:peft")
def test_lora_of_embeddings_alone_that_adds_nothing_is_found(tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=2, target_modules=["embed_tokens"])
    peft.get_peft_model(zoo.load("llama"), settings).save_pretrained(tmp_path)
    (finding,) = doctor(tmp_path).findings
    assert finding.what == ZERO
    assert "lora_embedding_A" in finding.evidence


# ----------------------------------------------------------------------------------------------------
# The process.
# ----------------------------------------------------------------------------------------------------

SEGMENTS = "expandable segments are on, on a Jetson"


@pytest.fixture
def jetson(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that has the file by which a Jetson is known, and no settings of the allocator."""
    release = tmp_path / "nv_tegra_release"
    release.touch()
    monkeypatch.setattr("kbitwrap.checkpoints.doctor_run._OF_TEGRA", release)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_a_fault_of_a_process_on_a_jetson(name: str, jetson: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    assert outcomes(doctor(model), "this process") == {"allocator": "fine"}
    jetson.setenv(name, "garbage_collection_threshold:0.8, expandable_segments : True")
    report = doctor(model)
    (finding,) = report.findings
    assert (finding.what, finding.where) == (SEGMENTS, "this process")
    assert "garbage_collection_threshold:0.8" in finding.evidence
    assert "unsloth-zoo#1235" in finding.evidence
    for off in ("expandable_segments:True,expandable_segments:False", "expandable_segments:true"):  # torch refuses that
        jetson.setenv(name, off)
        assert not doctor(model)


def test_of_two_variables_with_settings_the_older_one_is_judged(jetson: pytest.MonkeyPatch) -> None:
    jetson.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    jetson.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not doctor(torch.nn.Linear(2, 2))


def test_expandable_segments_are_no_fault_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    report = doctor(torch.nn.Linear(2, 2))
    assert not report
    assert outcomes(report, "this process") == {}


def test_a_run_has_one_line_for_the_process(runs: Path, jetson: pytest.MonkeyPatch) -> None:
    report = doctor(runs / "run")
    assert [one.what for one in report.looked_at if one.where == "this process"] == ["allocator"]
