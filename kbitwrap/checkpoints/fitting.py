"""The quantization of a base, as a merged checkpoint tells it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import QuantKind, StrPath
from ..export.plain import is_transposed
from ..export.sums import ComparisonSums
from ..model.bitsandbytes_layers import dequantizer, make_pending
from ..model.pretrained import layers_to_quantize
from ..model.quantization import SKIPPED_LAYERS, bitsandbytes_config
from ..tensors.lazy import materialize
from .adapters import SavedAdapter
from .base import load_adapted
from .base_quantization import FITTED, UNQUANTIZED, BaseQuantization
from .figures import compare
from .sides import Side, merged_onto, plain_side

# The largest difference of a weight from a merge, as a part of its length, that another
# adapter explains; larger ones are of other weights.
_MOST_OFF = 0.5
_MOST_WEIGHTS = 12  # that are asked: a broken or zero one tells nothing
# By noise of n elements a distance differs by a part of 1/sqrt(n) of it. Another
# quantization than the stated one is nearer by more of these.
_DEVIATIONS = 8.0
UNQUANTIZED_FITS = BaseQuantization({}, FITTED)


def fitting_quantization(
    merged: Side,
    base: StrPath,
    saved: SavedAdapter,
    dtypes: Sequence[torch.dtype | None],
    trust_remote_code: bool = False,
    stated: BaseQuantization = UNQUANTIZED_FITS,
) -> BaseQuantization:
    """Find the quantization whose values, with the adapter merged, are nearest to one weight of a checkpoint.

    The base is loaded once, unquantized. One of its weights is quantized, in each kind and
    from each dtype that the run may have had (``None`` for the base's). A weight that is
    far from the unquantized base with the adapter, or nearest to it, tells nothing, nor
    does one that the checkpoint stores quantized: the next is asked. The quantization
    that was stated is returned, itself, unless another is nearer beyond all noise, and
    always where it has no word. Where none was stated, the nearest counts.
    """
    if stated.kind is None:
        return stated

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
        if found is None or not found.is_floating_point():
            continue
        is_quantized = fqns[name].removesuffix(".weight") in layers[QuantKind.NF4]
        is_whole = fqns[name] not in saved.held and fqns[name] not in merged.layers
        if found.shape == tensor.shape and is_quantized and is_whole:
            names.append(name)

    names.sort(key=lambda name: merged.saved[name].numel())  # small ones tell as much
    for name in names[:_MOST_WEIGHTS]:
        fqn = fqns[name]
        original = materialize(side.saved[name])
        found = merged.saved[name]

        sums = _compare(found, adapted, fqn, original)
        off = {QuantKind.NONE: math.sqrt(sums.off)}
        if not off[QuantKind.NONE] <= _MOST_OFF * math.sqrt(sums.size):
            continue

        for kind, dtype in itertools.product(configs, dtypes):
            layer = layers[kind][fqn.removesuffix(".weight")]
            make_pending(layer, original.to(dtype or original.dtype))
            values = dequantizer(layer)(...)
            if is_transposed(layer):
                values = values.t()
            sums = _compare(found, adapted, fqn, values)
            off[kind] = min(math.sqrt(sums.off), off.get(kind, math.inf))

        nearest = min(off, key=off.__getitem__)
        if nearest is QuantKind.NONE:
            continue
        if nearest is stated.kind:
            return stated

        noise = off[nearest] / math.sqrt(found.numel())
        is_clear = off[stated.kind] > off[nearest] + _DEVIATIONS * noise
        if is_clear or stated is UNQUANTIZED_FITS:
            skipped = stated.config.get(SKIPPED_LAYERS)
            config = {**configs[nearest].to_dict(), SKIPPED_LAYERS: skipped}
            return BaseQuantization(config, FITTED)

    return stated


def _compare(
    found: Tensor, adapted: torch.nn.Module, fqn: str, values: Tensor
) -> ComparisonSums:
    """Compare a weight with an adapter merged onto these values of it, a few elements at a time."""
    weight = merged_onto(adapted, {fqn: values})[fqn]
    dtype = found.dtype
    figures = compare(
        fqn, found, weight, values, None, dtype=dtype, stored=None, was_quantized=False
    )
    return figures.references[0]
