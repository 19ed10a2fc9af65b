"""`kbitwrap doctor`: what it prints, and what its exit status says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from kbitwrap import doctor
from kbitwrap.cli import main
from support import training, zoo

NO_MANIFEST = "no kbitwrap.json: train with KbitTrainerCallback, or save prepared.manifest() beside the adapter"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    training.adapt("llama", zoo.load("llama")).save_pretrained(folder)
    return folder


@pytest.fixture
def broken(adapter: Path, tmp_path: Path) -> Path:
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = min(tensors)
    save_file({**tensors, name: tensors[name] * torch.inf}, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_doctor_prints_what_it_looked_at_line_by_line(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(adapter)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{adapter}: no faults found",
        "",
        f"looked at in {adapter}:",
        "  files: fine: adapters, weights and configs can be read",
        "  lora_B: fine: not all of 10 are zero",
        "  adapter config: fine: PEFT reads it: 'LORA'",
        "  adapter values: fine: 20 tensors are finite",
        "  adapter dtypes: fine: float32",
        f"  base: not measured: {NO_MANIFEST}",
    ]


def test_doctor_names_each_fault_with_evidence_and_remedy(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(broken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{broken}: 1 fault found"
    assert lines[2:4] == ["an adapter is not finite", f"  where: {broken}"]
    assert lines[4].startswith("  evidence: ['base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'")
    assert lines[5].startswith("  remedy: ")
    assert "  adapter values: fault: an adapter is not finite" in lines


def test_doctor_prints_its_report_as_json(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(broken), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == doctor(broken).to_dict()


def test_doctor_measures_with_a_base_and_an_adapter(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo.load("llama").save_pretrained(tmp_path / "base")
    assert main(["doctor", str(tmp_path / "base")]) == 0
    assert "  merge: not measured: give the folders of both" in capsys.readouterr().out
    training.adapt("llama", zoo.load("llama")).merge_and_unload().save_pretrained(tmp_path / "merged")
    options = ["--base", str(tmp_path / "base"), "--adapter", str(adapter)]
    assert main(["doctor", str(tmp_path / "base"), *options]) == 1
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "not a merge: model.layers.0.mlp.down_proj.weight: no delta, and 9 more"
    assert lines[0] == "0.0% of the delta is there, with an error of 100.0% of it; the worst tensors:"
    assert main(["doctor", str(tmp_path / "merged"), *options]) == 1
    assert "% of the delta survived" in capsys.readouterr().out


def test_doctor_says_first_that_a_merge_is_one(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(zoo.checkpoint("llama"))
    assert main(["merge", base, str(adapter), "--out", str(tmp_path / "out"), "--quant", "nf4"]) == 0
    capsys.readouterr()
    options = ["--base", base, "--adapter", str(adapter)]
    assert main(["doctor", str(tmp_path / "out"), *options, "--quant", "nf4"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "a merge: 100.0% of what the adapter learned, added to the weights that it was trained on"


@pytest.mark.parametrize("quant", ["nf4", "nf4-double", "fp4", "fp4-double", "int8"])
def test_doctor_finds_the_quantization_that_nothing_records_and_says_so(
    quant: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(zoo.checkpoint("llama"))
    options = ["--base", base, "--adapter", str(adapter)]
    assert main(["merge", base, str(adapter), "--out", str(tmp_path / "out"), "--quant", quant]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "out"), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    taken = f"in {quant}, which the checkpoint fits"
    onto = f"added to the base's weights {taken}; nothing records whether it was trained on these"
    assert said.startswith(f"a merge: 100.0% of what the adapter learned, {onto}")
    assert f"nothing records it, so the base's weights were taken {taken}; give the quantization" in said


def test_an_adapter_on_embeddings_alone_fits_a_quantization_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = str(zoo.checkpoint("llama")), str(tmp_path / "adapter")
    config = LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(zoo.load("llama"), config).save_pretrained(adapter, save_embedding_layers=False)
    assert main(["merge", base, adapter, "--out", str(tmp_path / "out"), "--quant", "nf4"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "out"), "--base", base, "--adapter", adapter]) == 0
    assert "in nf4, which the checkpoint fits" in " ".join(capsys.readouterr().out.split())


def test_doctor_does_not_say_that_an_adapter_was_trained_on_a_base_that_nothing_records(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(zoo.checkpoint("llama"))
    options = ["--base", base, "--adapter", str(adapter)]
    assert main(["merge", base, str(adapter), "--out", str(tmp_path / "out"), "--quant", "none"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "out"), *options]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    onto = "added to the base's weights as they are; nothing records whether it was trained on these"
    assert first == f"a merge: 100.0% of what the adapter learned, {onto}"
    assert main(["doctor", base, *options]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("not a merge onto the base's weights as they are: ")


@pytest.mark.parametrize("options", [[], ["--base", "absent", "--adapter", "absent"]])
def test_doctor_of_what_is_not_there_is_bad_input(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options:
        zoo.load("llama").save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kbitwrap: error: ")
    assert error.count("\n") == 1
