"""The measure of a merge, whatever tool made it: the part of an adapter's delta that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..export.plain import is_transposed
from ..model.bitsandbytes_layers import (
    codes_of,
    has_scales_of_values,
    quantized_layer,
    requantized,
    share_of_codes,
)
from ..model.pretrained import last_two
from ..model.quantization import is_quantized_layer
from ..model.tree import ModelTree, join
from ..model.wrappers import canonical_fqn, unwrap
from ..reports import TensorMeasure, first_of
from ..tensors.lazy import materialize
from .adapters import SavedAdapter
from .base import TrainedBase
from .causes import (
    CHANGED,
    OF_BASE_CODES,
    OF_DELTA,
    REQUANTIZED,
    REQUANTIZED_TO_4_BITS,
    TRANSPOSED,
    find_causes,
    is_right,
)
from .figures import Figures, Stored, compare
from .sides import (
    Side,
    merged_onto,
    original_tensors,
    plain_side,
    stored_dtype,
)

# The least difference from both references, as a part of their length, by which a wrong
# tensor was merged onto another base.
_OF_OTHER = 0.25
_MOST_OF_CODES = 1 << 18  # elements that are quantized to tell a delta by codes
_SCALES_IN_CODES = (0.0, 0.5, 2.0, -1.0)
# The deviations by which fewer other codes tell another multiple of the delta.
_DEVIATIONS_OF_SHARES = 4.0
_MOST_ROWS = 256  # of a matrix whose rank is asked for, and columns
TRAINED, ORIGINAL, OTHER = "trained", "original", "other"
_TOLD_ONTO = {
    TRAINED: "added to the weights that it was trained on",
    ORIGINAL: "added to the base's own weights, not to the quantized ones that it was trained on",
}
MISSING = "missing from the checkpoint"
UNKNOWN = "in neither the base nor the adapter"
WRONG_SHAPE = "another shape than the base's"
WRONG_DTYPE = "numbers of another kind than the base's"


Told = Callable[[int, int], object]
"""Called with the number of tensors that are measured, and of all."""


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

    @property
    def told(self) -> str:
        """The evidence, and the names of the first of them."""
        before = f"{self.evidence}: " if self.evidence else ""
        return f"{before}{first_of(self.fqns)}"

    def __str__(self) -> str:
        return f"{self.cause}: {self.told}"


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
        assumed: The form of the base that was compared with, where nothing records in
            which it was trained on: ``"as they are"``, ``"in nf4"``; ``""``: it is
            recorded.
    """

    kept: float
    error: float
    onto: str
    tensors: Mapping[str, TensorMeasure]
    num_compared: int
    faults: tuple[MergeFault, ...]
    assumed: str = ""

    def __str__(self) -> str:
        if self.faults:
            by_number = sorted(self.faults, key=lambda fault: -len(fault.fqns))
            named = [f"{one.cause} ({first_of(one.fqns, 1)})" for one in by_number]
            onto = f" onto the base's weights {self.assumed}" if self.assumed else ""
            return f"not a merge{onto}: {'; '.join(named)}"

        if not self.tensors:
            return "a merge: the adapter adds nothing, and neither does the checkpoint"

        base = _TOLD_ONTO.get(self.onto, "")
        if self.assumed and self.onto == TRAINED:
            base = (
                f"added to the base's weights {self.assumed}; nothing records whether "
                "it was trained on these"
            )
        if self.assumed and self.onto == OTHER:
            base = f"added to the base's weights {self.assumed}"
        return f"a merge: {self.kept:.1%} of the adapter's delta, {base}"


def measure_merge(
    merged: Side,
    adapted: nn.Module,
    saved: SavedAdapter | None,
    trained: TrainedBase,
    progress: bool | Told = False,
) -> MergeMeasure:
    """Compare a merged checkpoint with what a base and an adapter give.

    Args:
        merged: The checkpoint.
        adapted: The base as it was trained on, with the adapter on it.
        saved: The adapter; ``None`` of a checkpoint that is the base alone.
        trained: The base without it.
        progress: As for `doctor`.
    """
    measuring = _Measuring(merged, adapted, saved, trained)
    figures = list(measuring.figures(progress))
    wrong = find_causes(
        figures, measuring.copies_in_files, measuring.tied, measuring.change_of
    )
    wrong |= measuring.wrong
    return _total(figures, wrong)


