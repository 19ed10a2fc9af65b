"""A cover of all pairs: few cases that combine every two values of different axes at least once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value of each axis such that every two values of two axes meet; the same at each call."""

    def pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(axes)), 2)}

    candidates = {case: pairs(case) for case in itertools.product(*(range(len(axis)) for axis in axes))}
    missing = set().union(*candidates.values())
    cases = []
    while missing:
        case = max(candidates, key=lambda case: len(candidates[case] & missing))
        missing -= candidates.pop(case)
        cases.append(tuple(axis[index] for axis, index in zip(axes, case, strict=True)))
    return cases
