"""How much of an adapter the 4-bit weights hold that it was merged into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import StrPath
from ..export.adapted import AdaptedTensor
from ..export.adapters import ActiveLayer, active_adapters, is_tuner_layer
from ..model.quantization import is_quantized_layer
from ..model.tree import ModelTree
from .adapters import read_adapter
from .base import adapted_base, load_base
from .reader import saved_manifest


@dataclass(frozen=True)
class Survival:
    """The part of an adapter's delta that is left, over all layers that were measured.

    Attributes:
        layers: The fqns of the layers whose weights are not the base's.
        kept: The part of the delta that their change holds.
        error: The size of what their change is off by, as a part of the delta's.
    """

    layers: Sequence[str]
    kept: float
    error: float


def measure_merge(
    merged: Any, dtype: torch.dtype | None, base: StrPath, adapter: StrPath
) -> Survival:
    """Compare the quantized weights of a model with those of a base and with what an adapter adds to them."""
    layers = {
        node.fqn: node.module
        for node in ModelTree(merged).base
        if is_quantized_layer(node.module)
    }
    saved = read_adapter(Path(adapter))
    manifest = saved_manifest(saved.folder)
    settings = merged.config.quantization_config.to_dict()
    trained = load_base(base, saved, settings, dtype, manifest=manifest)
    adapted = adapted_base(trained, saved)

    changed: list[str] = []
    wanted, done, overlap = 0.0, 0.0, 0.0  # squares of lengths, and a product
    for node in ModelTree(adapted).nodes:
        if node.fqn not in layers or not is_tuner_layer(node.module):
            continue
        layer = ActiveLayer(node.fqn, node.module, active_adapters(node.module))
        trained_on = layer.layer.get_base_layer()
        weight = AdaptedTensor(trained_on, "weight", [layer])
        after = AdaptedTensor(layers[node.fqn], "weight")
        is_changed = False
        for rows in weight.blocks():
            delta = weight.delta(rows)
            change = after.base(rows).cpu().double() - weight.base(rows)
            is_changed = is_changed or bool(change.any())
            wanted += delta.square().sum().item()
            done += change.square().sum().item()
            overlap += (change * delta).sum().item()
        if is_changed:
            changed.append(node.fqn)

    if not wanted:
        return Survival([], 0.0, 0.0)

    off = max(done - 2 * overlap + wanted, 0)  # the square of their difference
    return Survival(changed, overlap / wanted, (off / wanted) ** 0.5)
