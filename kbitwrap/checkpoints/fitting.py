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

# The least part of what a quantization changes in a weight that a checkpoint fitting it
# holds: 1 is all of it, and one of another form of the base holds 0, whatever was added.
_LEAST_HELD = 0.5
# The largest difference of a weight from a merge, as a part of its length, that another
# adapter explains; larger ones are of other weights.
_MOST_OFF = 0.5
_MOST_WEIGHTS = 3  # that are asked: one that is broken, or zero, tells nothing


def fitting_quantization(
    merged: Side,
    base: StrPath,
    saved: SavedAdapter,
    dtypes: Sequence[torch.dtype | None],
    trust_remote_code: bool = False,
) -> BaseQuantization:
    """Find the quantization whose values, with the adapter merged, one weight of a checkpoint holds.

    It is none where the weight holds those of the base as it is, or of no quantization of
    bitsandbytes. The base is loaded once, unquantized; of its weights one alone is
    quantized, in each kind and from each dtype that the run may have had (``None`` for
    the base's), or the next where that tells nothing.
    """
    with warnings.catch_warnings():
        # the layers that were trained were quantized, and lay otherwise
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
        as_it_is = _merged_with(adapted, fqn, original, found.device)
        difference = found - as_it_is
        nearest = None
        least = min(float(difference.norm()), _MOST_OFF * float(as_it_is.norm()))
        for kind, dtype in itertools.product(layers, dtypes):
            layer = layers[kind][fqn.removesuffix(".weight")]
            make_pending(layer, original.to(dtype or original.dtype))
            values = dequantizer(layer)(...)
            if is_transposed(layer):
                values = values.t()
            in_kind = _merged_with(adapted, fqn, values, found.device)
            change = in_kind - as_it_is
            held = float((difference * change).sum() / change.square().sum())
            off = float((found - in_kind).norm())
            if held >= _LEAST_HELD and off < least:
                nearest, least = kind, off

        if nearest is not None:
            return BaseQuantization(configs[nearest].to_dict(), FITTED)

    return BaseQuantization({}, FITTED)


def _merged_with(
    adapted: torch.nn.Module, fqn: str, values: Tensor, device: torch.device
) -> Tensor:
    """Merge an adapter onto other values of one weight, in float32."""
    weight = merged_onto(adapted, {fqn: values})[fqn]
    return materialize(weight).float().to(device)
