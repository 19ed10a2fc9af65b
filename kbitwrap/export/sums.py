"""The sums over a merged tensor's elements by which it is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ComparisonSums:
    """Sums over the elements of a tensor to which an adapter's delta was added.

    The difference is what the tensor is off from the sum that is not rounded.

    Attributes:
        num_bits: The bits of an element as it is stored.
        delta: The squared length of the delta.
        off: The squared length of the difference.
        off_along: The product of the difference and the delta.
        num_clipped: The elements beyond the last codes of their groups.
        rounding: The squared length of what rounding once takes.
        rounding_along: The product of what rounding once takes and the delta.
        size: The squared length of the reference, which the delta was added to.
        is_same: Whether the tensor is the reference, rounded to its dtype.
    """

    num_bits: int = 0
    delta: float = 0.0
    off: float = 0.0
    off_along: float = 0.0
    num_clipped: int = 0
    rounding: float = 0.0
    rounding_along: float = 0.0
    size: float = 0.0
    is_same: bool = True

    def add(self, delta: Tensor, off: Tensor) -> None:
        """Add some elements of the delta and of the difference: flat, float32."""
        self.delta += float(delta @ delta)
        self.off += float(off @ off)
        self.off_along += float(off @ delta)

    def add_reference(
        self, found: Tensor, reference: Tensor, delta: Tensor, dtype: torch.dtype
    ) -> None:
        """Add some elements of a tensor: flat, with a reference and a delta in float32.

        ``dtype`` is the one that rounding once rounds to.
        """
        expected = reference + delta
        self.add(delta, found.float() - expected)
        lost = expected.to(dtype).float() - expected
        self.rounding += float(lost @ lost)
        self.rounding_along += float(lost @ delta)
        self.size += float(reference @ reference)
        self.is_same = self.is_same and torch.equal(found, reference.to(found.dtype))

    def include(self, other: ComparisonSums) -> None:
        """Add the sums over other elements."""
        self.delta += other.delta
        self.off += other.off
        self.off_along += other.off_along
        self.num_clipped += other.num_clipped
        self.rounding += other.rounding
        self.rounding_along += other.rounding_along
        self.size += other.size
        self.is_same &= other.is_same

    @property
    def kept(self) -> float:
        """The part of the delta that is there: the projection of the change on it."""
        return 1.0 + self.off_along / self.delta if self.delta else 1.0

    @property
    def kept_by_rounding(self) -> float:
        """The part of the delta that rounding once leaves."""
        return 1.0 + self.rounding_along / self.delta

    @property
    def error(self) -> float:
        """The length of the difference, as a part of the delta's."""
        return math.sqrt(self.off / self.delta) if self.delta else 0.0

    @property
    def aside(self) -> float:
        """The length of the part of the change that is no multiple of the delta."""
        return math.sqrt(max(self.off - self.off_along**2 / self.delta, 0.0))
