"""The quantization of a base that nothing records is told by a merged weight, with the base loaded once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kbitwrap import QuantKind, doctor, merge_checkpoint
from kbitwrap.checkpoints import fitting
from kbitwrap.checkpoints.adapters import read_adapter
from kbitwrap.checkpoints.sides import read_merged
from kbitwrap.model.quantization import bitsandbytes_config
from support import training, zoo
from support.thorough import every_other, few

KINDS = [kind for kind in QuantKind if kind is not QuantKind.NONE]


def make(name: str, folder: Path, dtype: torch.dtype, **lora: Any) -> tuple[Path, Path]:
    """A base that is saved in a dtype, and an adapter."""
    base, adapter = folder / "base", folder / "adapter"
    zoo.load(name, None, dtype).save_pretrained(base)
    training.adapt(name, zoo.load(name), **lora).save_pretrained(adapter)
    return base, adapter


# What is merged, the dtype that its base is saved in, and the adapter.
CASES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("llama", torch.bfloat16, {}),
    ("llama", torch.float32, {}),
    ("llama", torch.bfloat16, {"use_dora": True}),
    ("llama", torch.bfloat16, {"modules_to_save": True}),
    ("gpt2", torch.bfloat16, {}),  # weights that lie transposed
]


@pytest.mark.parametrize(
    ("case", "kind"),
    few(
        itertools.product(CASES, KINDS),
        [(CASES[0], KINDS[0]), (CASES[4], KINDS[2])],
    ),
)
def test_the_quantization_is_found_and_the_base_is_loaded_once(
    case: tuple[str, torch.dtype, dict[str, Any]], kind: QuantKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, saved_in, lora = case
    base, adapter = make(name, tmp_path, saved_in, **lora)
    config = bitsandbytes_config(kind, torch.bfloat16)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=config, dtype=torch.bfloat16)
    loaded = []
    load = fitting.load_adapted

    def counted(*arguments: Any) -> Any:
        loaded.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(fitting, "load_adapted", counted)
    merged = read_merged(tmp_path / "merged")
    found = fitting.fitting_quantization(merged, base, read_adapter(adapter), [torch.bfloat16])
    assert (found.kind, len(loaded)) == (kind, 1)


@pytest.mark.thorough
def test_no_quantization_is_found_where_the_base_was_merged_as_it_is(tmp_path: Path) -> None:
    base, adapter = make("llama", tmp_path, torch.bfloat16)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=False)
    found = fitting.fitting_quantization(read_merged(tmp_path / "merged"), base, read_adapter(adapter), [None])
    assert found.kind is QuantKind.NONE
    assert doctor(tmp_path / "merged", base=base, adapter=adapter).merge.assumed == "as they are"


@pytest.mark.thorough
def test_what_fits_no_quantization_is_measured_by_the_one_told(tmp_path: Path) -> None:
    base, adapter = make("llama", tmp_path, torch.bfloat16)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=False)
    nf4 = bitsandbytes_config("nf4", None)
    report = doctor(tmp_path / "merged", base=base, adapter=adapter, quant=nf4)
    assert (report.merge.onto, report.findings) == ("original", ())


def test_a_mixed_merge_is_measured_by_its_own_quantization_without_what_was_merged(tmp_path: Path) -> None:
    base, adapter = make("llama", tmp_path, torch.bfloat16, target_modules=["q_proj", "down_proj"])
    nf4 = bitsandbytes_config("nf4", torch.bfloat16)
    merge_checkpoint(base, adapter, tmp_path / "merged", merge_as="mixed", quantization_config=nf4)
    report = doctor(tmp_path / "merged", base=base, adapter=adapter)
    assert (report.merge.onto, report.findings) == ("trained", ())


def test_the_quantization_is_found_of_a_merge_of_another_adapter(tmp_path: Path) -> None:
    base, adapter = make("llama", tmp_path, torch.bfloat16)
    other = training.adapt("llama", zoo.load("llama"))
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    other.save_pretrained(tmp_path / "other")
    double = bitsandbytes_config("nf4-double", torch.bfloat16)
    merge_checkpoint(base, tmp_path / "other", tmp_path / "merged", quantization_config=double)
    found = fitting.fitting_quantization(
        read_merged(tmp_path / "merged"), base, read_adapter(adapter), [torch.bfloat16]
    )
    assert found.kind is QuantKind.NF4_DOUBLE


@pytest.mark.thorough
@pytest.mark.parametrize("value", every_other([0.0, float("nan")]))
def test_a_first_weight_that_tells_nothing_leaves_the_next_to_tell(value: float, tmp_path: Path) -> None:
    base, adapter = make("llama", tmp_path, torch.bfloat16)
    nf4 = bitsandbytes_config("nf4", torch.bfloat16)
    merge_checkpoint(base, adapter, tmp_path / "merged", quantization_config=nf4)
    (file,) = (tmp_path / "merged").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name].fill_(value)
    save_file(tensors, file, {"format": "pt"})
    report = doctor(tmp_path / "merged", base=base, adapter=adapter)
    (found,) = report.findings
    assert name in found.evidence
    assert report.merge.assumed.startswith("in nf4")
