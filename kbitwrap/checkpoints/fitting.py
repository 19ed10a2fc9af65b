"""The quantization of a base that nothing records, as a merged checkpoint tells it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import QuantKind, StrPath
from ..export.plain import is_transposed
from ..model.bitsandbytes_layers import dequantizer, make_pending
from ..model.pretrained import layers_to_quantize
from ..model.quantization import bitsandbytes_config
from ..tensors.lazy import materialize
from .adapters import SavedAdapter
from .base import TrainedBase, load_adapted
from .sides import MergedSide, Side, merged_onto, plain_side

_WEIGHT = ".weight"
# the layers of one kind of quantization, by their fqns, without weights
_Layers = Mapping[str, nn.Module]

# The least part of what a quantization changes in a weight that a checkpoint fitting it
# holds: 1 is all of it, and one of another form of the base holds 0, whatever was added.
_LEAST_HELD = 0.5
# The largest difference of a weight from a merge, as a part of its length, that another
# adapter explains; larger ones are of other weights.
_MOST_OFF = 0.5
_MOST_WEIGHTS = 3  # that are asked: one that is broken, or zero, tells nothing


@dataclass(frozen=True)
class Fitting:
    """A quantization that a merged weight fits.

    Attributes:
        kind: The kind of quantization.
        config: The config for ``from_pretrained``.
    """

    kind: QuantKind
    config: Any


def fitting_quantization(
    merged: MergedSide,
    base: StrPath,
    saved: SavedAdapter,
    dtypes: Sequence[torch.dtype | None],
    trust_remote_code: bool = False,
) -> Fitting | None:
    """The quantization whose values, with the adapter merged, one weight of a checkpoint holds.

    ``None`` where it holds those of the base as it is, or of no quantization of
    bitsandbytes. The base is loaded once, unquantized; of its weights one alone is
    quantized, in each kind and from each dtype that the run may have had (``None`` for the base's),
    or the next where that tells none.
    """
    trained, adapted = _load(base, saved, trust_remote_code)
    side = plain_side(adapted, is_merged=False)
    kinds = [kind for kind in QuantKind if kind.settings]
    configs = {kind: bitsandbytes_config(kind) for kind in kinds}
    layers = {}
    for kind, config in configs.items():
        _, layers[kind] = layers_to_quantize(trained.model, config)

    names = _quantized_weights(layers[QuantKind.NF4], side, saved, merged)
    for name in names[:_MOST_WEIGHTS]:
        nearest = _kind_of(name, layers, dtypes, adapted, side, merged)
        if nearest is not None:
            return Fitting(nearest, configs[nearest])

    return None


def _kind_of(
    name: str,
    layers: Mapping[QuantKind, _Layers],
    dtypes: Sequence[torch.dtype | None],
    adapted: nn.Module,
    side: Side,
    merged: MergedSide,
) -> QuantKind | None:
    """The kind of quantization whose values, with the adapter merged, a weight holds; ``None`` where it tells none."""
    fqn = side.names_in_model()[name]
    original = materialize(side.saved[name])
    found = materialize(merged.tensors[name]).float()

    def merged_with(values: Tensor) -> Tensor:
        weight = merged_onto(adapted, {fqn: values})[fqn]
        return materialize(weight).float().to(found.device)

    as_it_is = merged_with(original)
    difference = found - as_it_is
    nearest = None
    least = min(float(difference.norm()), _MOST_OFF * float(as_it_is.norm()))
    for kind, dtype in itertools.product(layers, dtypes):
        layer = layers[kind][fqn.removesuffix(_WEIGHT)]
        in_kind = merged_with(_dequantized(layer, original.to(dtype or original.dtype)))
        change = in_kind - as_it_is
        held = float((difference * change).sum() / change.square().sum())
        off = float((found - in_kind).norm())
        if held >= _LEAST_HELD and off < least:
            nearest, least = kind, off

    return nearest


def _load(
    base: StrPath,
    saved: SavedAdapter,
    trust_remote_code: bool,
) -> tuple[TrainedBase, nn.Module]:
    """The base, unquantized, and the same with the adapter on it."""
    with warnings.catch_warnings():
        # the layers that were trained were quantized, and lay otherwise
        warnings.filterwarnings("ignore", r"fan_in_fan_out is set to", UserWarning)
        return load_adapted(base, saved, None, False, None, "cpu", trust_remote_code)


def _quantized_weights(
    layers: _Layers, side: Side, saved: SavedAdapter, merged: MergedSide
) -> list[str]:
    """The names of the matrices that bitsandbytes quantizes, and the checkpoint holds.

    Those that the adapter trained whole are left out.
    """
    weights = {f"{fqn}{_WEIGHT}" for fqn in layers}
    fqns = side.names_in_model()
    names = []
    for name, tensor in side.saved.items():
        found = merged.tensors.get(name)
        if found is None or found.shape != tensor.shape:
            continue
        if fqns[name] in weights and fqns[name] not in saved.held:
            names.append(name)

    return names


def _dequantized(layer: nn.Module, original: Tensor) -> Tensor:
    """The values of a layer's weight, quantized, as the weight lies in files."""
    make_pending(layer, original)
    values = dequantizer(layer)(...)
    return values.t() if is_transposed(layer) else values
