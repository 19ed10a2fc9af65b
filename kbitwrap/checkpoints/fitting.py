"""The quantization of a base that nothing records, as a merged checkpoint tells it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import QuantKind, StrPath
from ..export.plain import is_transposed
from ..model.bitsandbytes_layers import dequantizer, make_pending
from ..model.pretrained import layers_to_quantize
from ..model.quantization import bitsandbytes_config
from ..tensors.lazy import materialize
from .adapters import SavedAdapter
from .base import load_adapted
from .base_quantization import FITTED, UNQUANTIZED, BaseQuantization
from .sides import Side, merged_onto, plain_side

# The largest difference of a weight from a merge, as a part of its length, that another
# adapter explains; larger ones are of other weights.
_MOST_OFF = 0.5
_MOST_WEIGHTS = 3  # that are asked: a broken or zero one tells nothing


def fitting_quantization(
    merged: Side,
    base: StrPath,
    saved: SavedAdapter,
    dtypes: Sequence[torch.dtype | None],
    trust_remote_code: bool = False,
) -> BaseQuantization:
    """Find the quantization whose values, with the adapter merged, are nearest to one weight of a checkpoint.

    The base is loaded once, unquantized. One of its weights is quantized, in each kind and
    from each dtype that the run may have had (``None`` for the base's). A weight that is
    far from the unquantized base with the adapter, or nearest to it, tells nothing: the
    next is asked. If none tells anything, the base was not quantized.
    """
    with warnings.catch_warnings():
        # PEFT warns because these layers are unquantized here, and lie transposed.
        warnings.filterwarnings("ignore", r"fan_in_fan_out is set to", UserWarning)
        trained, adapted = load_adapted(
            base, saved, None, UNQUANTIZED, None, "cpu", trust_remote_code
        )

    configs = {kind: bitsandbytes_config(kind) for kind in QuantKind if kind.settings}
    layers = {}
    for kind, config in configs.items():
        _, layers[kind] = layers_to_quantize(trained.model, config)

    side = plain_side(adapted, is_merged=False)
    fqns = side.names_in_model()
    names = []
    for name, tensor in side.saved.items():
        found = merged.saved.get(name)
        is_there = found is not None and found.shape == tensor.shape
        is_quantized = fqns[name].removesuffix(".weight") in layers[QuantKind.NF4]
        if is_there and is_quantized and fqns[name] not in saved.held:
            names.append(name)

    for name in names[:_MOST_WEIGHTS]:
        fqn = fqns[name]
        original = materialize(side.saved[name])
        found = materialize(merged.saved[name]).float()

        nearest, least = QuantKind.NONE, _distance(found, adapted, fqn, original)
        if not least <= _MOST_OFF * float(original.float().norm()):
            continue

        for kind, dtype in itertools.product(configs, dtypes):
            layer = layers[kind][fqn.removesuffix(".weight")]
            make_pending(layer, original.to(dtype or original.dtype))
            values = dequantizer(layer)(...)
            if is_transposed(layer):
                values = values.t()
            off = _distance(found, adapted, fqn, values)
            if off < least:
                nearest, least = kind, off

        if nearest is not QuantKind.NONE:
            return BaseQuantization(configs[nearest].to_dict(), FITTED)

    return BaseQuantization({}, FITTED)


def _distance(
    found: Tensor, adapted: torch.nn.Module, fqn: str, values: Tensor
) -> float:
    """Return how far a weight is from an adapter merged onto these values of it."""
    weight = merged_onto(adapted, {fqn: values})[fqn]
    return float((found - materialize(weight).float()).norm())
