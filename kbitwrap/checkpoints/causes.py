"""The causes of a wrong merge, as far as figures and samples of its tensors tell them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..reports import first_of
from .figures import Against, Figures, grid_shape

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

# A right merge rounds once or twice, and may compute the delta itself in half.
_ROUNDINGS = 2.0
OF_DELTA = 0.02
_OF_FLOAT32 = 2.0**-20
# The deviations allowed of what rounding adds to the part that was kept, to half and to
# codes of few bits.
_DEVIATIONS, _DEVIATIONS_OF_CODES = 8.0, 4.0
# The largest difference of quantized weights that nothing was merged into, as a part of
# their length: rounding to 4 bits takes 0.1.
_OF_QUANTIZED = 0.25
_OF_KEPT = 0.1  # the largest difference of what is kept from all of a delta
_MOST_LOST = 0.15  # of a delta in rounding, where its scale still tells
_OF_SCALE = 0.05  # the largest difference of a scale from one that has a name
# The largest difference of two samples of one weight, quantized or not, as a part of
# their length; those of others differ by more than their length.
_ALIKE = 0.25
_ALIGNED = 0.8  # the least cosine of two samples that show the same delta
_SCALES = {2.0: DOUBLED, 0.5: HALVED, -1.0: NEGATED}
_OF_LOW_RANK = 0.95  # of the energy of a change, in half of the singular values
# The wrong matrices of which is asked whose values they hold: the first tell what became
# of many.
_MOST_SEARCHES = 64
OF_BASE_CODES = 0.95  # the least share of codes by which a base is told
_MOST_OF_BASE = 0.3  # a larger change, as a part of the base's length, is another base


def is_right(figures: Figures) -> bool:
    """Whether a tensor is what a merge gives: rounded, on the trained or the original weights."""
    if not figures.is_finite:
        return False

    if not all(is_right(matrix) for matrix in figures.matrices):
        return False

    if figures.base_codes >= OF_BASE_CODES:
        return not figures.is_scaled and figures.likelier is None

    return any(_explains(against, figures) for against in figures.references)


def _explains(against: Against, figures: Figures) -> bool:
    delta = figures.delta
    num_elements = math.prod(figures.shape)
    if figures.stored is not None:
        if not delta:
            return against.off <= _OF_QUANTIZED**2 * against.size
        # With scales of its own a weight of 4 bits was rounded to the nearest codes, by
        # which most of a delta is lost; with the base's, its codes were chosen.
        if not figures.stored.has_due_scales:
            return False
        allowed = _ROUNDINGS * math.sqrt(against.rounding)
        allowed += math.sqrt(figures.stored.most_off) + OF_DELTA * math.sqrt(delta)
        if math.sqrt(against.off) > allowed:
            return False
        deviation = math.sqrt(against.off / num_elements / delta)
        difference = abs(against.kept(delta) - 1)
        return difference <= _OF_KEPT + _DEVIATIONS_OF_CODES * deviation

    allowed = _ROUNDINGS * math.sqrt(against.rounding)
    allowed += OF_DELTA * math.sqrt(delta) + _OF_FLOAT32 * math.sqrt(against.size)
    if math.sqrt(against.off) > allowed:
        return False

    if not delta:
        return True

    deviation = math.sqrt(against.rounding / num_elements / delta)
    # Between what rounding to the coarser dtype keeps, and all of it.
    by_rounding = against.kept_by_rounding(delta)
    least, most = min(by_rounding, 1.0), max(by_rounding, 1.0)
    kept = against.kept(delta)
    difference = max(least - kept, kept - most)
    return difference <= OF_DELTA + _DEVIATIONS * deviation


def is_lost(figures: Sequence[Figures]) -> bool:
    """Whether quantized tensors together lack a part of the delta, which each may lack by chance."""
    total = sum(one.delta for one in figures)
    kept = variance = 0.0
    for one in figures:
        against = one.nearest
        part = one.delta / total
        kept += part * against.kept(one.delta)
        of_one = against.off / math.prod(one.shape) / one.delta
        variance += part**2 * of_one

    allowed = _OF_KEPT + _DEVIATIONS_OF_CODES * math.sqrt(variance)
    return bool(figures) and abs(kept - 1) > allowed


def of_requantized(figures: Figures) -> str:
    """The cause of a tensor that is, or was, quantized and lacks a part of its delta."""
    num_bits = figures.requantized_bits or figures.num_bits
    return REQUANTIZED_TO_4_BITS if num_bits == 4 else REQUANTIZED


class Causes:
    """Tells why tensors are not what they should be.

    Args:
        figures: Those of all tensors, right ones too: a wrong one may hold another's
            values.
        copies: The names of tensors that the adapter holds trained copies of.
        change_of: Reads a part of what a tensor adds to its nearest reference, and of
            what the adapter adds: two matrices of some of its rows and columns.
    """

    def __init__(
        self,
        figures: Sequence[Figures],
        copies: Collection[str],
        change_of: Callable[[Figures], tuple[Tensor, Tensor]],
    ) -> None:
        self._copies = copies
        self._change_of = change_of
        self._by_shape: defaultdict[tuple[int, ...], list[Figures]] = defaultdict(list)
        for one in figures:
            for leaf in one.leaves:
                self._by_shape[leaf.shape].append(leaf)

        self._alike: dict[tuple[int, ...], _Samples] = {}
        self._num_searches = 0

    def of(self, figures: Figures) -> tuple[str, str]:
        """The cause of a wrong tensor, and the evidence."""
        if not figures.is_finite:
            return NOT_FINITE, ""

        of_some = self._of_some(figures)
        if of_some is not None:
            return of_some

        of_scale = self._of_scale(figures) if figures.delta else None
        if of_scale is not None and of_scale[0] != SCALED:
            return of_scale

        held = self._held(figures)
        if held:
            return EXCHANGED, f"it holds {held}"

        if of_scale is not None:
            return of_scale

        if _is_transposed(figures):
            return TRANSPOSED, ""

        nearest = figures.nearest
        part = math.sqrt(nearest.off / nearest.size) if nearest.size else math.inf
        evidence = f"it differs by {part:.1%} of the base" if nearest.size else ""
        if figures.fqn in self._copies:
            cause = ANOTHER_ADAPTER if figures.delta else DROPPED_COPY
            return cause, evidence

        if not figures.delta:
            is_all = len(figures.shape) > 1 and part >= _MOST_OF_BASE
            return (ANOTHER_BASE if is_all else CHANGED), evidence

        stored = figures.stored
        is_scaled = stored is not None and not stored.has_due_scales
        if is_scaled and figures.num_bits == 8:
            return OTHER_SCALES, evidence

        if figures.is_of_codes and part < 1:
            return of_requantized(figures), ""

        if self._is_an_adapters(figures):
            return ANOTHER_ADAPTER, evidence

        return ANOTHER_BASE, evidence

    def _of_some(self, figures: Figures) -> tuple[str, str] | None:
        """The cause of a stack of which some matrices hold a multiple of their delta, and the others are right."""
        names: dict[str, list[str]] = {}
        for matrix in figures.matrices:
            if is_right(matrix):
                continue
            told = self._of_scale(matrix) if matrix.delta else None
            if told is None:
                return None
            names.setdefault(told[0], []).append(matrix.fqn)

        is_whole = sum(map(len, names.values())) == len(figures.matrices)
        if is_whole or len(names) != 1:
            return None

        [(cause, those)] = names.items()
        return cause, f"in {first_of(those)}"

    def _of_scale(self, figures: Figures) -> tuple[str, str] | None:
        """The cause of a tensor that holds a multiple of its delta.

        ``None`` of another.
        """
        delta = figures.delta
        no_delta = NO_DELTA, ""
        if figures.fqn in self._copies:
            no_delta = DROPPED_COPY, "it holds the base's values"
        elif figures.original is not None and figures.original.is_same:
            no_delta = UNCHANGED, ""

        if any(against.is_same for against in figures.references):
            return no_delta

        if figures.likelier is not None:
            return no_delta if not figures.likelier else (_SCALES[figures.likelier], "")

        against = min(figures.references, key=lambda one: one.aside(delta))
        kept = against.kept(delta)
        allowed = _ROUNDINGS * math.sqrt(against.rounding)
        allowed += _OF_SCALE * max(abs(kept), 1.0) * math.sqrt(delta)
        if figures.is_of_codes or against.aside(delta) > allowed:
            return None

        if abs(kept) <= _OF_SCALE:
            return no_delta

        # what rounding takes of a scale too
        lost = min(abs(against.kept_by_rounding(delta) - 1), _MOST_LOST)
        for scale, cause in _SCALES.items():
            if abs(kept - scale) <= _OF_SCALE * abs(scale) + lost:
                return cause, ""

        return SCALED, f"{kept:.2f} times"

    def _held(self, figures: Figures) -> str:
        """The tensor whose values, or whose delta, a wrong one holds; ``""`` if nothing tells."""
        for own in figures.leaves:
            if is_right(own) or self._num_searches == _MOST_SEARCHES:
                continue
            self._num_searches += 1
            if own.shape not in self._alike:
                self._alike[own.shape] = _Samples(self._by_shape[own.shape])
            held = self._alike[own.shape].held_by(own)
            if held:
                return held

        return ""

    def _is_an_adapters(self, figures: Figures) -> bool:
        """Whether the change is of a rank that adapters have, and not of a full one.

        Where the delta is in it, as in that of an earlier checkpoint, what is beside the
        delta is.
        """
        if len(figures.shape) < 2:
            return False

        change, delta = self._change_of(figures)
        if abs(figures.nearest.kept(figures.delta) - 1) <= _OF_KEPT:
            change = change - delta
        energies = torch.linalg.svdvals(change).square()
        few = max(len(energies) // 2, 1)
        return float(energies[:few].sum()) >= _OF_LOW_RANK * float(energies.sum())


class _Samples:
    """The samples of all matrices, or of other tensors, of one shape."""

    def __init__(self, those: Sequence[Figures]) -> None:
        self._those = those
        self._after = torch.stack([one.sample.after for one in those])
        self._trained = torch.stack([one.sample.trained for one in those])
        self._deltas = nn.functional.normalize(self._after - self._trained)

    def held_by(self, own: Figures) -> str:
        """The values, or the delta, of another one that a wrong one holds; ``""`` if nothing tells."""
        found = own.sample.found
        change = nn.functional.normalize(own.sample.change, dim=0)
        delta = nn.functional.normalize(own.sample.delta, dim=0)
        has_values = _distances(found, self._after) <= _ALIKE
        has_values |= _distances(found, self._trained) <= _ALIKE
        # Values that are like its own, too, tell nothing of an exchange.
        has_values &= _distances(found, own.sample.after[None]) > _ALIKE
        has_delta = self._deltas @ change >= _ALIGNED
        # Where another's delta is like its own, its own tells nothing of an exchange.
        has_delta &= self._deltas @ delta < _ALIGNED

        for place, other in enumerate(self._those):
            if other is own:
                continue
            if has_values[place]:
                return f"the values of {other.fqn}"
            if has_delta[place]:
                return f"the delta of {other.fqn}"

        return ""


def _distances(a: Tensor, others: Tensor) -> Tensor:
    """The lengths of the differences from each of the others, as parts of their lengths."""
    lengths = others.norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    parts: Tensor = (others - a).norm(dim=1) / lengths
    return parts


def _is_transposed(figures: Figures) -> bool:
    """Whether square matrices, or the deltas in them, lie transposed."""
    if len(figures.shape) < 2 or figures.shape[-1] != figures.shape[-2]:
        return False

    grid = grid_shape(figures.shape)
    sample = figures.sample
    turned = sample.found.view(grid).mT.reshape(-1)
    if bool(_distances(turned, sample.after[None]) <= _ALIKE):
        return True

    change = nn.functional.normalize(sample.change, dim=0)
    delta = sample.delta.view(grid).mT.reshape(-1)
    return bool(change @ nn.functional.normalize(delta, dim=0) >= _ALIGNED)


def by_cause(found: Mapping[str, tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    """The wrong tensors of each cause, each with its evidence."""
    causes: dict[str, list[tuple[str, str]]] = {}
    for fqn, (cause, evidence) in found.items():
        causes.setdefault(cause, []).append((fqn, evidence))

    return causes
