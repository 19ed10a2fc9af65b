"""The forms of a merged export: partly quantized, and quantized as the base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from torch import nn

from kbitwrap import ExportReport, KbitPreparedModel
from support import zoo
from support.files import tensors_of
from support.merging import export, layers_of

QUANTS = ("nf4", "nf4-double", "fp4", "int8")
ATTENTION = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "mixtral": ["q_proj", "v_proj"], "t5": ["q", "v"]}


def adapted(name: str, quant: str, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and an adapter on it with a delta of a few hundredths of the weights."""
    model = zoo.load(name, quant)
    settings.setdefault("target_modules", ATTENTION[name])
    adapter = get_peft_model(model, peft.LoraConfig(r=4, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for fqn, parameter in adapter.named_parameters():
            if "lora_B" in fqn:
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    return model, adapter


def export_of(name: str, quant: str, folder: Path, **options: Any) -> ExportReport:
    model, adapter = adapted(name, quant)
    return export(adapter, folder, base=model, **options)


def codes_of(folder: Path, fqn: str) -> torch.Tensor:
    return tensors_of(folder)[f"{fqn}.weight"]


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("name", ATTENTION)
def test_a_quantized_merge_changes_nothing_but_codes_of_adapted_layers(name: str, quant: str, tmp_path: Path) -> None:
    model, adapter = adapted(name, quant)
    touched = {f"{fqn}.weight" for fqn in layers_of(adapter)}
    with KbitPreparedModel(model, **zoo.fields(name)) as prepared:
        prepared.export(tmp_path / "base", model=adapter)
        report = prepared.export(tmp_path / "merged", merge_adapters=True, merge_as="quantized", model=adapter)

    base, merged = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "merged")
    different = {fqn for fqn in base if not torch.equal(base[fqn], merged[fqn])}
    assert base.keys() == merged.keys()
    assert different == touched == report.tensors.keys()
    assert report.num_bytes == sum(tensor.nbytes for tensor in base.values())
    assert (tmp_path / "merged/config.json").read_text() == (tmp_path / "base/config.json").read_text()
