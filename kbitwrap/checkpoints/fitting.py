"""The quantization of a base that nothing records, as a merged checkpoint tells it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import QuantKind, StrPath
from ..export.plain import is_transposed
from ..model.bitsandbytes_layers import dequantizer, make_pending
from ..model.pretrained import layers_to_quantize
from ..tensors.lazy import materialize
from .adapters import SavedAdapter
from .base import TrainedBase, load_adapted
from .sides import MergedSide, Side, merged_onto, plain_side

_WEIGHT = ".weight"

# The largest difference of a weight from a merge, as a part of its length: rounding to
# half takes up to 2**-9, and that of the base before it as much.
_MOST_OFF = 2.0**-7


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
    dtype: torch.dtype | None,
    trust_remote_code: bool = False,
) -> Fitting | None:
    """The quantization whose values, with the adapter merged, one weight of a checkpoint holds.

    ``None`` where it holds those of the base as it is, or of no quantization of
    bitsandbytes. The base is loaded once, unquantized; of its weights one alone is
    quantized, in each kind.
    """
    trained, adapted = _load(base, saved, dtype, trust_remote_code)
    side = plain_side(adapted, is_merged=False)
    name = _quantized_weight(trained.model, side, saved, merged)
    if name is None:
        return None

    fqn = side.names_in_model()[name]
    original = materialize(side.saved[name])
    found = materialize(merged.tensors[name]).float()

    def off(values: Tensor) -> float:
        weight = merged_onto(adapted, {fqn: values})[fqn]
        return _off(found, materialize(weight).float())

    nearest = None
    least = off(original)
    for kind, config in _configs().items():
        layer = layers_to_quantize(trained.model, config)[fqn.removesuffix(_WEIGHT)]
        of_kind = off(_dequantized(layer, original))
        if of_kind < min(least, _MOST_OFF):
            nearest, least = Fitting(kind, config), of_kind

    return nearest


def _configs() -> dict[QuantKind, Any]:
    """The configs of all kinds of quantization."""
    from transformers import BitsAndBytesConfig

    kinds = [kind for kind in QuantKind if kind.settings]
    return {kind: BitsAndBytesConfig(**kind.settings) for kind in kinds}


def _load(
    base: StrPath,
    saved: SavedAdapter,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
) -> tuple[TrainedBase, nn.Module]:
    """The base, unquantized, and the same with the adapter on it."""
    with warnings.catch_warnings():
        # the layers that were trained were quantized, and lay otherwise
        warnings.filterwarnings("ignore", r"fan_in_fan_out is set to", UserWarning)
        return load_adapted(base, saved, None, False, dtype, "cpu", trust_remote_code)


def _quantized_weight(
    model: nn.Module, side: Side, saved: SavedAdapter, merged: MergedSide
) -> str | None:
    """The name of the first matrix that bitsandbytes quantizes, and the checkpoint holds.

    It is none that the adapter trained whole.
    """
    config = _configs()[QuantKind.NF4]
    weights = {f"{fqn}{_WEIGHT}" for fqn in layers_to_quantize(model, config)}
    fqns = side.names_in_model()
    for name, tensor in side.saved.items():
        found = merged.tensors.get(name)
        if found is None or found.shape != tensor.shape:
            continue
        if fqns[name] in weights and fqns[name] not in saved.held:
            return name

    return None


def _dequantized(layer: nn.Module, original: Tensor) -> Tensor:
    """The values of a layer's weight, quantized, as the weight lies in files."""
    make_pending(layer, original)
    values = dequantizer(layer)(...)
    return values.t() if is_transposed(layer) else values


def _off(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a part of the expected one."""
    expected = expected.to(found.device)
    return float((found - expected).norm() / expected.norm())
