"""How two records of a model differ."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .schema import TensorRecord


@dataclass(frozen=True)
class ManifestDiff:
    """How two manifests differ, or a manifest and a model. Empty, and false, where they do not.

    Attributes:
        missing: Names of tensors that only the first has.
        unexpected: Names of tensors that only the second has.
        different: ``{fqn: {what: (first, second)}}`` of the others; the name ``""`` is the manifest itself, and what
            differs there has names such as ``"model.class"`` or ``"config.precision"``.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    different: Mapping[str, Mapping[str, tuple[Any, Any]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain values, ready for JSON."""
        return {
            "missing": list(self.missing),
            "unexpected": list(self.unexpected),
            "different": {
                fqn: {what: [_plain(value) for value in values] for what, values in found.items()}
                for fqn, found in self.different.items()
            },
        }

    def lines(self) -> list[str]:
        """One line a difference."""
        return [
            *(
                f"{fqn + ': ' if fqn else ''}{what}: expected {shown(expected)}, found {shown(found)}"
                for fqn, rows in self.different.items()
                for what, (expected, found) in rows.items()
            ),
            *(f"{fqn}: missing" for fqn in self.missing),
            *(f"{fqn}: unexpected" for fqn in self.unexpected),
        ]

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "no difference"


def compare(
    first: Mapping[str, TensorRecord],
    second: Mapping[str, TensorRecord],
    what: Collection[str],
    header: Mapping[str, Any],
    other_header: Mapping[str, Any],
    ignored: Collection[str] = (),
) -> ManifestDiff:
    """Compare two sets of tensors, and what is said about each as a whole.

    Args:
        first: Tensors by name.
        second: The others.
        what: Which of their attributes are compared; which tensors are tied to which always is.
        header: What is said about the first, flat.
        other_header: What is said about the second.
        ignored: What of that is not compared.

    Returns:
        How they differ.
    """
    different: dict[str, dict[str, tuple[Any, Any]]] = {}
    for key in dict.fromkeys((*header, *other_header)):
        pair = header.get(key), other_header.get(key)
        if pair[0] != pair[1] and key not in ignored:
            different.setdefault("", {})[key] = pair
    our_ties, their_ties = _tied(first), _tied(second)
    for fqn, record in first.items():
        other = second.get(fqn)
        if other is None:
            continue
        rows = {name: pair for name in what if (pair := (getattr(record, name), getattr(other, name)))[0] != pair[1]}
        tied = our_ties.get(fqn, ()), their_ties.get(fqn, ())
        if tied[0] != tied[1]:
            rows["tied"] = tied
        if rows:
            different[fqn] = rows
    missing = tuple(fqn for fqn in first if fqn not in second)
    return ManifestDiff(missing, tuple(fqn for fqn in second if fqn not in first), different)


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
        prefix: What every key begins with.

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


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxtuple = _repr.maxlist = 12


def shown(value: Any) -> str:
    """Write a value for a message, cut short: it may come from outside."""
    return _repr.repr(value)