def _total(
    figures: Sequence[Figures], wrong: Mapping[str, tuple[str, str]]
) -> MergeMeasure:
    """Add the figures of all tensors up, and name what is wrong by its cause."""
    adapted = [one for one in figures if one.delta]
    tensors = {one.fqn: _of_tensor(one) for one in adapted}
    delta = sum(one.delta for one in adapted)
    kept = off = 0.0
    for one in adapted:
        part = one.delta / delta
        kept += part * tensors[one.fqn].kept
        off += part * tensors[one.fqn].error ** 2

    if not adapted:
        kept = 1.0

    error = math.sqrt(off)
    by_cause: dict[str, list[str]] = {}
    for fqn, (cause, _) in wrong.items():
        by_cause.setdefault(cause, []).append(fqn)

    faults = []
    for cause, fqns in by_cause.items():
        evidence = wrong[fqns[0]][1]
        if cause in (REQUANTIZED, REQUANTIZED_TO_4_BITS):
            evidence = (
                f"{kept:.0%} of the delta survived, with an error of {error:.0%} of it"
            )
        faults.append(MergeFault(cause, tuple(fqns), evidence))

    onto = _onto(adapted, wrong)
    return MergeMeasure(kept, error, onto, tensors, len(figures), tuple(faults))


def _of_tensor(figures: Figures) -> TensorMeasure:
    if not figures.is_finite:
        return TensorMeasure(0.0, 1.0, figures.num_bits)

    against = figures.nearest
    return TensorMeasure(against.kept, against.error, figures.num_bits)


def _onto(adapted: Sequence[Figures], wrong: Collection[str]) -> str:
    """Return the weights that most adapted tensors were merged onto, the larger ones counting more."""
    sizes = {TRAINED: 0, ORIGINAL: 0, OTHER: 0}
    # Where a layer was not quantized the two are one.
    told = [one for one in adapted if one.was_quantized] or adapted
    for one in told:
        onto = ORIGINAL if one.is_onto_original else TRAINED
        if one.fqn in wrong and one.nearest.off > _OF_OTHER**2 * one.nearest.size:
            onto = OTHER
        sizes[onto] += math.prod(one.shape)

    return max(sizes, key=sizes.__getitem__)


