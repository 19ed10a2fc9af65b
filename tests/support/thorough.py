"""Which cases of a test run by default, where others hold the same of another model or setting."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def few(every: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """All cases for ``parametrize``; those that are not chosen run with ``-m thorough`` alone.

    Raises:
        ValueError: What is chosen is no case.
    """
    cases = list(every)
    if unknown := [case for case in chosen if case not in cases]:
        raise ValueError(f"no cases: {unknown}")
    return [case if case in chosen else as_thorough(case) for case in cases]


def as_thorough(case: Any) -> Any:
    """A case that runs with ``-m thorough`` alone."""
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of the axes' values; by default each value of the longest, with the next of every other."""
    longest = max(map(len, axes))
    chosen = [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)]
    return few(itertools.product(*axes), chosen)


def every_other(every: Iterable[Any]) -> list[Any]:
    """All cases for ``parametrize``; by default each second one, where the others hold the same of another value."""
    return [as_thorough(case) if number % 2 else case for number, case in enumerate(every)]
