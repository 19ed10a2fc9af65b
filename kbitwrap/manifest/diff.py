"""Comparison of two manifests, or of a manifest and a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..reports import Differences
from .schema import TensorRecord


class ManifestDiff(Differences):
    """Differences between two manifests, or between a manifest and a model. Empty, and false, where there are none.

    Attributes:
        missing: Names of tensors that only the first has.
        unexpected: Names of tensors that only the second has.
        different: ``{fqn: {what: (first, second)}}`` of the others; the name ``""`` is
            the manifest itself, whose differences have names such as ``"model.class"``
            or ``"config.precision"``.
    """


def compare(
    first: Mapping[str, TensorRecord],
    second: Mapping[str, TensorRecord],
    read: Callable[[TensorRecord], Mapping[str, Any]],
    header: Mapping[str, Any],
    other_header: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> ManifestDiff:
    """Compare two sets of tensors, by the values that ``read`` gives of each, and two headers of nested values."""
    one, other = _flat(header), _flat(other_header)
    whole = {
        key: (one.get(key), other.get(key))
        for key in (*one, *other)
        if key not in ignored
    }
    pairs = {"": whole}
    ties, other_ties = _tied(first), _tied(second)
    for fqn in first:
        if fqn in second:
            values, others = read(first[fqn]), read(second[fqn])
            pairs[fqn] = {name: (values[name], others.get(name)) for name in values}
            # a number that may differ where the group does not
            pairs[fqn].pop("tie_group", None)
            pairs[fqn]["tied"] = ties.get(fqn, ()), other_ties.get(fqn, ())
    different = {}
    for fqn, rows in pairs.items():
        unequal = {name: pair for name, pair in rows.items() if pair[0] != pair[1]}
        if unequal:
            different[fqn] = unequal
    return ManifestDiff(
        different,
        missing=tuple(fqn for fqn in first if fqn not in second),
        unexpected=tuple(fqn for fqn in second if fqn not in first),
    )


def _tied(tensors: Mapping[str, TensorRecord]) -> dict[str, tuple[str, ...]]:
    """For each tied tensor, the names of its group."""
    groups: dict[int, list[str]] = {}
    for fqn, record in tensors.items():
        if record.tie_group is not None:
            groups.setdefault(record.tie_group, []).append(fqn)
    return {fqn: tuple(sorted(names)) for names in groups.values() for fqn in names}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


_AS_LOADED = ("type", "shape", "original_dtype", "digest")
# The flag from before depends on whether the adapter or the preparation came first.
_FOR_TRAINING = (
    *("type", "shape", "original_dtype", "prepared_dtype", "prepared_requires_grad"),
    "digest",
)


def as_loaded(tensor: TensorRecord) -> dict[str, Any]:
    """The values of a tensor to compare with a live model's."""
    return {name: getattr(tensor, name) for name in _AS_LOADED}


def for_training(tensor: TensorRecord) -> dict[str, Any]:
    """The values of a tensor that training depends on, in the order in which an essence hashes them."""
    values = {name: getattr(tensor, name) for name in _FOR_TRAINING}
    if tensor.prepared_requires_grad:
        del values["digest"]  # training changes the content
    return values
