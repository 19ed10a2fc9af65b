"""The measure of a merge, whatever tool made it: the part of an adapter's delta that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    ANOTHER_BASE,
    CHANGED,
    OF_BASE_CODES,
    OF_DELTA,
    REQUANTIZED,
    REQUANTIZED_TO_4_BITS,
    ROUNDINGS,
    TRANSPOSED,
    Cause,
    find_causes,
    is_right,
)
from .figures import Figures, compare
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
# The deviations by which fewer other codes tell another multiple of the delta.
_DEVIATIONS_OF_SHARES = 4.0
TRAINED, ORIGINAL, OTHER = "trained", "original", "other"
_TOLD_ONTO = {
    TRAINED: "added to the weights that it was trained on",
    ORIGINAL: "added to the original weights, not to the quantized ones that it was trained on",
}
# The faults of what is a merge all the same, where most tensors have them, and what it is called.
_STILL_MERGES = {
    REQUANTIZED: "a merge into quantized weights",
    REQUANTIZED_TO_4_BITS: "a merge in 4 bits",
    ANOTHER_BASE: "a merge with another base",
}
MISSING = "missing from the checkpoint"
UNKNOWN = "in neither the base nor the adapter"
WRONG_SHAPE = "another shape than the base's"
WRONG_DTYPE = "numbers of another kind than the base's"


Told = Callable[[int, int], object]
"""A function that is called with the number of tensors that are measured, and of all."""


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
        tensors: The figures of each adapted tensor, by its name; one that is missing has
            0 bits.
        num_compared: The number of tensors compared, adapted or not.
        faults: What is not as a merge makes it; empty where all of it is.
        assumed: The form of the base that was compared with, where nothing records that
            it was trained on in this: ``"as they are"``, ``"in nf4, as given"``; ``""``:
            it is recorded.
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
            named = [f"{one.cause} ({first_of(one.fqns, 1)})" for one in self.faults]
            onto = f" onto the base's weights {self.assumed}" if self.assumed else ""
            what, most = "not a merge", max(self.faults, key=lambda one: len(one.fqns))
            if 2 * len(most.fqns) > len(self.tensors):
                what = _STILL_MERGES.get(most.cause, what)
            return f"{what}{onto}: {'; '.join(named)}"

        if not self.tensors:
            return "a merge: the adapter adds nothing, and neither does the checkpoint"

        base = _TOLD_ONTO.get(self.onto, f"added to the base's weights {self.assumed}")
        if self.assumed and self.onto == TRAINED:
            base = (
                f"added to the base's weights {self.assumed}; nothing records whether "
                "it was trained on these"
            )
        return f"a merge: {self.kept:.1%} of the adapter's delta, {base}"


class _Compared(NamedTuple):
    """One tensor of a merged checkpoint, and all that it is compared with.

    Attributes:
        name: Its name in files, or in the model where files have none.
        fqn: Its name in the model.
        found: The tensor.
        after: What it should be, not rounded.
        trained: The weight that was trained on.
        original: That in the base's files; ``None`` where these have none.
        layer: The layer of the base that quantized it in training, or ``None``.
        stored: The quantized layer of the checkpoint that holds it, or ``None``.
        is_copy: Whether the adapter holds a trained copy of it.
        dtype: The dtype that the model computes in.
    """

    name: str
    fqn: str
    found: Tensor
    after: Tensor
    trained: Tensor
    original: Tensor | None
    layer: nn.Module | None
    stored: nn.Module | None
    is_copy: bool
    dtype: torch.dtype


def measure_merge(
    merged: Side,
    adapted: nn.Module,
    saved: SavedAdapter | None,
    trained: TrainedBase,
    told: Told | None = None,
) -> MergeMeasure:
    """Compare a merged checkpoint with what a base and an adapter give.

    Args:
        merged: The checkpoint.
        adapted: The base as it was trained on, with the adapter on it.
        saved: The adapter; ``None`` of a checkpoint that is the base alone.
        trained: The base without it.
        told: As for `doctor`.
    """
    bare: Any = unwrap(adapted)[0]
    before = plain_side(adapted, is_merged=False)
    after = plain_side(adapted, is_merged=True)
    names_in_model = before.names_in_model()
    befores = {**before.named, **before.saved}
    afters = {**after.named, **after.saved}
    # Each tensor has one name here: that in files, or where these have none the model's.
    names = {fqn: fqn for fqn in afters}
    for name in after.saved:
        fqn = names_in_model.get(name, name)
        if fqn not in after.saved:
            names[fqn] = name

    # Tools write names with the prefixes of wrappers, and with or without that of the
    # model inside a model.
    prefix = f"{getattr(bare, 'base_model_prefix', '')}."

    def known_name(name: str) -> str | None:
        canonical = canonical_fqn(name)
        inside = canonical.removeprefix(prefix)
        tried = (name, canonical, inside, prefix + canonical)
        return next((names[one] for one in tried if one in names), None)

    in_files = original_tensors(trained.source)
    found = _by_known(merged.saved, known_name)
    originals = _by_known(in_files, known_name)
    ties_of_merged = _by_name(merged.ties, names)
    ties_of_base = _by_name(before.ties, names)

    # What is neither the model's nor in the base's files. Buffers that older releases
    # saved are computed again by loading.
    wrong = {}
    computed = {last_two(name) for name, _ in bare.named_buffers()}
    for name, tensor in merged.saved.items():
        known = known_name(name)
        is_told = name in in_files or name in trained.unexpected
        if known is not None:
            is_told = found[known] is tensor
        if not is_told and last_two(name) not in computed:
            wrong[name] = UNKNOWN, ""

    # the base's quantized layers, by the names of their weights in the model
    quantized = {
        join(node.fqn, "weight"): node.module
        for node in ModelTree(adapted).base
        if is_quantized_layer(node.module)
    }

    @functools.cache
    def onto_originals() -> dict[str, Tensor]:
        """Return what merging gives on the base's own weights, by the names in the model."""
        weights = {}
        for name, tensor in originals.items():
            fqn = names_in_model.get(name, name)
            if fqn in quantized and tensor.shape == afters[name].shape:
                weights[fqn] = tensor
        return merged_onto(adapted, weights)

    # The names that the checkpoint should hold, as files have them, or as the model has
    # them; and those that the base ties to one that is there, and loading does not.
    as_saved = [*after.saved]
    as_named = [*dict.fromkeys(names[fqn] for fqn in after.named)]
    wanted = min(as_saved, as_named, key=lambda some: len({*some} - found.keys()))
    more = {*found}
    if merged.ties is not None:
        for name, group in _by_name(after.ties, names).items():
            is_tied = {*group} <= {*ties_of_merged.get(name, ())}
            if not is_tied and not found.keys().isdisjoint(group):
                more.add(name)
    wanted = wanted + sorted(more.difference(wanted))

    tied = {}
    copies = set()
    figures = []
    for number, name in enumerate(wanted):
        if told is not None:
            told(number, len(wanted))
        fqn = names_in_model.get(name, name)
        found_name = _name_in(found, name, ties_of_merged)
        if found_name is None:
            wrong[name] = MISSING, ""
        elif found_name != name:
            tied[name] = found_name
        if saved is not None and fqn in saved.held:
            copies.add(name)
        # a tensor that is missing is compared with the base
        tensor = befores[name] if found_name is None else found[found_name]
        expected = afters[name]
        unlike = _unlike(tensor, expected)
        if unlike is not None:
            wrong[name] = unlike
        if unlike is not None or not expected.is_floating_point():
            continue

        name_of_original = _name_in(originals, name, ties_of_base)
        original = originals.get(name_of_original or "")
        if original is not None and _unlike(original, expected) is not None:
            original = None
        layer = quantized.get(fqn)
        if layer is not None:
            layer = quantized_layer(layer)  # once, for all that read it here
        one = _Compared(
            name,
            fqn,
            tensor,
            expected,
            befores[name],
            original,
            layer,
            merged.layers.get(fqn),
            name in copies,
            bare.dtype,
        )
        figures.append(_measured(one, onto_originals))

    return _total(figures, find_causes(figures, copies, tied) | wrong)


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


