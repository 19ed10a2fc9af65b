"""The codes of quantized weights, to which values are rounded at random."""

from __future__ import annotations

import math
from typing import Any

import bitsandbytes as bnb
import pytest
import torch

from kbitwrap.model.bitsandbytes_layers import codes_of
from kbitwrap.tensors.codes import Codes, RandomNumbers
from support.thorough import each_once

KINDS = ("nf4", "fp4", "nf4 double", "int8")
ROWS, COLUMNS = 8, 128


def layer_of(kind: str) -> Any:
    """A layer of bitsandbytes with random weights."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
    if kind == "int8":
        layer = bnb.nn.Linear8bitLt(COLUMNS, ROWS, bias=False, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(values.half(), requires_grad=False, has_fp16_weights=False)
    else:
        quant_type, *double = kind.split()
        layer = bnb.nn.Linear4bit(COLUMNS, ROWS, bias=False, quant_type=quant_type)
        layer.weight = bnb.nn.Params4bit(
            values, requires_grad=False, quant_type=quant_type, compress_statistics=bool(double)
        )
    return layer.to("cpu")


def table(layer: Any) -> torch.Tensor:
    """The values of all codes of an element, ascending, times the scale of each element: of shape (elements, codes)."""
    weight = layer.weight
    if weight.dtype == torch.int8:
        values = torch.arange(-128, 128) / 127
        scales = weight.SCB.view(-1, 1).expand(-1, COLUMNS).reshape(-1)
    else:
        state = weight.quant_state
        values = state.code.sort().values
        scales = state.absmax
        if state.nested:
            scales = bnb.functional.dequantize_blockwise(scales, state.state2) + state.offset
        scales = scales.repeat_interleave(state.blocksize)[: ROWS * COLUMNS]
    return scales.float().unsqueeze(1) * values


def values_of(layer: Any, stored: torch.Tensor) -> torch.Tensor:
    """The values, in float32, of the codes in some bytes."""
    weight = layer.weight
    if weight.dtype == torch.int8:
        codes = stored.to(torch.uint8).view(torch.int8).view(ROWS, COLUMNS)
        return (codes.float() * weight.SCB.view(-1, 1) / 127).flatten()
    state = weight.quant_state
    state.dtype = torch.float32
    return bnb.functional.dequantize_4bit(stored.to(torch.uint8).view(-1, 1), state).flatten()


def bytes_of(layer: Any) -> torch.Tensor:
    return layer.weight.detach().as_subclass(torch.Tensor).view(torch.uint8).flatten()


def known_codes(layer: Any) -> Codes:
    codes = codes_of(layer)
    assert codes is not None
    return codes


def delta_of(size: float) -> torch.Tensor:
    return size * torch.randn(ROWS * COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_changed_where_nothing_is_added(kind: str) -> None:
    layer = layer_of(kind)
    delta = delta_of(0.5)
    delta[: len(delta) // 2] = 0
    rounded = known_codes(layer).round_at_random(0, delta, RandomNumbers("a", 0))
    half = len(bytes_of(layer)) // 2
    assert torch.equal(rounded.stored[:half], bytes_of(layer)[:half].to(rounded.stored.dtype))
    assert not torch.equal(rounded.stored[half:], bytes_of(layer)[half:].to(rounded.stored.dtype))


@pytest.mark.parametrize("size", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_each_element_gets_one_of_the_two_codes_around_its_sum(kind: str, size: float) -> None:
    layer, delta = layer_of(kind), delta_of(size)
    rounded = known_codes(layer).round_at_random(0, delta, RandomNumbers("a", 0))
    wanted = values_of(layer, bytes_of(layer)) + delta
    found = values_of(layer, rounded.stored)

    codes = table(layer)
    inside = wanted.clamp(codes.amin(1), codes.amax(1))
    tolerance = 1e-4 * codes.amax(1)  # values are computed in float32, on both sides
    low = (torch.minimum(found, inside) + tolerance).unsqueeze(1)
    high = (torch.maximum(found, inside) - tolerance).unsqueeze(1)
    assert not ((codes > low) & (codes < high)).any()  # none lies between
    assert ((codes - found.unsqueeze(1)).abs().amin(1) <= tolerance).all()
    torch.testing.assert_close(rounded.off, found - wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "size"), each_once(KINDS, [0.05, 0.5]))
def test_the_mean_over_seeds_is_the_sum(kind: str, size: float) -> None:
    layer, delta, number = layer_of(kind), delta_of(size), 400
    wanted = values_of(layer, bytes_of(layer)) + delta
    total = torch.zeros_like(wanted)
    for seed in range(number):
        rounded = known_codes(layer).round_at_random(0, delta, RandomNumbers("a", seed))
        total += values_of(layer, rounded.stored)

    codes = table(layer)
    inside = wanted.clamp(codes.amin(1), codes.amax(1))
    # the largest deviation of one rounding is half of a step
    largest = codes.diff(dim=1).amax(1) / 2
    deviations = (total / number - inside) / (largest / math.sqrt(number))
    assert deviations.abs().max() < 6
    assert deviations.mean().abs() < 6 / math.sqrt(len(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_elements_beyond_their_codes_get_the_last_and_are_counted(kind: str) -> None:
    layer = layer_of(kind)
    delta = torch.zeros(ROWS * COLUMNS)
    delta[5], delta[6] = 100.0, -100.0
    rounded = known_codes(layer).round_at_random(0, delta, RandomNumbers("a", 0))
    found, codes = values_of(layer, rounded.stored), table(layer)
    assert rounded.num_clipped == 2
    torch.testing.assert_close(found[5], codes[5].max())
    torch.testing.assert_close(found[6], codes[6].min())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_rounded_as_the_whole(kind: str) -> None:
    layer, delta = layer_of(kind), delta_of(0.1)
    whole = known_codes(layer).round_at_random(0, delta, RandomNumbers("a", 0))
    random, parts, size = RandomNumbers("a", 0), [], 96  # no multiple of a group
    for start in range(0, len(delta), size):
        part = delta[start : start + size]
        parts.append(known_codes(layer).round_at_random(start, part, random).stored)
    assert torch.equal(torch.cat(parts), whole.stored)


def test_a_group_of_zeros_stays_zero() -> None:
    layer = layer_of("nf4")
    layer.weight.quant_state.absmax[0] = 0
    rounded = known_codes(layer).round_at_random(0, delta_of(0.1), RandomNumbers("a", 0))
    assert values_of(layer, rounded.stored)[:64].eq(0).all()
    assert rounded.off.isfinite().all()
    assert rounded.num_clipped >= 60


def test_numbers_follow_from_name_and_seed_alone() -> None:
    numbers = RandomNumbers("model.layers.0.weight", 0).draw(4)
    # the middles of parts; the first word of Philox, its lowest quarter first
    assert numbers.tolist() == NUMBERS
    assert RandomNumbers("model.layers.0.weight", 1).draw(4).tolist() != NUMBERS
    assert RandomNumbers("model.layers.1.weight", 0).draw(4).tolist() != NUMBERS


NUMBERS = [(part + 0.5) / 2**16 for part in (-29459, 31563, -30414, -30974)]
