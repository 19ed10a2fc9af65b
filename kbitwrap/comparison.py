"""Comparison of two records of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from .reports import Differences
from .schema import TensorRecord


class ManifestDiff(Differences):
    """Differences between two manifests, or between a manifest and a model. Empty, and false, where there are none.

    Attributes:
        missing: Names of tensors that only the first has.
        unexpected: Names of tensors that only the second has.
        different: ``{fqn: {what: (first, second)}}`` of the others; the name ``""`` is the manifest itself, and what
            differs there has names such as ``"model.class"`` or ``"config.precision"``.
    """


def compare(
    first: Mapping[str, TensorRecord],
    second: Mapping[str, TensorRecord],
    read: Callable[[TensorRecord], Mapping[str, Any]],
    header: Mapping[str, Any],
    other_header: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> ManifestDiff:
    """Compare two sets of tensors, and two headers.

    Args:
        first: Tensors by name.
        second: The others.
        read: The values of a tensor that are compared, where both tensors have them; ties always are.
        header: Nested values that describe the first as a whole.
        other_header: Nested values that describe the second.
        ignored: Dotted names of values in the headers that are not compared.

    Returns:
        The differences.
    """
    one, other = flat(header), flat(other_header)
    pairs = {key: (one.get(key), other.get(key)) for key in (*one, *other) if key not in ignored}
    different = {"": _unequal(pairs)}
    ties, other_ties = _tied(first), _tied(second)
    for fqn in (fqn for fqn in first if fqn in second):
        values, others = read(first[fqn]), read(second[fqn])
        pairs = {name: (value, others[name]) for name, value in values.items() if name in others}
        different[fqn] = _unequal({**pairs, "tied": (ties.get(fqn, ()), other_ties.get(fqn, ()))})
    return ManifestDiff(
        {fqn: rows for fqn, rows in different.items() if rows},
        missing=tuple(fqn for fqn in first if fqn not in second),
        unexpected=tuple(fqn for fqn in second if fqn not in first),
    )


def _unequal(pairs: Mapping[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _tied(tensors: Mapping[str, TensorRecord]) -> dict[str, tuple[str, ...]]:
    """The names of each group of tied tensors, by each of its names."""
    groups: dict[int, list[str]] = {}
    for fqn, record in tensors.items():
        if record.tie_group is not None:
            groups.setdefault(record.tie_group, []).append(fqn)
    return {fqn: tuple(sorted(names)) for names in groups.values() for fqn in names}


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Write nested mappings as one.

    Args:
        data: The mapping.
        prefix: The beginning of every key.

    Returns:
        Its values by dotted keys.

    Example:
        >>> flat({"model": {"dtype": "bfloat16"}})
        {'model.dtype': 'bfloat16'}
    """
    found: dict[str, Any] = {}
    for key, value in data.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
