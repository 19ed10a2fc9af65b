"""The folder that an engine serves is the base of a training, dequantized, or the doctor names what differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kbitwrap import doctor, merge_checkpoint
from kbitwrap.cli import main
from kbitwrap.model.quantization import bitsandbytes_config
from support import zoo

NF4 = bitsandbytes_config("nf4", torch.bfloat16)
IT_IS_NOT = "it is not this base, dequantized"
LAYER = "model.layers.1.self_attn.v_proj.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "served"
    merge_checkpoint(zoo.checkpoint("llama"), None, folder, quantization_config=NF4, dtype=torch.bfloat16)
    return folder


def test_the_dequantized_base_is_told(served: Path) -> None:
    report = doctor(served, base=zoo.checkpoint("llama"), quant=NF4)
    assert report.findings == ()
    (line,) = (one for one in report.looked_at if one.what == "dequantized base")
    assert line.evidence.endswith("tensors are those of the base, dequantized")
    assert report.not_measured == ()


@pytest.mark.parametrize("name", ["the 16-bit base", "another quantization", "one value"])
def test_another_folder_is_not_this_base(name: str, served: Path, tmp_path: Path) -> None:
    folder, settings = tmp_path / "served", NF4
    shutil.copytree(zoo.checkpoint("llama") if name == "the 16-bit base" else served, folder)
    if name == "another quantization":
        settings = bitsandbytes_config("int8", None)
    elif name == "one value":
        tensors = load_file(folder / "model.safetensors")
        tensors[LAYER][3, 5] += 0.25
        save_file(tensors, folder / "model.safetensors")
    report = doctor(folder, base=zoo.checkpoint("llama"), quant=settings)
    (finding,) = report.findings
    assert finding.what == IT_IS_NOT
    assert "_proj.weight" in finding.evidence
    if name == "one value":
        assert finding.evidence == LAYER


def test_a_tensor_that_lacks_or_is_too_many_is_named(served: Path, tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.copytree(served, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["other.weight"] = tensors.pop(LAYER)
    save_file(tensors, folder / "model.safetensors")
    (finding,) = doctor(folder, base=zoo.checkpoint("llama"), quant=NF4).findings
    assert finding.evidence == f"other.weight, {LAYER}"


def test_without_the_quantization_it_is_not_measured(served: Path) -> None:
    report = doctor(served, base=zoo.checkpoint("llama"))
    assert report.findings == ()
    assert "dequantized base" not in [one.what for one in report.looked_at]


def test_of_a_quantized_folder_the_adapter_is_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    zoo.load("llama", "int8").save_pretrained(folder)
    report = doctor(folder, base=zoo.checkpoint("llama"), quant=NF4)
    (told,) = report.not_measured
    assert told.startswith("whether it is a merge")
    (line,) = (str(one) for one in report.looked_at if one.what == "merge")
    assert line == f"{folder}: merge: not measured: give the adapter that was merged (adapter, --adapter)"


def test_the_command_answers_by_its_status(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = str(zoo.checkpoint("llama"))
    assert main(["doctor", str(served), "--base", base, "--quant", "nf4"]) == 0
    assert main(["doctor", str(served), "--base", base, "--quant", "fp4"]) == 1
    assert IT_IS_NOT in capsys.readouterr().out
