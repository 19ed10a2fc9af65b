"""The causes of a wrong merge, as far as figures and samples of its tensors tell them."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..export.sums import ComparisonSums
from ..reports import first_of
from .figures import Figures

LOST_BY_A_TIE = "a trained weight was lost: loading ties it to another"
UNCHANGED = "no delta: the base's bytes, unchanged"
NO_DELTA = "no delta"
DROPPED_COPY = "the trained copy was dropped"
DOUBLED = "the delta is doubled: merged twice, or by a wrong scale"
HALVED = "the delta is halved: a wrong scale"
NEGATED = "the delta is negated: a wrong scale"
SCALED = "the delta has another scale"
EXCHANGED = "two layers or experts were exchanged"
TRANSPOSED = "transposed"
NOT_FINITE = "not finite"
REQUANTIZED = "an adapter was merged into quantized weights"
OTHER_SCALES = "its scales are neither the base's nor those of the merged weights"
REQUANTIZED_TO_4_BITS = "an adapter was merged into 4-bit weights"
ANOTHER_ADAPTER = "another adapter's delta"
ANOTHER_BASE = "onto another base, or this one quantized otherwise"
CHANGED = "changed, though no adapter touches it"

Cause = tuple[str, str]
"""The cause of a wrong tensor, and the evidence of it, which may be ``""``."""

# ----------------------------------------------------------------------------------------------------
# The limits of what is right and alike. Each was chosen between what right merges of all
# tools and dtypes show and what the broken ones of tests/checkpoints show.
# ----------------------------------------------------------------------------------------------------

# A right merge rounds once or twice, and may compute the delta itself in half, whose
# rounding is a part of the delta.
ROUNDINGS = 2.0
OF_DELTA = 0.02
_OF_FLOAT32 = 2.0**-20  # of the weights' length: sums in float32, in another order
# The standard deviations allowed of what rounding adds to the part of a delta that was
# kept.
_DEVIATIONS = 8.0
_OF_KEPT = 0.1  # the largest difference of what codes keep of a delta from all of it
_OF_SCALE = 0.05  # the largest difference of a scale from one that has a name
# The largest difference of two versions of one weight, quantized or not, as a part of
# its length: rounding to 4 bits takes 0.1, and other weights differ by more than 1.
_ALIKE = 0.25
_ALIGNED = 0.8  # the least cosine of two samples that show the same delta
# The least part of the energy of a change in half of its singular values: an adapter's
# rank is far below that, and a square random matrix has 0.9 there.
_OF_LOW_RANK = 0.95
OF_BASE_CODES = 0.95  # the least share of codes by which a base is told


def is_right(figures: Figures) -> bool:
    """Return whether a tensor is what a merge gives: rounded, on the trained or the original weights."""
    if not figures.is_finite:
        return False

    if not all(is_right(matrix) for matrix in figures.matrices):
        return False

    # With the delta taken off it has the base's codes: only the scales can be others, or
    # the multiple of the delta.
    if figures.base_codes >= OF_BASE_CODES:
        return not figures.is_scaled and figures.likelier is None

    return any(
        _is_reference_with_delta(against, figures) for against in figures.references
    )


def _is_reference_with_delta(against: ComparisonSums, figures: Figures) -> bool:
    """Return whether a tensor is its reference with the delta, rounded."""
    delta = figures.delta
    num_elements = math.prod(figures.shape)
    allowed = ROUNDINGS * math.sqrt(against.rounding) + OF_DELTA * math.sqrt(delta)
    if not figures.is_quantized:
        allowed += _OF_FLOAT32 * math.sqrt(against.size)
    elif not delta:
        return against.off <= _ALIKE**2 * against.size
    elif figures.has_due_scales:
        allowed += math.sqrt(figures.most_off)
    else:
        # With scales of its own a weight of 4 bits was rounded to the nearest codes, by
        # which most of a delta is lost; with the base's, its codes were chosen.
        return False

    if math.sqrt(against.off) > allowed:
        return False

    if not delta:
        return True

    kept = against.kept
    if figures.is_quantized:
        deviation = math.sqrt(against.off / num_elements / delta)
        return abs(kept - 1) <= _OF_KEPT + _DEVIATIONS * deviation

    # Between what rounding to the coarser dtype keeps, and all of it.
    by_rounding = against.kept_by_rounding
    deviation = math.sqrt(against.rounding / num_elements / delta)
    slack = OF_DELTA + _DEVIATIONS * deviation
    return min(by_rounding, 1.0) - slack <= kept <= max(by_rounding, 1.0) + slack


def find_causes(
    figures: Sequence[Figures], copies: Collection[str], tied: Mapping[str, str]
) -> dict[str, Cause]:
    """Find the cause of each wrong tensor, and the evidence, by name.

    Args:
        figures: Those of all tensors, right ones too: a wrong one may hold another's
            values.
        copies: The names of tensors that the adapter holds trained copies of.
        tied: The tensors that loading takes another for, which is named.
    """
    alike = defaultdict(list)
    for one in figures:
        for leaf in one.leaves:
            alike[leaf.shape].append(leaf)

    # Quantized tensors together may lack a part of the delta, which each may lack by chance.
    delta = off_along = variance = 0.0
    for one in figures:
        if one.is_quantized and one.delta:
            delta += one.delta
            off_along += one.nearest.off_along
            variance += one.delta * one.nearest.off / math.prod(one.shape)

    is_lost = abs(off_along) > _OF_KEPT * delta + _DEVIATIONS * math.sqrt(variance)
    causes = {}
    for one in figures:
        is_short = is_lost and one.is_quantized and one.delta
        if is_short or not is_right(one):
            wrong = _Wrong(one, alike, one.fqn in copies, tied.get(one.fqn))
            causes[one.fqn] = wrong.cause()

    return causes


class _Wrong:
    """A wrong tensor, and the facts that tell its cause, each found when the table asks for it."""

    def __init__(
        self,
        figures: Figures,
        alike: Mapping[tuple[int, ...], Sequence[Figures]],
        is_copy: bool = False,
        partner: str | None = None,
    ) -> None:
        self.figures = figures
        self.delta = figures.delta
        self.is_copy = is_copy
        self.partner = partner
        self._alike = alike
        # itself, or the first matrix of a stack, of which all are wrong
        self._first = figures.leaves[0]

    def cause(self) -> Cause:
        """Return the cause, and the evidence; of a stack that is right in part, those of its first wrong matrix."""
        parts = [one for one in self.figures.matrices if not is_right(one)]
        if 0 < len(parts) < len(self.figures.matrices):
            cause, evidence = _Wrong(parts[0], self._alike).cause()
            where = f"in {first_of([one.fqn for one in parts])}"
            return cause, f"{where}: {evidence}" if evidence else where

        holding = (row for row in _CAUSES if row[1](self))
        cause, _, evidence = next(holding)
        return cause, evidence.format(self)

    @functools.cached_property
    def multiple(self) -> float | None:
        """The multiple of its delta that the tensor holds; ``None`` if the difference is no multiple."""
        figures, delta = self.figures, self.delta
        if not delta:
            return None

        if any(against.is_same for against in figures.references):
            return 0.0

        if figures.likelier is not None:
            return figures.likelier

        against = min(figures.references, key=lambda one: one.aside)
        kept = against.kept
        allowed = ROUNDINGS * math.sqrt(against.rounding)
        allowed += _OF_SCALE * max(abs(kept), 1.0) * math.sqrt(delta)
        if self.num_bits_of_codes or against.aside > allowed:
            return None

        if abs(kept) <= _OF_SCALE:
            return 0.0

        for scale in (2.0, 0.5, -1.0):
            if abs(kept - scale) <= _OF_SCALE * abs(scale):
                return scale

        return kept

    @property
    def is_base(self) -> bool:
        """Whether it is the tensor in the base's files."""
        return any(against.is_same for against in self.figures.references[1:])

    @functools.cached_property
    def held(self) -> str:
        """The tensor whose values, or whose delta, the first wrong matrix holds; ``""`` if nothing tells."""
        own = self._first.sample
        change, delta = own.change, own.delta
        # Where it is like its own values, or the other's delta like its own, nothing was
        # exchanged.
        has_own = _is_alike(own.found, own.after)
        for other in self._alike[self._first.shape]:
            if other is self._first:
                continue
            values = other.sample.after, other.sample.trained
            is_there = any(_is_alike(own.found, one) for one in values)
            if is_there and not has_own:
                return f"the values of {other.fqn}"
            others = other.sample.delta
            if _is_aligned(change, others) and not _is_aligned(delta, others):
                return f"the delta of {other.fqn}"

        return ""

    @property
    def is_transposed(self) -> bool:
        """Whether square matrices, or the deltas in them, lie transposed."""
        shape, sample = self.figures.shape, self.figures.sample
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return False

        is_turned = _is_alike(sample.found.mT, sample.after)
        return is_turned or _is_aligned(sample.change, sample.delta.mT)

    @property
    def off(self) -> float:
        """The length of the difference, as a part of the weights'."""
        nearest = self.figures.nearest
        return math.sqrt(nearest.off / nearest.size) if nearest.size else math.inf

    @property
    def num_bits_of_codes(self) -> int:
        """The bits of the codes that it is stored in, or was before; 0 of another."""
        is_quantized = self.figures.is_quantized
        return self.figures.num_bits if is_quantized else self.figures.requantized_bits

    @property
    def is_twice(self) -> bool:
        """Whether the delta is there twice, on a base that was quantized again in between."""
        if not self.delta:
            return False

        nearest = self.figures.nearest
        deviation = math.sqrt(nearest.off / math.prod(self.figures.shape) / self.delta)
        return abs(nearest.kept - 2) <= _OF_KEPT and _DEVIATIONS * deviation < 1

    @property
    def is_of_low_rank(self) -> bool:
        """Whether the change is of a rank that adapters have, and not of a full one.

        Then half of the singular values of its sample, a grid of 32 by 32 at most, have
        nearly all of the energy, which tells ranks up to 16. Where the adapter's own delta
        is there whole, it is taken off first: what is left may be another adapter's, or
        the difference from an earlier checkpoint of the run.
        """
        figures, sample = self._first, self._first.sample
        change = sample.change
        if figures.is_onto_original:
            change = sample.found - sample.original
        if abs(figures.nearest.kept - 1) <= _OF_KEPT:
            change = change - sample.delta
        energies = torch.linalg.svdvals(change[0]).square()
        first_half = max(len(energies) // 2, 1)
        are_enough = energies[:first_half].sum() >= _OF_LOW_RANK * energies.sum()
        return len(figures.shape) >= 2 and bool(are_enough)


_DIFFERENCE = "it differs by {0.off:.1%} of the base"
# The first row counts whose condition holds: the cause, the condition, the evidence. A wrong copy with a
# delta holds another adapter's, since the rows before it tell the base's values and multiples of its own
# delta. One that was trained in place, as a bias is, has no delta, because its reference is the trained
# value: it counts as dropped.
_CAUSES: tuple[tuple[str, Callable[[_Wrong], object], str], ...] = (
    (LOST_BY_A_TIE, lambda one: one.partner, "it is {0.partner} now"),
    (NOT_FINITE, lambda one: not one.figures.is_finite, ""),
    (DROPPED_COPY, lambda one: one.is_copy and one.multiple == 0, "it holds the base's values"),
    (UNCHANGED, lambda one: one.multiple == 0 and one.is_base, ""),
    (NO_DELTA, lambda one: one.multiple == 0, ""),
    (DOUBLED, lambda one: one.multiple == 2, ""),
    (HALVED, lambda one: one.multiple == 0.5, ""),
    (NEGATED, lambda one: one.multiple == -1, ""),
    (EXCHANGED, lambda one: one.held, "it holds {0.held}"),
    (SCALED, lambda one: one.multiple, "{0.multiple:.2f} times"),
    (TRANSPOSED, lambda one: one.is_transposed, ""),
    (ANOTHER_ADAPTER, lambda one: one.is_copy and one.delta, _DIFFERENCE),
    (DROPPED_COPY, lambda one: one.is_copy, _DIFFERENCE),
    (CHANGED, lambda one: not one.delta and (one.off < _ALIKE or len(one.figures.shape) < 2), _DIFFERENCE),
    (ANOTHER_BASE, lambda one: not one.delta, _DIFFERENCE),
    (OTHER_SCALES, lambda one: not one.figures.has_due_scales and one.figures.num_bits == 8, _DIFFERENCE),
    (REQUANTIZED_TO_4_BITS, lambda one: one.off < 1 and one.num_bits_of_codes == 4, ""),
    (REQUANTIZED, lambda one: one.off < 1 and one.num_bits_of_codes, ""),
    (DOUBLED, lambda one: one.is_twice, _DIFFERENCE),
    (ANOTHER_ADAPTER, lambda one: one.is_of_low_rank, _DIFFERENCE),
    (ANOTHER_BASE, lambda one: True, _DIFFERENCE + "; another adapter of a rank above 16 looks so too"),
)  # fmt: skip


def _is_alike(found: Tensor, other: Tensor) -> bool:
    """Return whether two samples are of versions of one weight."""
    return bool((other - found).norm() <= _ALIKE * other.norm())


def _is_aligned(change: Tensor, delta: Tensor) -> bool:
    """Return whether two samples show the same delta."""
    flat = change.flatten(), delta.flatten()
    return bool(nn.functional.cosine_similarity(*flat, dim=0) >= _ALIGNED)
