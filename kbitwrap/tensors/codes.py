"""The codes of a quantized weight, and rounding to them at random.

A code stands for a value out of a table, times the scale of its group of elements.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy
import torch
from torch import Tensor, nn

# The part of its scale that the largest of a group may lose without being counted.
# Those at the ends cannot grow; rounding to 4 bits is off by as much there.
_MOST_BEYOND = 1 / 8
_HALF_BYTE = 4  # bits


class RandomNumbers:
    """Random numbers that depend on a name and a seed, and on nothing else.

    They are the bits of Philox (Salmon et al. 2011), whose stream NumPy keeps the same
    in all of its releases and on all machines.
    """

    def __init__(self, name: str, seed: int) -> None:
        named = f"{seed}:{name}".encode()
        key = int.from_bytes(hashlib.blake2b(named, digest_size=16).digest(), "little")
        self._bits = numpy.random.Philox(key=key)

    def draw(self, number: int) -> Tensor:
        """Return the next of them: float32, uniform between -1/2 and 1/2, on the CPU.

        Each is in the middle of one of 2**16 parts. Four are cut from a word of 64 bits.
        """
        num_words = -(-number // 4)
        words = self._bits.random_raw(num_words)
        integers = words.astype("<u8", copy=False).view("<i2")
        return torch.from_numpy(integers)[:number].float().add_(0.5).mul_(2**-16)


class Rounded(NamedTuple):
    """Some elements of a weight, rounded to codes.

    Attributes:
        stored: Their codes, in the bytes that are stored: uint8, flat.
        off: The value of each less what it should be, in float32.
        num_clipped: The number of those that should be beyond the last code of their
            group, by more than an eighth of its scale.
    """

    stored: Tensor
    off: Tensor
    num_clipped: int


class Codes(ABC):
    """The codes of a weight.

    Args:
        stored: The bytes that hold them: uint8, flat.
        values: The value of each code in float32, no two the same.
        scales: The scale of each group: float32, flat.
        group_size: The number of consecutive elements in a group.
    """

    per_byte: int
    """The number of codes in a byte."""

    def __init__(
        self, stored: Tensor, values: Tensor, scales: Tensor, group_size: int
    ) -> None:
        self._stored = stored
        self._values = values
        self._scales = scales
        self._group_size = group_size

    def has_scales_of(self, other: Codes) -> bool:
        """Return whether the same codes are the same values in both, wherever each of them lies."""
        if not torch.equal(self._values, other._values.to(self._values.device)):
            return False

        return torch.equal(self._scales, other._scales.to(self._scales.device))

    def round_at_random(
        self, start: int, delta: Tensor, random: RandomNumbers
    ) -> Rounded:
        """Add to some elements, and round each to one of the two codes around the sum.

        The upper one is taken with the probability ``(sum - lower) / (upper - lower)``,
        to within 2**-16, so that the mean of the result is the sum (stochastic
        rounding: Gupta et al. 2015). An element to which nothing is added keeps its code.

        Args:
            start: The first of the elements, which begins a byte.
            delta: The values to add to the elements from there on: flat, float32.
            random: The numbers that decide.
        """
        number = len(delta)
        stored = self._bytes_of(start, number)
        missing = len(stored) * self.per_byte - number
        if missing:
            delta = nn.functional.pad(delta, (0, missing))
        scales = self._scales_from(start, len(delta))
        added = delta.view(len(scales), -1) / scales
        numbers = random.draw(len(delta)).to(delta.device)

        rounded, off, num_clipped = self._add(stored, added.flatten(), numbers)
        off.view(len(scales), -1).mul_(scales)
        off -= delta
        return Rounded(rounded, off[:number], num_clipped)

    def values_of(self, start: int, number: int) -> Tensor:
        """Return the values of some elements, the first at the beginning of a byte: flat, float32."""
        scales = self._scales_from(start, number)
        values = self._values_in(self._bytes_of(start, number))[:number]
        return values.view(len(scales), -1).mul_(scales).flatten()

    def most_off(self, values: Tensor) -> float:
        """Return the squared length of what rounding all elements takes at most, to one of the two codes around each.

        One beyond the last code loses all that is beyond. ``values`` are flat, float32.
        """
        scales = self._scales_from(0, len(values))
        parts = values.view(len(scales), -1) / scales
        least, most = self._values.aminmax()
        half_step = self._values.sort().values.diff().max() / 2
        beyond = parts - parts.clamp(least, most)
        return float(((beyond.square() + half_step**2) * scales.square()).sum())

    @abstractmethod
    def _values_in(self, stored: Tensor) -> Tensor:
        """Return the values of the codes in some bytes, in parts of their scales, as a new tensor."""

    @abstractmethod
    def _add(
        self, stored: Tensor, added: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Round sums at random.

        Args:
            stored: Bytes of codes.
            added: The addend of the value of each, in parts of its scale.
            numbers: Random numbers, in steps between two codes.

        Returns:
            The bytes of the new codes; their values less those of the old ones, in parts
            of their scales; and the number of sums that are clipped.
        """

    def _num_clipped(self, sums: Tensor) -> int:
        """Return the number of sums that are well beyond the last code."""
        is_below = sums < self._values.min() - _MOST_BEYOND
        is_above = sums > self._values.max() + _MOST_BEYOND
        return int((is_below | is_above).sum())

    def _bytes_of(self, start: int, number: int) -> Tensor:
        """Return the bytes that hold some elements."""
        num_bytes = -(-number // self.per_byte)
        return self._stored[start // self.per_byte :][:num_bytes]

    def _scales_from(self, start: int, number: int) -> Tensor:
        """Return the scales of some elements, to divide by: the smallest number in place of 0.

        They are a column: of groups, where the elements fill theirs, or of elements.
        """
        size = self._group_size
        first = start // size
        scales = self._scales[first : -(-(start + number) // size), None]
        scales = torch.where(scales == 0, torch.finfo(torch.float32).tiny, scales)
        before = start - first * size
        if before == 0 and number % size == 0:
            return scales

        of_elements = scales.expand(-1, size).reshape(-1, 1)
        return of_elements[before:][:number]


class EvenCodes(Codes):
    """Codes of a byte, each of which stands for as many steps as its int8 says.

    Args:
        stored: The bytes: uint8, flat.
        step: The length of a step.
        scales: The scale of each group: float32, flat.
        group_size: The number of consecutive elements in a group.
    """

    per_byte = 1

    def __init__(
        self, stored: Tensor, step: float, scales: Tensor, group_size: int
    ) -> None:
        self._num_steps = torch.iinfo(torch.int8)
        every = torch.arange(self._num_steps.min, self._num_steps.max + 1)
        values = every.to(stored.device) * step
        super().__init__(stored, values, scales, group_size)
        self._step = step

    def _values_in(self, stored: Tensor) -> Tensor:
        return stored.view(torch.int8).float().mul_(self._step)

    def _add(
        self, stored: Tensor, added: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        before = stored.view(torch.int8).float()
        sums = added / self._step
        sums += before

        num_clipped = 0
        least, most = sums.aminmax()
        if least < self._num_steps.min or most > self._num_steps.max:
            num_clipped = self._num_clipped(sums * self._step)

        sums += numbers
        after = sums.round_().clamp_(self._num_steps.min, self._num_steps.max)
        rounded = after.to(torch.int8).view(torch.uint8)
        return rounded, after.sub_(before).mul_(self._step), num_clipped


class TableCodes(Codes):
    """Codes of half a byte, which stand for the values of a table.

    Args:
        stored: The bytes, each with its first code in the upper half: uint8, flat.
        values: The value of each of the 16 codes in float32, no two the same.
        scales: The scale of each group: float32, flat.
        group_size: The number of consecutive elements in a group.
    """

    per_byte = 2

    def __init__(
        self, stored: Tensor, values: Tensor, scales: Tensor, group_size: int
    ) -> None:
        super().__init__(stored, values, scales, group_size)
        # A place is that of a code in the order of values.
        self._in_order, codes_in_order = values.sort()
        self._code_at = codes_in_order.to(torch.uint8)
        self._place_of = codes_in_order.argsort().int()

        # The inverse of the step from each value upwards and downwards. Beyond an end a
        # step is as far as a sum may lie without being counted as clipped.
        steps = self._in_order.diff()
        end = steps.new_tensor([_MOST_BEYOND])
        self._per_step_up = 1 / torch.cat([steps, end])
        self._per_step_down = 1 / torch.cat([end, steps])

    def _codes_in(self, stored: Tensor) -> Tensor:
        return torch.stack([stored >> _HALF_BYTE, stored & 0x0F], dim=1).flatten().int()

    def _values_in(self, stored: Tensor) -> Tensor:
        return self._values.index_select(0, self._codes_in(stored))

    def _add(
        self, stored: Tensor, added: Tensor, numbers: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        codes = self._codes_in(stored)
        places = self._place_of.index_select(0, codes)
        # The way from a code to the sum, in steps between codes: upwards positive. Rounding
        # the way plus a number within a half reaches the next code with the right
        # probability, as long as the way is one step at most, as nearly all are. A longer
        # way crosses steps of other lengths, and is looked up.
        way = self._per_step_up.index_select(0, places).mul_(added.clamp(min=0))
        way += self._per_step_down.index_select(0, places).mul_(added.clamp(max=0))
        shortest, longest = way.aminmax()
        far = None
        if max(-shortest, longest) > 1:
            [far] = (way.abs() > 1).nonzero(as_tuple=True)

        way += numbers
        places += way.round_().int()

        num_clipped = 0
        values = self._values.index_select(0, codes)
        if far is not None:
            sums = values[far] + added[far]
            num_clipped = self._num_clipped(sums)
            places[far] = self._places_around(sums, numbers[far])

        # beyond the last code at the last
        places.clamp_(0, len(self._in_order) - 1)
        change = self._in_order.index_select(0, places).sub_(values)
        rounded = self._code_at.index_select(0, places).view(-1, 2)
        first, second = rounded.unbind(1)
        return first << _HALF_BYTE | second, change, num_clipped

    def _places_around(self, sums: Tensor, numbers: Tensor) -> Tensor:
        """Return the places of sums that are more than a step away from their code."""
        last = len(self._in_order) - 1
        upper = torch.bucketize(sums, self._in_order).clamp_(1, last)
        lower = upper - 1
        value = self._in_order[lower]
        step = self._in_order[upper] - value
        is_upper = numbers + 0.5 < (sums - value) / step
        return (lower + is_upper).int()
