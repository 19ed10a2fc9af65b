"""One parameter's base and its merged value, by rows."""

from __future__ import annotations

import pytest
import torch

import kbitwrap.export.merged as merged_module
from kbitwrap.export.adapters import ActiveLayer, active_adapters
from kbitwrap.export.merged import merge_rows
from support.layers import LORA, adapted_layers
from support.merging import base_weight, lora_weight


@pytest.mark.parametrize("kind", ["nf4", "int8", "linear"])
def test_rows_of_a_layer_are_those_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = adapted_layers(kind, 64, **LORA).get_base_model()[0]
    base = layer.get_base_layer()
    layers = [ActiveLayer("0", layer, active_adapters(layer))]
    assert [rows for rows, _, _ in merge_rows(base, "weight", layers)] == [...]
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 4 * 64 * 24)
    blocks = [*merge_rows(base, "weight", layers)]
    assert [rows for rows, _, _ in blocks] == [slice(0, 24), slice(24, 48), slice(48, 64)]
    before = torch.cat([values for _, values, _ in blocks]).double()
    torch.testing.assert_close(before, base_weight(base), rtol=1e-6, atol=1e-6)
    merged = torch.cat([values for _, _, values in blocks])
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged.double(), lora_weight(layer), rtol=1e-6, atol=1e-6)


def test_without_adapters_the_merged_rows_are_the_base() -> None:
    base = adapted_layers("nf4", 64, **LORA).get_base_model()[0].get_base_layer()
    [(_, before, merged)] = merge_rows(base, "weight", [])
    assert torch.equal(merged, before)


def test_an_output_that_is_nearly_zero_by_chance_refuses_no_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = adapted_layers("linear", 64, **LORA).get_base_model()[0].float()
    base = layer.get_base_layer()
    (probe,) = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in (base.weight, layer.lora_A["default"].weight):
            weight -= torch.outer(weight @ probe, probe) / probe.dot(probe)
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 4 * 64)
    merged = torch.cat(
        [values for _, _, values in merge_rows(base, "weight", [ActiveLayer("0", layer, active_adapters(layer))])]
    )
    torch.testing.assert_close(merged.double(), lora_weight(layer), rtol=1e-6, atol=1e-6)
