"""Comparison of two manifests, or of a manifest and a model.

What is compared of a tensor depends on what it is compared for: that a model is the
recorded one, that training would go on the same, or everything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..reports import Differences
from .schema import TensorRecord

Tensors = Mapping[str, TensorRecord]
Pairs = dict[str, tuple[Any, Any]]


class ManifestDiff(Differences):
    """Differences between two manifests, or between a manifest and a model.

    It is empty, and false, where there are none.

    Attributes:
        missing: Names of tensors that only the first has.
        unexpected: Names of tensors that only the second has.
        different: ``{fqn: {what: (first, second)}}`` of the others; the name ``""`` is
            the manifest itself, whose differences have names such as ``"model.class"``
            or ``"config.precision"``.
    """


def compare(
    first: Tensors,
    second: Tensors,
    read: Callable[[TensorRecord], dict[str, Any]],
    header: Mapping[str, Any],
    other_header: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> ManifestDiff:
    """Compare two sets of tensors, and two headers of nested values.

    Args:
        first: The expected tensors, by name.
        second: Those that were found.
        read: Gives the values of each tensor that are compared.
        header: The values expected of the whole, nested.
        other_header: Those that were found.
        ignored: The names of tensors, and the dotted names of values of the whole, that
            may differ.

    Returns:
        The differences.
    """
    whole = _unequal(_flat(header), _flat(other_header))
    for name in ignored:
        whole.pop(name, None)

    different = {"": whole} if whole else {}
    ties, other_ties = _tied(first), _tied(second)
    for fqn in first:
        if fqn not in second or fqn in ignored:
            continue
        one = {**read(first[fqn]), "tied": ties.get(fqn, ())}
        other = {**read(second[fqn]), "tied": other_ties.get(fqn, ())}
        unequal = _unequal(one, other)
        if unequal:
            different[fqn] = unequal

    return ManifestDiff(
        different,
        missing=tuple(fqn for fqn in first if fqn not in second),
        unexpected=tuple(fqn for fqn in second if fqn not in first),
    )


def _unequal(one: Mapping[str, Any], other: Mapping[str, Any]) -> Pairs:
    """The values that differ, by their names; one that is not there is ``None``."""
    pairs = {name: (one.get(name), other.get(name)) for name in (*one, *other)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _tied(tensors: Tensors) -> dict[str, tuple[str, ...]]:
    """For each tied tensor, the names of its group."""
    groups: dict[int, list[str]] = {}
    for fqn, record in tensors.items():
        if record.tie_group is not None:
            groups.setdefault(record.tie_group, []).append(fqn)
    return {fqn: tuple(sorted(names)) for names in groups.values() for fqn in names}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys.

    So a difference of the whole is named as ``"config.precision"``.
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def all_values(tensor: TensorRecord) -> dict[str, Any]:
    """All values of a tensor, but the number of its group, which says nothing."""
    values = dict(vars(tensor))
    del values["tie_group"]
    return values


def as_loaded(tensor: TensorRecord) -> dict[str, Any]:
    """The values of a tensor to compare with a live model's.

    What a preparation left of it is none of them.
    """
    names = ("type", "shape", "original_dtype", "digest")
    return {name: getattr(tensor, name) for name in names}


def for_training(tensor: TensorRecord) -> dict[str, Any]:
    """The values of a tensor that training depends on.

    They are in the order in which an essence hashes them.
    """
    values = all_values(tensor)
    del values["fqn"]
    # it depends on whether the adapter or the preparation came first
    del values["requires_grad"]
    if tensor.prepared_requires_grad:
        del values["digest"]  # training changes the content
    return values
