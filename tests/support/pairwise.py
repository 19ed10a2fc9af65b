"""A cover of all pairs: few cases that combine every two values of different axes at least once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value of each axis such that every two values of two axes meet; the same at each call."""

    numbers: dict[tuple[int, int, int, int], int] = {}

    def pairs(case: tuple[int, ...]) -> int:
        """A bit for each pair of a case: to count bits is many times as fast as to count what sets have in common."""
        bits = 0
        for i, j in itertools.combinations(range(len(axes)), 2):
            bits |= 1 << numbers.setdefault((i, case[i], j, case[j]), len(numbers))
        return bits

    candidates = {case: pairs(case) for case in itertools.product(*(range(len(axis)) for axis in axes))}
    missing = (1 << len(numbers)) - 1
    cases = []
    while missing:
        case = max(candidates, key=lambda case: (candidates[case] & missing).bit_count())
        missing &= ~candidates.pop(case)
        cases.append(tuple(axis[index] for axis, index in zip(axes, case, strict=True)))
    return cases
