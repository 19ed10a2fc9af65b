"""A quantization that is given or recorded is never denied where it is right, and is found out where it is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from kbitwrap import DoctorReport, QuantKind, doctor, merge_checkpoint
from kbitwrap.checkpoints.stamp import stamp_adapter
from kbitwrap.model.quantization import bitsandbytes_config
from support import training, zoo
from support.files import tensors_of
from support.thorough import few

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# the length of the delta of each layer, as a part of its weight's
SIZES = {"small": 0.003, "medium": 0.03, "large": 0.2}


def make(size: str, folder: Path) -> tuple[Path, Path]:
    """A base that is saved in bfloat16, and an adapter."""
    base = LlamaForCausalLM.from_pretrained(zoo.checkpoint("llama"), dtype=torch.bfloat16, num_hidden_layers=1)
    base.save_pretrained(folder / "base")
    adapted = training.adapt("llama", base, target_modules="all-linear")
    for module in adapted.modules():
        if hasattr(module, "lora_B"):
            wanted = SIZES[size] * module.base_layer.weight.norm()
            module.lora_B["default"].weight.data *= wanted / module.get_delta_weight("default").norm()
    adapted.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def examined_as_each_kind(merged: Path, base: Path, adapter: Path) -> Iterator[tuple[QuantKind, DoctorReport]]:
    for kind in QuantKind:
        given = bitsandbytes_config(kind) or False
        yield kind, doctor(merged, base=base, adapter=adapter, quant=given)


@pytest.mark.parametrize(
    ("kind", "size"), few(itertools.product(QuantKind, SIZES), [(QuantKind.NF4, "small"), (QuantKind.NF4, "large")])
)
def test_a_merge_is_told_to_be_in_its_kind_and_no_other(kind: QuantKind, size: str, tmp_path: Path) -> None:
    base, adapter = make(size, tmp_path)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=bitsandbytes_config(kind) or False)
    for dtype in DTYPES:
        copy = tmp_path / str(dtype)
        LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype).save_pretrained(copy)
        for given, report in examined_as_each_kind(copy, base, adapter):
            assert report.merge is not None
            assert report.merge.faults == ()
            told = [finding.what for finding in report.findings]
            if given is kind:
                assert (told, report.merge.onto) == ([], "trained")
            elif kind is QuantKind.NONE:
                assert (told, report.merge.onto) == ([], "original")
            else:
                assert told == [f"a merge in {kind}; the run was given as {given}"]
                assert report.merge.onto == "other"


@pytest.mark.parametrize(("size", "dtype"), few(itertools.product(SIZES, DTYPES), [("large", torch.bfloat16)]))
def test_a_merge_onto_the_original_weights_denies_no_kind(size: str, dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapter = make(size, tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(base, dtype=dtype)
    PeftModel.from_pretrained(loaded, adapter).merge_and_unload().save_pretrained(tmp_path / "merged")
    for given, report in examined_as_each_kind(tmp_path / "merged", base, adapter):
        assert report.findings == ()
        assert report.merge is not None
        assert report.merge.onto == ("trained" if given is QuantKind.NONE else "original")


@pytest.mark.parametrize("size", few(SIZES, ["large"]))
def test_a_merge_in_another_kind_than_the_manifest_records_is_one_finding(size: str, tmp_path: Path) -> None:
    base, adapter = make(size, tmp_path)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=bitsandbytes_config("nf4"))
    manifest = stamp_adapter(adapter, base, quantization_config=bitsandbytes_config("nf4-double"))
    recorded = manifest.model_copy(update={"unknown": ()})  # as if it was written in training
    for known, said in ((manifest, "was stamped"), (recorded, "is recorded")):
        known.save(adapter / "kbitwrap.json")
        report = doctor(tmp_path / "merged", base=base, adapter=adapter)
        (finding,) = report.findings
        assert finding.what == f"a merge in nf4; the run {said} as nf4-double"
        assert "down_proj" in finding.evidence
        assert report.merge is not None
        assert str(report.merge).endswith(f"added to the base's weights in nf4; the run {said} as nf4-double")


def test_what_is_broken_is_told_beside_the_kind(tmp_path: Path) -> None:
    base, adapter = make("large", tmp_path)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=bitsandbytes_config("nf4"))
    tensors = tensors_of(tmp_path / "merged")
    del tensors["model.layers.0.self_attn.v_proj.weight"]
    save_file(tensors, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    report = doctor(tmp_path / "merged", base=base, adapter=adapter, quant="nf4-double")
    told = [finding.what for finding in report.findings]
    assert told == ["a merge in nf4; the run was given as nf4-double", "missing from the checkpoint"]
