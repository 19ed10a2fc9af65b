"""A merged weight that stays quantized, under the statistics that its base has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..model.bitsandbytes_layers import codes_of, quantized_layer
from ..tensors.codes import Codes, RandomNumbers
from .adapted import AdaptedTensor
from .adapters import ActiveLayer, refuse_infinite
from .tally import Tally

_MOST_ROUNDED = 2.0**-7  # of the largest value, by rounding to half
_MOST_CLIPPED = 1e-3  # of a weight's elements, beyond the codes of their groups
# The elements that are rounded at once: whole bytes of codes, whole words of random
# numbers, and few enough for a CPU's cache.
_AT_ONCE = 1 << 18
_REMEDY = "merge it as 'mixed' or 'half'"


@torch.no_grad()
def requantize(
    fqn: str,
    layer: nn.Module,
    adapters: Sequence[ActiveLayer],
    seed: int,
    tally: Tally,
) -> Tensor:
    """The codes of a layer's merged weight, in the stored shape and dtype.

    What the adapters add to a value is added to what its code stands for, and rounded
    at random (`Codes.round_at_random`). The numbers follow from the weight's name and a
    seed: it can be computed again.

    Args:
        fqn: The name of the weight.
        layer: The layer as its base is.
        adapters: The active adapters on it.
        seed: The seed.
        tally: Takes the sums.
    """
    layer = quantized_layer(layer)
    weight = layer.get_parameter("weight")
    codes = codes_of(layer)
    if codes is None:
        raise ExportError(
            f"{fqn} has no codes (has_fp16_weights): merge it as 'half'", fqn=fqn
        )

    random = RandomNumbers(fqn, seed)
    tally.restart(num_bits=8 // codes.per_byte)
    tensor = AdaptedTensor(layer, "weight", adapters)
    num_columns = tensor.shape[1:].numel()
    # each block has to begin with a byte
    blocks = tensor.blocks() if num_columns % codes.per_byte == 0 else [...]
    stored: list[Tensor] = []
    for rows in blocks:
        start = 0 if rows is ... else rows.start * num_columns
        before = tensor.base(rows).float()
        if not stored:
            _refuse_other_codes(fqn, codes, before)
        value = tensor.merged(rows, before)
        refuse_infinite(fqn, value, value)
        delta = value.sub_(before).flatten()
        for part in delta.split(_AT_ONCE):
            rounded = codes.round_at_random(start, part, random)
            start += len(part)
            tally.include(part, rounded.off)
            tally.num_clipped += rounded.num_clipped
            stored.append(rounded.stored)

    share = tally.num_clipped / tensor.shape.numel()
    if share > _MOST_CLIPPED:
        raise ExportError(
            f"{fqn}: {share:.2%} of the merged weights are beyond the range of their "
            "quantization, whose statistics stay the base's: the delta is too large "
            f"for them; {_REMEDY}",
            fqn=fqn,
        )

    return torch.cat(stored).view(weight.dtype).view(weight.shape)


def _refuse_other_codes(fqn: str, codes: Codes, first: Tensor) -> None:
    """Raise where a layer computes with other values than its codes stand for."""
    values = codes.values_of(0, first.numel()).view_as(first)
    if (values - first).abs().max() > _MOST_ROUNDED * first.abs().max():
        raise ExportError(
            f"{fqn}: bitsandbytes computes other values on {first.device.type} than the "
            "codes and scales stand for, as it does where a row is no multiple of a "
            f"block; {_REMEDY}",
            fqn=fqn,
        )
