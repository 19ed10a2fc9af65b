"""Comparison of two manifests, or of a manifest and a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..reports import Differences
from .schema import TensorRecord

Values = dict[str, dict[str, Any]]
"""The values that are compared, by the names of tensors; those of the whole are ``""``'s."""


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
    first: Values, second: Values, ignored: Collection[str] = ()
) -> ManifestDiff:
    """Compare what is expected with what was found.

    Args:
        first: The values expected of each tensor; those of the whole have the name
            ``""``.
        second: The values that were found.
        ignored: The names of tensors, and of values of the whole, that may differ.

    Returns:
        The differences.
    """
    different = {}
    for fqn, one in first.items():
        other = second.get(fqn)
        if other is None or fqn in ignored:
            continue
        pairs = {}
        for name in {**one, **other}:
            pair = one.get(name), other.get(name)
            is_ignored = not fqn and name in ignored  # a value of the whole
            if pair[0] != pair[1] and not is_ignored:
                pairs[name] = pair
        if pairs:
            different[fqn] = pairs

    return ManifestDiff(
        different,
        missing=tuple(fqn for fqn in first if fqn not in second),
        unexpected=tuple(fqn for fqn in second if fqn not in first),
    )


def of_whole(data: Mapping[str, Any], prefix: str = "") -> Values:
    """Return nested values of the whole by dotted names, such as ``"config.precision"``."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= of_whole(value, f"{prefix}{key}.")[""]
        else:
            flat[prefix + key] = value
    return {"": flat}


def all_values(
    tensors: Mapping[str, TensorRecord], left_out: Collection[str] = ()
) -> Values:
    """Return the fields of each tensor's record, but for those whose names are left out.

    The number of a group of tied tensors is replaced by their names (``"tied"``): numbers
    may differ between equal models.
    """
    groups: dict[int | None, list[str]] = {}
    for fqn, tensor in sorted(tensors.items()):
        if tensor.tie_group is not None:
            groups.setdefault(tensor.tie_group, []).append(fqn)

    found = {}
    for fqn, tensor in tensors.items():
        values = {**vars(tensor), "tied": tuple(groups.get(tensor.tie_group, ()))}
        for name in ("tie_group", *left_out):
            del values[name]
        found[fqn] = values

    return found


def values_as_loaded(tensors: Mapping[str, TensorRecord]) -> Values:
    """Return the values to compare with a live model's: neither flags, which PEFT changes too, nor a prepared dtype."""
    return all_values(
        tensors, ("requires_grad", "prepared_dtype", "prepared_requires_grad")
    )