def _by_name(
    ties: list[list[str]] | None, names: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return each group of tied tensors by each name in it."""
    groups = {}
    for group in ties or ():
        renamed = [names.get(fqn, fqn) for fqn in group]
        groups.update(dict.fromkeys(renamed, renamed))
    return groups


def _name_in(
    tensors: Mapping[str, Tensor], name: str, ties: Mapping[str, list[str]]
) -> str | None:
    """Return a name that tensors have, or that of one of them which it is tied to; ``None`` without either."""
    tried = [name, *ties.get(name, ())]
    return next((one for one in tried if one in tensors), None)


def _unlike(found: Tensor, expected: Tensor) -> Cause | None:
    """Return why a tensor cannot be compared with the expected one, and the evidence; ``None`` of one that can.

    Of integers it is that they differ.
    """
    if found.shape != expected.shape:
        turned = expected.shape[:-2] + expected.shape[-2:][::-1]
        cause = TRANSPOSED if found.shape == turned else WRONG_SHAPE
        return cause, f"{tuple(found.shape)}, expected {tuple(expected.shape)}"
    if found.is_floating_point() != expected.is_floating_point():
        return WRONG_DTYPE, f"{found.dtype}, expected {expected.dtype}"
    if expected.is_floating_point():
        return None

    values = materialize(found).to(expected.dtype)
    is_same = torch.equal(values, materialize(expected))
    return None if is_same else (CHANGED, "")


def _measured(
    one: _Compared, onto_originals: Callable[[], Mapping[str, Tensor]]
) -> Figures:
    """Compare a tensor with what was trained on, and, if that does not explain it, with the base's own."""
    figures = _against(one, one.after, one.trained)
    if not figures.delta:
        stored = one.stored
        is_changed = not figures.references[0].is_same
        if is_changed and stored is not None and is_quantized_layer(stored):
            values = materialize(one.after).float()
            return _by_codes(one, figures, stored, values, torch.zeros_like(values))
        if one.is_copy:
            return figures  # trained in place: the base's own value is not right

    # The tolerance of a large delta is more than what 8 bits take from the original.
    nearest = figures.nearest
    is_rounded = nearest.off <= ROUNDINGS**2 * nearest.rounding
    is_certain = is_rounded or one.layer is None or figures.is_quantized
    if is_right(figures) and (is_certain or one.original is None):
        return figures

    if one.original is None and one.layer is None:
        return figures

    if one.original is None:
        assert one.layer is not None
        found = materialize(one.found).float()
        delta = materialize(one.after) - materialize(one.trained).float()
        figures = _by_codes(one, figures, one.layer, found, delta)
        return figures if is_right(figures) else _noting_codes(one, figures)

    figures = _against(one, one.after, one.trained, one.original)
    if one.layer is None or not figures.delta or is_right(figures):
        return figures

    if one.fqn in onto_originals():
        # What the adapter adds to the base's own weight may be another delta.
        again = _against(one, onto_originals()[one.fqn], one.original)
        if is_right(again):
            references = [figures.references[0], again.references[0]]
            return dataclasses.replace(again, references=references)

    return _noting_codes(one, figures)


def _noting_codes(one: _Compared, figures: Figures) -> Figures:
    """Note where values are those that quantizing them as the base leaves: they were merged into quantized weights."""
    layer = one.layer
    if figures.is_quantized or not figures.is_finite:
        return figures
    if layer is None or codes_of(layer) is None:  # loaded with ``has_fp16_weights``
        return figures

    values = materialize(one.found).float()
    if is_transposed(layer):
        values = values.mT
    off = (requantized(layer, values) - values).abs()
    eps = max(torch.finfo(dtype).eps for dtype in (one.found.dtype, one.dtype))
    if (off <= eps * values.abs()).float().mean() < OF_BASE_CODES:
        return figures

    is_int8 = stored_dtype(layer) == torch.int8
    return dataclasses.replace(figures, requantized_bits=8 if is_int8 else 4)


def _by_codes(
    one: _Compared,
    figures: Figures,
    layer: nn.Module,
    values: Tensor,
    delta: Tensor,
) -> Figures:
    """Tell a tensor by the codes and scales of a quantized layer."""
    if is_transposed(layer):
        values, delta = values.mT, delta.mT

    eps = torch.finfo(one.dtype).eps
    if not figures.is_quantized:
        eps = max(eps, torch.finfo(figures.dtype).eps)
    allowed = eps * values.abs() + OF_DELTA * delta.abs()
    is_scaled = not has_scales_of_values(layer, values - delta, allowed)
    base_codes = share_of_codes(layer, values - delta)
    figures = dataclasses.replace(figures, base_codes=base_codes, is_scaled=is_scaled)
    if not figures.delta:
        return figures

    # Another multiple of the delta may clearly hold more of the base's codes.
    some = slice(max(_MOST_OF_CODES // values.shape[1], 1))
    shares = {}
    for scale in (1.0, 0.0, 0.5, 2.0, -1.0):
        without = values[some] - scale * delta[some]
        shares[scale] = share_of_codes(layer, without)
    best = max(shares, key=shares.__getitem__)
    num_wrong = (2.0 - shares[1.0] - shares[best]) * values[some].numel()
    num_fewer = (shares[best] - shares[1.0]) * values[some].numel()
    if num_fewer <= _DEVIATIONS_OF_SHARES * math.sqrt(num_wrong):
        return figures
    return dataclasses.replace(figures, likelier=best)


def _against(
    one: _Compared, after: Tensor, before: Tensor, original: Tensor | None = None
) -> Figures:
    """Compare a tensor with its references; of one that is stored quantized, tell what rounding explains."""
    layer = one.stored
    figures = compare(
        one.name,
        one.found,
        after,
        before,
        original,
        dtype=one.dtype,
        stored=None if layer is None else stored_dtype(layer),
        was_quantized=one.layer is not None,
    )
    if layer is None or not figures.delta:
        return figures

    codes = codes_of(layer) if is_quantized_layer(layer) else None
    if codes is None:
        return dataclasses.replace(figures, has_due_scales=figures.num_bits != 4)

    values = materialize(after).float()
    delta = values - materialize(before).float()
    if original is not None:
        values = materialize(original).float() + delta
    if is_transposed(layer):
        values, delta = values.mT, delta.mT
    base_codes = None if one.layer is None else codes_of(one.layer)
    has_due_scales = base_codes is not None and codes.has_scales_of(base_codes)
    if not has_due_scales and figures.dtype == torch.int8:
        allowed = torch.finfo(one.dtype).eps * values.abs() + OF_DELTA * delta.abs()
        has_due_scales = has_scales_of_values(layer, values, allowed)

    return dataclasses.replace(
        figures,
        has_due_scales=has_due_scales,
        most_off=codes.most_off(values.flatten()),
    )


def _total(figures: Sequence[Figures], wrong: Mapping[str, Cause]) -> MergeMeasure:
    """Add the figures of all tensors up, and name what is wrong by its cause."""
    adapted = [one for one in figures if one.delta]
    total = sum(one.delta for one in adapted)
    kept, off = 0.0 if adapted else 1.0, 0.0
    tensors = {}
    for one in adapted:
        num_bits = 0 if wrong.get(one.fqn) == (MISSING, "") else one.num_bits
        measure = TensorMeasure(one.nearest.kept, one.nearest.error, num_bits)
        if not one.is_finite:
            measure = TensorMeasure(0.0, 1.0, num_bits)
        tensors[one.fqn] = measure
        kept += one.delta / total * measure.kept
        off += one.delta / total * measure.error**2

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

    # Most of the elements were merged onto them. Where a layer was not quantized the
    # trained and the original ones are one.
    sizes = {TRAINED: 0, ORIGINAL: 0, OTHER: 0}
    for one in [one for one in adapted if one.was_quantized] or adapted:
        onto = ORIGINAL if one.is_onto_original else TRAINED
        if one.fqn in wrong and one.nearest.off > _OF_OTHER**2 * one.nearest.size:
            onto = OTHER
        sizes[onto] += math.prod(one.shape)

    onto = max(sizes, key=sizes.__getitem__)
    return MergeMeasure(kept, error, onto, tensors, len(figures), tuple(faults))
