"""One parameter's base and its merged value, by rows."""

from __future__ import annotations

import pytest
import torch

import kbitwrap.export.adapted as adapted_module
from kbitwrap.export.adapted import AdaptedTensor
from kbitwrap.export.adapters import ActiveLayer, active_adapters
from support.layers import LORA, adapted_layers
from support.merging import base_weight, lora_weight


@pytest.mark.parametrize("kind", ["nf4", "int8", "linear"])
def test_rows_of_a_layer_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = adapted_layers(kind, 64, **LORA).get_base_model()[0]
    base = layer.get_base_layer()
    tensor = AdaptedTensor(base, "weight", [ActiveLayer("0", layer, active_adapters(layer))])
    assert tensor.blocks() == [...]
    monkeypatch.setattr(adapted_module, "_BLOCK_BYTES", 4 * 64 * 24)
    blocks = tensor.blocks()
    assert blocks == [slice(0, 24), slice(24, 48), slice(48, 64)]
    before = torch.cat([tensor.base(rows) for rows in blocks]).double()
    torch.testing.assert_close(before, base_weight(base), rtol=1e-6, atol=1e-6)
    merged = torch.cat([tensor.merged(rows) for rows in blocks])
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), lora_weight(layer), rtol=1e-6, atol=1e-6)


def test_without_adapters_the_merged_rows_are_the_base() -> None:
    base = adapted_layers("nf4", 64, **LORA).get_base_model()[0].get_base_layer()
    tensor = AdaptedTensor(base, "weight")
    assert torch.equal(tensor.merged(...), tensor.base(...))
