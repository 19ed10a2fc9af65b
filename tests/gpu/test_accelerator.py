"""On an accelerator of any type: nothing asks for it by name. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kbitwrap
from kbitwrap import KbitPreparedModel, Manifest
from kbitwrap.manifest.manifest import MANIFEST_NAME
from kbitwrap.preparation.process import plain_mode
from support import zoo
from support.training import adapt, step

pytestmark = [
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


def kind() -> str:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found.type


def module() -> Any:
    return torch.get_device_module(kind())


def load() -> nn.Module:
    return zoo.load("llama", "nf4", device_map={"": f"{kind()}:0"})


def test_suspending_keeps_the_random_state_of_the_device() -> None:
    model = load()
    prepared = KbitPreparedModel(model).prepare()
    state, drawn = module().get_rng_state(), []
    for _ in range(2):
        with prepared.suspended():
            drawn.append(torch.rand(8, device=kind()).cpu())
    assert torch.equal(module().get_rng_state(), state)
    assert torch.equal(drawn[0], drawn[1])


class DrawingNorm(nn.LayerNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden + torch.rand_like(hidden))


def test_a_norm_that_draws_numbers_draws_them_once() -> None:
    model = nn.Sequential(DrawingNorm(8)).to(kind(), torch.bfloat16)
    hidden = torch.zeros(2, 8, device=kind(), dtype=torch.bfloat16)
    states = []
    for is_prepared in (False, True):
        module().manual_seed(0)
        if is_prepared:
            KbitPreparedModel(model, norm_modules=["DrawingNorm"]).prepare()
        model(hidden)
        states.append(module().get_rng_state())
    assert torch.equal(states[0], states[1])


def test_nothing_is_computed_under_autocast_while_preparing() -> None:
    with torch.autocast(kind(), torch.bfloat16):
        assert torch.is_autocast_enabled(kind())
        with plain_mode():
            assert not torch.is_autocast_enabled(kind())


def test_a_merge_under_autocast_is_the_merge_without(tmp_path: Path) -> None:
    model = load()
    with KbitPreparedModel(model) as prepared:
        adapt("llama", model, init_lora_weights=False)
        plain = {fqn: tensor.cpu() for fqn, tensor in prepared.merged_weights()}
        with torch.autocast(kind(), torch.bfloat16):
            found = {fqn: tensor.cpu() for fqn, tensor in prepared.merged_weights()}
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in plain.items())


def test_a_manifest_says_on_which_device_it_was_made_and_doctor_looks_there(tmp_path: Path) -> None:
    model = load()
    folder = tmp_path / "adapter"
    with KbitPreparedModel(model) as prepared:
        peft_model = adapt("llama", model)
        manifest = prepared.manifest()
        step("llama", peft_model)
        peft_model.save_pretrained(folder)
        manifest.save(folder / MANIFEST_NAME)
    assert manifest.before.memory.allocated_bytes
    assert Manifest.load(folder / MANIFEST_NAME).device_type == kind()
    report = kbitwrap.doctor(folder, base=zoo.checkpoint("llama"))
    assert not any("base" in said for said in (*report.not_measured, *(found.what for found in report.findings)))