class _Measuring:
    """Finds the tensors of all sides by name, and compares them.

    Attributes:
        wrong: What no figures are made of, by name: the cause, and the evidence.
        tied: The tensors that loading takes another for, which is named.
        copies_in_files: The names in files of what the adapter has trained copies of.
    """

    def __init__(
        self,
        merged: Side,
        adapted: nn.Module,
        saved: SavedAdapter | None,
        trained: TrainedBase,
    ) -> None:
        bare: Any = unwrap(adapted)[0]
        self.wrong: dict[str, tuple[str, str]] = {}
        self.tied: dict[str, str] = {}
        self._merged = merged
        self._adapted = adapted
        self._before = plain_side(adapted, is_merged=False)
        self._after = plain_side(adapted, is_merged=True)
        self._known = {**self._after.named, **self._after.saved}
        self._names_in_model = self._before.names_in_model()
        self._dtype: torch.dtype = bare.dtype
        # the base's quantized layers, by the names of their weights in the model
        self._quantized = {
            join(node.fqn, "weight"): node.module
            for node in ModelTree(adapted).base
            if is_quantized_layer(node.module)
        }
        copies = () if saved is None else saved.held
        self.copies_in_files = {
            name for name, fqn in self._names_in_model.items() if fqn in copies
        }

        # Tools write names with the prefixes of wrappers, and with or without that of
        # the model inside a model.
        prefix = f"{getattr(bare, 'base_model_prefix', '')}."

        def known_name(name: str) -> str | None:
            canonical = canonical_fqn(name)
            inside = canonical.removeprefix(prefix)
            tried = (name, canonical, inside, prefix + canonical)
            return next((one for one in tried if one in self._known), None)

        in_files = original_tensors(trained.source)
        self._found = _by_known(merged.saved, known_name)
        self._originals = _by_known(in_files, known_name)
        # What is neither the model's nor in the base's files. Buffers that older
        # releases saved are computed again by loading.
        computed = {last_two(name) for name, _ in bare.named_buffers()}
        for name, tensor in merged.saved.items():
            known = known_name(name)
            if known is not None:
                is_told = self._found[known] is tensor
            else:
                is_told = name in in_files or name in trained.unexpected
                is_told = is_told or last_two(name) in computed
            if not is_told:
                self.wrong[name] = UNKNOWN, ""

    @functools.cached_property
    def _originals_in_model(self) -> dict[str, Tensor]:
        """The base's own tensors by the names in the model, as far as they have its shapes."""
        found = {}
        for name, tensor in self._originals.items():
            if tensor.shape == self._known[name].shape:
                found[self._names_in_model.get(name, name)] = tensor

        return found

    @functools.cached_property
    def _onto_originals(self) -> Mapping[str, Tensor]:
        """The merged weights of layers that have the base's own, by the names in the model."""
        weights = {
            fqn: tensor
            for fqn, tensor in self._originals_in_model.items()
            if fqn in self._quantized
        }
        return merged_onto(self._adapted, weights)

    def figures(self, progress: bool | Told) -> Iterator[Figures]:
        """Compare tensor by tensor; note those that cannot be compared."""
        wanted = self._wanted()
        bar = tqdm(
            wanted,
            desc="measure",
            unit="tensor",
            disable=None if progress is True else True,
            leave=False,
        )
        for number, fqn in enumerate(bar):
            if callable(progress):
                progress(number, len(wanted))
            found = self._held(fqn)
            if found is None:
                self.wrong[fqn] = MISSING, ""
                found = self._trained(fqn)  # it keeps nothing
            after = self._known[fqn]
            turned = after.shape[:-2] + after.shape[-2:][::-1]
            is_float = after.is_floating_point()
            if found.shape != after.shape and found.shape == turned:
                self.wrong[fqn] = TRANSPOSED, f"its shape is {tuple(found.shape)}"
            elif found.shape != after.shape:
                shapes = f"{tuple(found.shape)}, expected {tuple(after.shape)}"
                self.wrong[fqn] = WRONG_SHAPE, shapes
            elif found.is_floating_point() != is_float:
                dtypes = f"{found.dtype}, expected {after.dtype}"
                self.wrong[fqn] = WRONG_DTYPE, dtypes
            elif is_float:
                yield self._compared(fqn, found, after)
            elif not torch.equal(
                materialize(found).to(after.dtype), materialize(after)
            ):
                self.wrong[fqn] = CHANGED, ""

    def _compared(self, fqn: str, found: Tensor, after: Tensor) -> Figures:
        """Compare a tensor with what it should be; tell whether a wrong one was merged into quantized weights."""
        layer = self._quantized.get(self._names_in_model.get(fqn, fqn))
        if layer is not None:
            layer = quantized_layer(layer)  # once, for all that read it here

        figures = self._explained(fqn, found, after, layer)
        is_asked = figures.delta and figures.is_finite and not figures.is_quantized
        if layer is None or not is_asked or is_right(figures):
            return figures
        if codes_of(layer) is None:  # it was loaded with ``has_fp16_weights``
            return figures

        values = materialize(found).float()
        if is_transposed(layer):
            values = values.mT
        off = (requantized(layer, values) - values).abs()
        eps = max(torch.finfo(one).eps for one in (found.dtype, self._dtype))
        if (off <= eps * values.abs()).float().mean() < OF_BASE_CODES:
            return figures

        is_int8 = stored_dtype(layer) == torch.int8
        return dataclasses.replace(figures, requantized_bits=8 if is_int8 else 4)

    def _explained(
        self, fqn: str, found: Tensor, after: Tensor, layer: nn.Module | None
    ) -> Figures:
        """Compare a tensor with what was trained on, and, if that does not explain it, with the base's own."""
        in_model = self._names_in_model.get(fqn, fqn)
        was_quantized = layer is not None
        trained = self._trained(fqn)
        figures = self._figures_of(fqn, found, after, trained, was_quantized)
        own = self._merged.layers.get(in_model)
        is_untouched = not figures.delta and not figures.trained.is_same
        if is_untouched and own is not None and is_quantized_layer(own):
            values = materialize(after).float()
            return self._by_codes(figures, own, values, torch.zeros_like(values))
        if is_right(figures):
            return figures

        if not figures.delta and fqn in self.copies_in_files:
            return figures  # trained in place: the base's own value is not right

        original = self._original(fqn, after)
        if original is None and layer is None:
            return figures

        if original is None:
            assert layer is not None
            values = materialize(found).float()
            delta = materialize(after) - materialize(trained).float()
            return self._by_codes(figures, layer, values, delta)

        figures = self._figures_of(fqn, found, after, trained, was_quantized, original)
        if layer is None or not figures.delta or is_right(figures):
            return figures

        # What the adapter adds to the base's own weight may be another delta.
        after_original = self._onto_originals.get(in_model)
        if after_original is None:
            return figures

        again = self._figures_of(fqn, found, after_original, original, was_quantized)
        if not is_right(again):
            return figures

        return dataclasses.replace(
            again, trained=figures.trained, original=again.trained
        )

    def _by_codes(
        self, figures: Figures, layer: nn.Module, values: Tensor, delta: Tensor
    ) -> Figures:
        """Tell a tensor by the codes and scales of a quantized layer."""
        if is_transposed(layer):
            values, delta = values.mT, delta.mT

        eps = torch.finfo(self._dtype).eps
        if figures.stored is None:
            eps = max(eps, torch.finfo(figures.dtype).eps)
        allowed = eps * values.abs() + OF_DELTA * delta.abs()
        return dataclasses.replace(
            figures,
            base_codes=share_of_codes(layer, values - delta),
            is_scaled=not has_scales_of_values(layer, values - delta, allowed),
            likelier=_likelier(layer, values, delta) if figures.delta else None,
        )

    def _wanted(self) -> list[str]:
        """Return the names that the checkpoint should hold, as files have them, or as the model has them."""
        as_saved, as_named = [*self._after.saved], [*self._after.named]
        lacking_saved = [fqn for fqn in as_saved if fqn not in self._found]
        lacking_named = [fqn for fqn in as_named if fqn not in self._found]
        wanted = as_saved if len(lacking_saved) <= len(lacking_named) else as_named
        more = {*self._found}
        # those that the base ties to one that is there, and loading does not
        ties = self._merged.ties
        if ties is not None:
            for group in self._after.ties or ():
                is_tied = any(set(group) <= set(tied) for tied in ties)
                if not is_tied and not self._found.keys().isdisjoint(group):
                    more.update(group)

        return wanted + sorted(more - set(wanted))

    def _held(self, fqn: str) -> Tensor | None:
        """Return the tensor that the checkpoint holds, or that loading takes for one that it does not hold."""
        if fqn in self._found:
            return self._found[fqn]

        for group in self._merged.ties or ():
            there = [one for one in group if one in self._found]
            if fqn in group and there:
                self.tied[fqn] = there[0]
                return self._found[there[0]]

        return None

    def _figures_of(
        self,
        fqn: str,
        found: Tensor,
        after: Tensor,
        before: Tensor,
        was_quantized: bool,
        original: Tensor | None = None,
    ) -> Figures:
        """Compare a tensor with its references; of one that is stored quantized, tell what rounding explains."""
        name = self._names_in_model.get(fqn, fqn)
        layer = self._merged.layers.get(name)
        dtype = None if layer is None else stored_dtype(layer)
        figures = compare(
            fqn,
            found,
            after,
            before,
            original,
            dtype=self._dtype,
            stored=None if dtype is None else Stored(dtype),
            was_quantized=was_quantized,
        )
        if layer is None or dtype is None or not figures.delta:
            return figures

        codes = codes_of(layer) if is_quantized_layer(layer) else None
        if codes is None:
            stored = Stored(dtype, figures.num_bits != 4)
            return dataclasses.replace(figures, stored=stored)

        values = materialize(after).float()
        delta = values - materialize(before).float()
        if original is not None:
            values = materialize(original).float() + delta
        base = self._quantized.get(name)
        base_codes = None if base is None else codes_of(quantized_layer(base))
        has_due_scales = base_codes is not None and codes.has_scales_of(base_codes)
        if is_transposed(layer):
            values, delta = values.mT, delta.mT
        if not has_due_scales and dtype == torch.int8:
            eps = torch.finfo(self._dtype).eps
            allowed = eps * values.abs() + OF_DELTA * delta.abs()
            has_due_scales = has_scales_of_values(layer, values, allowed)

        stored = Stored(dtype, has_due_scales, codes.most_off(values.flatten()))
        return dataclasses.replace(figures, stored=stored)

    def _trained(self, fqn: str) -> Tensor:
        before = self._before.saved.get(fqn)
        return self._before.named[fqn] if before is None else before

    def _original(self, fqn: str, after: Tensor) -> Tensor | None:
        found = self._originals.get(fqn)
        if found is None:
            found = self._originals_in_model.get(self._names_in_model.get(fqn, fqn))

        if found is None:
            for group in self._before.ties or ():
                there = [one for one in group if one in self._originals]
                if fqn in group and there:
                    found = self._originals[there[0]]

        if found is None or found.shape != after.shape or not found.is_floating_point():
            return None

        return found

    def change_of(self, figures: Figures) -> tuple[Tensor, Tensor]:
        """Read some rows and columns of what a tensor adds to its nearest reference, and of what the adapter adds."""
        after = self._known[figures.fqn]
        found = self._held(figures.fqn)
        assert found is not None
        trained = self._trained(figures.fqn)
        before = trained
        original = self._original(figures.fqn, after)
        if original is not None and figures.nearest is figures.original:
            before = original

        change = materialize(found).float() - materialize(before).float()
        delta = materialize(after).float() - materialize(trained).float()
        height, width = change.flatten(0, -2).shape
        rows, columns = math.ceil(height / _MOST_ROWS), math.ceil(width / _MOST_ROWS)
        some = [one.flatten(0, -2)[::rows, ::columns] for one in (change, delta)]
        return some[0], some[1]


def _by_known(
    tensors: Mapping[str, Tensor], known_name: Callable[[str], str | None]
) -> dict[str, Tensor]:
    """Return the tensors that have a known name by it."""
    found = {}
    for name, tensor in tensors.items():
        known = known_name(name)
        if known is not None:
            found[known] = tensor
    return found


def _likelier(layer: nn.Module, values: Tensor, delta: Tensor) -> float | None:
    """Return the multiple of a delta, other than 1, that the values clearly hold by the codes of the base's layer."""
    num_rows = max(_MOST_OF_CODES // values.shape[1], 1)
    values, delta = values[:num_rows], delta[:num_rows]

    def num_wrong(scale: float) -> float:
        share = share_of_codes(layer, values - scale * delta)
        return (1.0 - share) * values.numel()

    expected = num_wrong(1.0)
    others = {scale: num_wrong(scale) for scale in _SCALES_IN_CODES}
    best = min(others, key=others.__getitem__)
    deviation = math.sqrt(expected + others[best])
    return best if expected - others[best] > _DEVIATIONS_OF_SHARES * deviation else None
