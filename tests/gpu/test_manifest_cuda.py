"""Manifests of models on a CUDA device. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, Manifest, ManifestMismatchError
from kbitwrap.tensors.bits import content_digest
from support import zoo
from support.snapshot import Snapshot
from support.training import adapt, step

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]

MIB = 2**20


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 4096, 524288, 524289, 70 * MIB + 3])
def test_the_digest_is_that_of_the_cpu(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert content_digest(data.cuda()) == content_digest(data)
    if num_bytes > 8:
        assert content_digest(data.cuda()[1:]) == content_digest(data[1:])


def test_the_digest_holds_little_beside_the_tensor() -> None:
    tensor = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    content_digest(tensor)
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before < 80 * MIB


@pytest.mark.parametrize("quant", ["nf4", "nf4-double", "int8"])
@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_a_model_on_the_device(quant: str, precision: str) -> None:
    model = zoo.load("llama", quant, device_map={"": 0})
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = adapt("llama", model)
        step("llama", peft_model)
        state = Snapshot(model)
        manifest = Manifest.from_json(prepared.manifest().to_json())
        assert state.diff(Snapshot(model)) == []
        assert manifest.after.memory.allocated_bytes is not None
        assert manifest.after.memory.reserved_bytes >= manifest.after.memory.allocated_bytes > 0
        manifest.check(peft_model)
    manifest.check(model)
    fresh = zoo.load("llama", quant, device_map={"": 0})
    manifest.check(fresh)
    fresh.model.norm.weight.data.view(torch.int16)[3] ^= 1
    with pytest.raises(ManifestMismatchError) as caught:
        manifest.check(fresh)
    assert list(caught.value.different) == ["model.norm.weight"]


def test_a_model_on_the_device_is_that_on_the_cpu() -> None:
    model = nn.ModuleList([nn.Linear(300, 301), nn.BatchNorm1d(7), nn.LayerNorm(301)]).bfloat16()
    with KbitPreparedModel(model, precision="full") as prepared:
        manifest = prepared.manifest()
    manifest.check(model.cuda())
