"""The quantization of a base that nothing records, as a merged checkpoint tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import QuantKind, StrPath
from ..tensors.lazy import LazyTensor, materialize
from .adapters import SavedAdapter
from .base import load_adapted
from .sides import MergedSide, plain_side

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
) -> Fitting | None:
    """The quantization whose values, with the adapter merged, one weight of a checkpoint holds.

    ``None`` where it holds those of the base as it is, or of no quantization of
    bitsandbytes.
    """
    from transformers import BitsAndBytesConfig

    fqn = _quantized_weight(base, saved, dtype, merged)
    if fqn is None:
        return None

    found = materialize(merged.tensors[fqn]).float()
    nearest = None
    least = _off(found, _merge(fqn, base, saved, dtype, False))
    for kind in QuantKind:
        if kind is QuantKind.NONE:
            continue
        config = BitsAndBytesConfig(**kind.settings)
        off = _off(found, _merge(fqn, base, saved, dtype, config))
        if off < min(least, _MOST_OFF):
            nearest, least = Fitting(kind, config), off

    return nearest


def _quantized_weight(
    base: StrPath, saved: SavedAdapter, dtype: torch.dtype | None, merged: MergedSide
) -> str | None:
    """The name of the first matrix that bitsandbytes quantizes, and the checkpoint holds."""
    from transformers import BitsAndBytesConfig

    _, adapted = load_adapted(
        base, saved, None, BitsAndBytesConfig(**QuantKind.NF4.settings), dtype
    )
    for fqn, tensor in plain_side(adapted, is_merged=False).saved.items():
        found = merged.tensors.get(fqn)
        if found is None or found.shape != tensor.shape:
            continue
        # what is not quantized is there, and not computed
        if isinstance(tensor, LazyTensor) and tensor.ndim == 2:
            return fqn

    return None


def _merge(
    fqn: str,
    base: StrPath,
    saved: SavedAdapter,
    dtype: torch.dtype | None,
    quantization_config: Any,
) -> Tensor:
    """A weight of the base, quantized in some way, with the adapter merged: in float32."""
    _, adapted = load_adapted(base, saved, None, quantization_config, dtype)
    return materialize(plain_side(adapted, is_merged=True).saved[fqn]).float()


def _off(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a part of the expected one."""
    expected = expected.to(found.device)
    return float((found - expected).norm() / expected.norm())
