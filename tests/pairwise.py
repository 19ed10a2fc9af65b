"""Few cases in which each pair of values of independent choices comes up."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cover all pairs of values of different choices, greedily and always alike.

    Args:
        *choices: The values of each choice.

    Returns:
        Cases with one value of each choice, in the order in which the first two choices are written. There are as many
        as the two longest choices have pairs, or a few more.

    Example:
        >>> pairwise("abc", "xy", [0, 1])
        [('a', 'x', 0), ('a', 'y', 1), ('b', 'x', 1), ('b', 'y', 0), ('c', 'x', 0), ('c', 'y', 1)]
    """
    product = list(itertools.product(*(range(len(values)) for values in choices)))
    missing = set(itertools.chain.from_iterable(map(_pairs, product)))
    cases = []
    while missing:
        case = max(product, key=lambda case: len(missing.intersection(_pairs(case))))  # the first of the best
        missing.difference_update(_pairs(case))
        cases.append(case)
    return [tuple(values[i] for values, i in zip(choices, case, strict=True)) for case in sorted(cases)]


def _pairs(case: Iterable[int]) -> list[Any]:
    return list(itertools.combinations(enumerate(case), 2))
