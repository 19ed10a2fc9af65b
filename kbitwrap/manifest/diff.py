"""Comparison of two manifests, or of a manifest and a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..reports import Differences
from .schema import TensorRecord

Values = dict[str, dict[str, Any]]
"""The values of tensors that are compared, by the tensors' names."""


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
    header: Mapping[str, Any],
    other_header: Mapping[str, Any],
    tensors: Values,
    other_tensors: Values,
    ignored: Collection[str] = (),
) -> ManifestDiff:
    """Compare what is expected with what was found.

    Args:
        header: The values expected of the whole, nested.
        other_header: Those that were found.
        tensors: The values expected of each tensor.
        other_tensors: Those that were found.
        ignored: The names of tensors, and the dotted names of values of the whole, that
            may differ.

    Returns:
        The differences.
    """
    whole = _unequal(_flat(header), _flat(other_header))
    different = {"": {name: whole[name] for name in whole if name not in ignored}}
    for fqn, values in tensors.items():
        if fqn in other_tensors and fqn not in ignored:
            different[fqn] = _unequal(values, other_tensors[fqn])

    return ManifestDiff(
        {fqn: pairs for fqn, pairs in different.items() if pairs},
        missing=tuple(fqn for fqn in tensors if fqn not in other_tensors),
        unexpected=tuple(fqn for fqn in other_tensors if fqn not in tensors),
    )


def _unequal(
    one: Mapping[str, Any], other: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, by their names; ``None`` is not there."""
    pairs = {name: (one.get(name), other.get(name)) for name in (*one, *other)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys, such as ``"config.precision"``."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def all_values(
    tensors: Mapping[str, TensorRecord], left_out: Collection[str] = ()
) -> Values:
    """Return all values of tensors, but those left out.

    The names of tied tensors, as ``"tied"``, stand for the number of their group, which
    says nothing.
    """
    groups: dict[int | None, list[str]] = {}
    for fqn, tensor in sorted(tensors.items()):
        groups.setdefault(tensor.tie_group, []).append(fqn)
    groups[None] = []

    found = {}
    for fqn, tensor in tensors.items():
        values = {**vars(tensor), "tied": tuple(groups[tensor.tie_group])}
        for name in ("tie_group", *left_out):
            del values[name]
        found[fqn] = values

    return found


def values_as_loaded(tensors: Mapping[str, TensorRecord]) -> Values:
    """Return the values to compare with a live model's: none of what a preparation left."""
    return all_values(
        tensors, ("requires_grad", "prepared_dtype", "prepared_requires_grad")
    )


def values_for_training(tensors: Mapping[str, TensorRecord]) -> Values:
    """Return the values that training depends on, in the order in which an essence hashes them."""
    # `requires_grad` depends on whether the adapter or the preparation came first
    found = all_values(tensors, ("fqn", "requires_grad"))
    for values in found.values():
        if values["prepared_requires_grad"]:
            del values["digest"]  # training changes the content

    return found
