"""The codes of a quantized weight, and rounding to them at random.

A code stands for a value out of a table, times the scale of its group of elements.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

_ONE = 1 << 16  # the parts that a step between two codes is counted in
_NUM_BYTES = 1 << 8
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
        digest = hashlib.blake2b(named, digest_size=16).digest()
        key = int.from_bytes(digest, "little")
        self._bits = numpy.random.Philox(key=key)

    def draw(self, number: int) -> Tensor:
        """The next of them: int16, uniform, on the CPU. Four are cut from each word of 64 bits."""
        num_words = -(-number // 4)
        words = self._bits.random_raw(num_words)
        numbers = words.astype("<u8", copy=False).view("<i2")
        return torch.from_numpy(numbers)[:number]


@dataclass(frozen=True)
class Rounded:
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


class _ByByte:
    """The entries of a table for each byte, which has one or two.

    Two are gathered as one number of 8 bytes, in a fourth of the time of a row of two.

    Args:
        entries: Of shape ``(256, per_byte)``, in a dtype of 4 bytes.
    """

    def __init__(self, entries: Tensor) -> None:
        self._dtype = entries.dtype
        whole = torch.int64 if entries.shape[1] == 2 else torch.int32
        self._table = entries.contiguous().view(whole).view(-1)

    def of(self, stored: Tensor) -> Tensor:
        """The entries of some bytes, flat."""
        return self._table.index_select(0, stored).view(self._dtype)


class Codes:
    """The codes of a weight.

    Args:
        stored: The bytes that hold them: uint8, flat. Of two in a byte the first is in
            its upper half.
        values: The value of each code in float32, no two the same: 16 of codes of half
            a byte, or 256.
        scales: The scale of each group: float32, flat.
        group_size: The number of consecutive elements in a group.
    """

    def __init__(
        self, stored: Tensor, values: Tensor, scales: Tensor, group_size: int
    ) -> None:
        self._stored = stored
        self._scales = scales
        self._group_size = group_size
        self._is_half = len(values) < _NUM_BYTES

        # A place is that of a code in the order of values.
        self._values, names = values.sort()
        places = names.argsort()

        steps = self._values.diff()
        self._are_even = torch.allclose(steps, steps[0])
        # The steps from each value upwards and downwards. Beyond the ends it is as far
        # as is not counted.
        end = steps.new_tensor([_MOST_BEYOND])
        above = torch.cat([steps, end])
        below = torch.cat([end, steps])
        # Counted from the middle, a float32 holds the sum of a place and a random
        # number, which is uniform around half a step, without rounding it.
        self._middle = len(values) // 2
        from_middle = torch.arange(len(values)) - self._middle
        centers = (from_middle + 0.5) * _ONE + 0.5
        centers = centers.to(values.device)

        # by bytes, of which each has one or two codes
        in_bytes = places[self._codes_in_bytes(values.device)]
        self._of_codes = _ByByte(self._values[in_bytes])
        self._centers = _ByByte(centers[in_bytes])
        self._above = _ByByte(_ONE / above[in_bytes])
        self._below = _ByByte(_ONE / below[in_bytes])
        self._bytes = self._bytes_of_places(names)

    def has_scales_of(self, other: Codes) -> bool:
        """Whether the same codes are the same values in both."""
        if not torch.equal(self._values, other._values):
            return False

        return torch.equal(self._scales, other._scales)

    @property
    def per_byte(self) -> int:
        """The number of codes in a byte."""
        return 2 if self._is_half else 1

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
        added = delta / scales

        # The way to go is counted in parts of a step.
        way = added.clamp(min=0)
        way *= self._above.of(stored)
        way_down = added.clamp(max=0)
        way_down *= self._below.of(stored)
        way += way_down
        del way_down

        numbers = random.draw(len(delta)).to(delta.device)
        reached = self._centers.of(stored)
        reached += numbers
        reached += way
        places = reached.mul_(1 / _ONE).floor_()
        places += self._middle
        places.clamp_(0, len(self._values) - 1)

        num_clipped = 0
        values = self._of_codes.of(stored)
        shortest, longest = way.aminmax()
        if max(-shortest, longest) > _ONE:
            [far] = (way.abs_() > _ONE).nonzero(as_tuple=True)
            wanted = values[far] + added[far]
            num_clipped = self._num_clipped(wanted)
            if not self._are_even:  # the steps on the way have other lengths
                places[far] = self._round(wanted, numbers[far])

        codes = self._pack(places)
        off = self._of_codes.of(codes.int())
        off -= values
        off *= scales
        off -= delta
        return Rounded(codes, off[:number], num_clipped)

    def _num_clipped(self, reached: Tensor) -> int:
        """The number of values that are well beyond the last code.

        They are among those that are more than a step away from theirs, as that is the
        least beyond the ends.
        """
        is_below = reached < self._values[0] - _MOST_BEYOND
        is_above = reached > self._values[-1] + _MOST_BEYOND
        return int((is_below | is_above).sum())

    def values_of(self, start: int, number: int) -> Tensor:
        """The values of some elements, the first at the beginning of a byte: flat, float32."""
        stored = self._bytes_of(start, number)
        values = self._of_codes.of(stored)[:number]
        return values.mul_(self._scales_from(start, number))

    def _bytes_of(self, start: int, number: int) -> Tensor:
        """The bytes that hold some elements, as integers."""
        num_bytes = -(-number // self.per_byte)
        return self._stored[start // self.per_byte :][:num_bytes].int()

    def _round(self, reached: Tensor, numbers: Tensor) -> Tensor:
        """The places of values that are more than a step away from their code."""
        last = len(self._values) - 1
        upper = torch.bucketize(reached, self._values).clamp_(1, last)
        lower = upper - 1
        value = self._values[lower]
        step = self._values[upper] - value
        way = (reached - value) / step * _ONE
        needed = numbers + (_ONE / 2 + 0.5)
        is_upper = needed < way
        return (lower + is_upper).float()

    def _scales_from(self, start: int, number: int) -> Tensor:
        """The scale of each of some elements; none is 0, which nothing is divided by."""
        size = self._group_size
        first = start // size
        groups = self._scales[first : -(-(start + number) // size), None]
        tiny = torch.finfo(torch.float32).tiny
        groups = torch.where(groups == 0, tiny, groups)
        scales = groups.expand(-1, size).reshape(-1)
        before = start - first * size
        return scales[before:][:number]

    def _codes_in_bytes(self, device: torch.device) -> Tensor:
        """The codes in each byte, of shape ``(256, per_byte)``."""
        byte = torch.arange(_NUM_BYTES, device=device)
        if not self._is_half:
            return byte.unsqueeze(1)
        return torch.stack([byte >> _HALF_BYTE, byte & 0x0F], dim=1)

    def _bytes_of_places(self, names: Tensor) -> Tensor:
        """The byte that holds the codes of one place, or of two that are the bytes of an index."""
        if not self._is_half:
            return names.to(torch.uint8)

        number = len(names)
        every = torch.arange(number)
        pairs = torch.cartesian_prod(every, every)
        indices = pairs.to(torch.uint8).view(torch.int16)
        codes = names.cpu()[pairs]
        upper_half = codes[:, 0] << _HALF_BYTE
        packed = upper_half | codes[:, 1]
        table = torch.zeros(number * _NUM_BYTES, dtype=torch.uint8)
        table[indices.flatten().long()] = packed.to(torch.uint8)
        return table.to(names.device)

    def _pack(self, places: Tensor) -> Tensor:
        """The bytes that hold the codes at some places, which are whole numbers in float32."""
        indices = places.int()
        if self._is_half:
            indices = indices.to(torch.uint8).view(torch.int16).int()
        return self._bytes.index_select(0, indices)
