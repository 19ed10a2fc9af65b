"""The measure of a merge, whatever tool made it: the part of an adapter's delta that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..export.staging import Source
from ..model.quantization import is_quantized_layer, share_of_codes
from ..model.tree import ModelTree
from ..model.wrappers import canonical_fqn, unwrap
from ..reports import first_of
from ..tensors.lazy import materialize
from .adapters import SavedAdapter
from .causes import TRANSPOSED, Causes, by_cause, is_right
from .figures import Figures, compare
from .reader import is_trained_copy
from .sides import MergedSide, Names, Side, original_tensors, plain_side

_MOST_ROWS = 256  # of a matrix whose rank is asked for, and columns
TRAINED, ORIGINAL, OTHER = "trained", "original", "other"
MISSING = "missing from the checkpoint"
LOST_BY_A_TIE = "a trained weight was lost: loading ties it to another"
UNKNOWN = "in neither the base nor the adapter"
WRONG_SHAPE = "another shape than the base's"


@dataclass(frozen=True)
class TensorMeasure:
    """The figures of one adapted tensor.

    Attributes:
        kept: The part of its delta that is there: the projection of its change on it.
        error: What is beside the delta, as a part of the delta's length.
        num_bits: The bits of an element of the dtype that it is stored in.
    """

    kept: float
    error: float
    num_bits: int


@dataclass(frozen=True)
class MergeFault:
    """Tensors that are not what a merge gives.

    Attributes:
        cause: Why, as far as the figures tell.
        fqns: Their names.
        evidence: What was found, of the first of them.
    """

    cause: str
    fqns: tuple[str, ...]
    evidence: str

    def __str__(self) -> str:
        beside = f" ({self.evidence})" if self.evidence else ""
        return f"{self.cause}: {first_of(self.fqns)}{beside}"


@dataclass(frozen=True)
class MergeMeasure:
    """The measure of a merged checkpoint against its base and its adapter.

    Attributes:
        kept: The part of the adapter's delta that is there, over all adapted tensors:
            the projection of their change on it.
        error: What is beside the delta, as a part of the delta's length. Rounding to
            half is a part of it.
        onto: What the delta was added to: ``"trained"``, the dequantized weights that
            were trained on; ``"original"``, those of the base's files; ``"other"``.
        tensors: The figures of each adapted tensor that was found, by its name.
        num_compared: The number of tensors compared, adapted or not.
        faults: What is not as a merge makes it; empty where all of it is.
        base_is_quantized: Whether the base was quantized as in training.
    """

    kept: float
    error: float
    onto: str
    tensors: Mapping[str, TensorMeasure]
    num_compared: int
    faults: tuple[MergeFault, ...]
    base_is_quantized: bool

    def __str__(self) -> str:
        if self.faults:
            worst = max(self.faults, key=lambda fault: len(fault.fqns))
            return f"not a merge: {worst}"
        if not self.tensors:
            return "a merge: the adapter adds nothing, and neither does the checkpoint"
        onto = {
            TRAINED: "the weights that were trained on",
            ORIGINAL: "the base's own weights, not the quantized ones that were trained on",
        }
        base = onto[ORIGINAL if self.onto == ORIGINAL else TRAINED]
        return f"a merge: {self.kept:.1%} of what the adapter learned, on {base}"


def measure_merge(
    merged: MergedSide, adapted: nn.Module, saved: SavedAdapter, base: Source
) -> MergeMeasure:
    """Compare a merged checkpoint with what a base and an adapter give.

    Args:
        merged: The checkpoint.
        adapted: The base as it was trained on, with the adapter on it.
        saved: The adapter.
        base: The base's folder or name.
    """
    bare: Any = unwrap(adapted)[0]
    measuring = _Measuring(
        merged=merged,
        before=plain_side(adapted, is_merged=False),
        after=plain_side(adapted, is_merged=True),
        original=original_tensors(base),
        prefix=getattr(bare, "base_model_prefix", ""),
        dtype=bare.dtype,
        quantized={
            node.fqn: node.module
            for node in ModelTree(adapted).base
            if is_quantized_layer(node.module)
        },
    )
    figures = list(measuring.figures())
    change_of = measuring.change_of
    copies = {canonical_fqn(name) for name in saved.tensors if is_trained_copy(name)}
    causes = Causes(figures, copies, change_of)
    wrong = {
        one.fqn: causes.of(one)
        for one in figures
        if not is_right(one) and one.fqn not in measuring.wrong
    }
    for fqn, partner in measuring.tied.items():
        if fqn in wrong:
            wrong[fqn] = LOST_BY_A_TIE, f"it is {partner} now"
    wrong |= measuring.wrong
    faults = []
    for cause, found in by_cause(wrong).items():
        fqns = tuple(fqn for fqn, _ in found)
        faults.append(MergeFault(cause, fqns, found[0][1]))
    return _measure(figures, faults, bool(getattr(bare, "is_quantized", False)))


def _measure(
    figures: Sequence[Figures], faults: Sequence[MergeFault], is_quantized: bool
) -> MergeMeasure:
    adapted = [one for one in figures if one.delta]
    onto = _onto(adapted, {fqn for fault in faults for fqn in fault.fqns})
    delta = along = off = 0.0
    tensors = {}
    for one in adapted:
        against = one.trained
        if onto == ORIGINAL and one.original is not None:
            against = one.original
        delta += one.delta
        if not one.is_finite:
            tensors[one.fqn] = TensorMeasure(0.0, 1.0, one.num_bits)
            off += one.delta
            continue
        kept, error = against.kept(one.delta), against.error(one.delta)
        tensors[one.fqn] = TensorMeasure(kept, error, one.num_bits)
        along += against.along
        off += against.off
    kept = along / delta if delta else 1.0
    error = math.sqrt(off / delta) if delta else 0.0
    return MergeMeasure(
        kept, error, onto, tensors, len(figures), tuple(faults), is_quantized
    )


def _onto(adapted: Sequence[Figures], wrong: set[str]) -> str:
    """What most adapted tensors were merged onto, the larger ones counting more."""
    trained = original = other = 0
    for one in adapted:
        size = math.prod(one.shape)
        if not one.is_finite:
            continue
        if one.fqn in wrong and one.nearest.off > one.nearest.size / 16:
            other += size
        elif one.original is not None and one.original.off < one.trained.off:
            original += size
        else:
            trained += size
    if other > max(trained, original):
        return OTHER
    return ORIGINAL if original > trained else TRAINED


@dataclass
class _Measuring:
    """Finds the tensors of all sides by name, and compares them."""

    merged: MergedSide
    before: Side
    after: Side
    original: Mapping[str, Tensor]
    prefix: str
    dtype: torch.dtype
    # the base's quantized layers, by their names
    quantized: Mapping[str, nn.Module]

    def __post_init__(self) -> None:
        self._known = {**self.after.named, **self.after.saved}
        self._names = Names(self._known, self.prefix)
        # what no figures are made of, by name: the cause, and the evidence
        self.wrong: dict[str, tuple[str, str]] = {}
        # the tensors that loading takes another for, which is named
        self.tied: dict[str, str] = {}
        self._found = self._find(self.merged.tensors)
        self._originals = self._find(self.original)

    def _find(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            known = self._names.of(name)
            if known is not None:
                found[known] = tensor
        return found

    def figures(self) -> Iterator[Figures]:
        """Compare tensor by tensor; note those that cannot be compared."""
        self._note_unknown()
        for fqn in self._wanted():
            found = self._found.get(fqn)
            if found is None:
                found = self._tied_to(fqn)
            if found is None:
                self.wrong[fqn] = MISSING, ""
                found = self._trained(fqn)  # it keeps nothing
            after = self._known[fqn]
            if found.shape != after.shape:
                if found.shape == after.shape[:-2] + after.shape[-2:][::-1]:
                    self.wrong[fqn] = TRANSPOSED, f"its shape is {tuple(found.shape)}"
                    continue
                shapes = f"{tuple(found.shape)}, expected {tuple(after.shape)}"
                self.wrong[fqn] = WRONG_SHAPE, shapes
                continue
            if not after.is_floating_point():
                continue
            figures = compare(
                fqn,
                found,
                after,
                self._trained(fqn),
                self._original(fqn, after),
                dtype=self.dtype,
                stored=self.merged.stored.get(fqn),
            )
            if figures.original is None and not is_right(figures):
                share = self._share_of_codes(fqn, found)
                figures = dataclasses.replace(figures, base_codes=share)
            yield figures

    def _wanted(self) -> list[str]:
        """The names that the checkpoint should hold, as files have them, or as the model has them."""
        as_saved = [*self.after.saved]
        as_named = [*self.after.named]
        lacking_saved = [fqn for fqn in as_saved if fqn not in self._found]
        lacking_named = [fqn for fqn in as_named if fqn not in self._found]
        wanted = as_saved if len(lacking_saved) <= len(lacking_named) else as_named
        more = [fqn for fqn in self._found if fqn not in wanted]
        return wanted + more

    def _tied_to(self, fqn: str) -> Tensor | None:
        """The tensor that loading takes for one that the checkpoint does not hold."""
        for group in self.merged.ties:
            if fqn not in group:
                continue
            for partner in group:
                if partner in self._found:
                    self.tied[fqn] = partner
                    return self._found[partner]
        return None

    def _trained(self, fqn: str) -> Tensor:
        before = self.before.saved.get(fqn)
        return self.before.named[fqn] if before is None else before

    def _original(self, fqn: str, after: Tensor) -> Tensor | None:
        found = self._originals.get(fqn)
        if found is None or found.shape != after.shape or not found.is_floating_point():
            return None
        return found

    def _share_of_codes(self, fqn: str, found: Tensor) -> float:
        """The share of the base's codes that a tensor without its delta quantizes to."""
        path, _, name = fqn.rpartition(".")
        layer = self.quantized.get(path)
        if layer is None or name != "weight":
            return 0.0
        delta = materialize(self._known[fqn]) - materialize(self._trained(fqn)).float()
        return share_of_codes(layer, materialize(found).float() - delta)

    def change_of(self, figures: Figures) -> Tensor:
        """Some rows and columns of what a tensor adds to its nearest reference."""
        found = materialize(self._found[figures.fqn]).float()
        before = self._trained(figures.fqn)
        if figures.nearest is figures.original:
            before = self._originals[figures.fqn]
        change = found - materialize(before).float()
        matrix = change.flatten(0, -2)
        height, width = (math.ceil(size / _MOST_ROWS) for size in matrix.shape)
        return matrix[::height, ::width]

    def _note_unknown(self) -> None:
        """Note the tensors of the checkpoint that are neither the model's nor in the base's files."""
        for name in self.merged.tensors:
            if self._names.of(name) is None and name not in self.original:
                self.wrong[name] = UNKNOWN, ""
