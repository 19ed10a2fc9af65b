"""The sums by which the rounding of merged tensors is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

_AT_ONCE = 1 << 15  # elements that are tallied at once


@dataclass
class Tally:
    """The sums over one merged tensor by which a merge is measured.

    They are added up while it is computed: nothing is read twice.

    Attributes:
        delta: The squared length of what the adapter adds.
        off: The squared length of what rounding takes from the sum.
        off_along: The product of the two.
        num_bits: The bits of an element of the dtype that is stored.
        num_clipped: The elements beyond the last codes of their groups.
    """

    delta: float = 0.0
    off: float = 0.0
    off_along: float = 0.0
    num_bits: int = 0
    num_clipped: int = 0

    def restart(self, num_bits: int) -> None:
        """Begin again: a tensor may be computed more than once."""
        self.delta = self.off = self.off_along = 0.0
        self.num_bits = num_bits
        self.num_clipped = 0

    @property
    def kept(self) -> float:
        """The part of the delta that is left when it is rounded: its projection on it."""
        return 1.0 + self.off_along / self.delta if self.delta else 1.0

    @property
    def error(self) -> float:
        """The length of what rounding takes, as a part of the delta's."""
        return math.sqrt(self.off / self.delta) if self.delta else 0.0

    def add(self, before: Tensor, value: Tensor, rounded: Tensor) -> None:
        """Add some values: of the base, of the sum, and of the sum rounded.

        A few are taken at a time: an expert is a good part of a whole tensor.
        """
        bases = before.reshape(-1).split(_AT_ONCE)
        values = value.reshape(-1).split(_AT_ONCE)
        results = rounded.reshape(-1).split(_AT_ONCE)
        for base, exact, result in zip(bases, values, results, strict=True):
            self.include(exact - base.float(), result.float() - exact)

    def include(self, delta: Tensor, off: Tensor) -> None:
        """Add some elements: what is added to them, and what rounding adds to the sum."""
        self.delta += float(delta @ delta)
        self.off += float(off @ off)
        self.off_along += float(off @ delta)
