"""The longest sequence and the largest batch whose step fits a budget, found by few traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from .blocks import NotRepeatedError
from .growth import Growth, Sequence, UnknownGrowthError
from .trace import Trace

_OVER_EVERY_BUDGET = 1 << 80  # bytes


class Guess(Protocol):
    """Says which number to try next."""

    def __call__(self, tried: dict[int, int], budget: int) -> int | None:
        """Guess the largest number within a budget.

        Args:
            tried: The bytes of each number that was tried.
            budget: The budget, in bytes.

        Returns:
            The number; ``None`` for that in the middle of the range.
        """


def largest(
    num_bytes: Callable[[int], int],
    budget: int,
    numbers: Iterable[int],
    limit: int,
    guess: Guess | None = None,
) -> int:
    """The largest whole number up to ``limit`` whose bytes are within a budget; 0 where 1 is not.

    That a number is within the budget and the next one is not is seen of their own
    bytes; a guess that misleads costs trials alone.

    Args:
        num_bytes: The bytes of a number, which must not fall as it grows.
        budget: The most bytes.
        numbers: The numbers to try first; those beyond the limit are left out.
        limit: The largest number that may be given back.
        guess: Guesses the next number to try; by default `on_line` does.

    Returns:
        The number.
    """
    guess = guess or on_line
    tried: dict[int, int] = {}
    low = 0
    high = limit + 1
    first = [number for number in numbers if number <= limit]
    following = iter(first or [limit])
    while high - low > 1:
        number = next(following, None)
        if number is None:
            number = guess(tried, budget)
            if number is None:
                number = (low + high) // 2
            number = max(low + 1, min(number, high - 1))
        tried[number] = num_bytes(number)
        if tried[number] <= budget:
            low = max(low, number)
        else:
            high = min(high, number)
    return low


def on_line(tried: dict[int, int], budget: int) -> int | None:
    """Where the line through the two numbers that came nearest to a budget meets it.

    Every third number halves the range, in case the line misleads.
    """
    near = sorted(tried, key=lambda number: abs(tried[number] - budget))[:2]
    rise = tried[near[-1]] - tried[near[0]]
    if rise == 0 or len(tried) % 3 == 0:
        return None
    run = near[-1] - near[0]
    return near[0] + (budget - tried[near[0]]) * run // rise


class Search:
    """Finds the largest size of a step within a budget: a batch, or the length of its sequences.

    The sizes that are tried are those that the growth of the traces so far tells. The
    one that is found was traced, and so was the next one.

    Args:
        trace_at: Runs the step of a size; ``None`` of it is one that the model cannot
            run.
        peak_of: The peak of a step that was run, which on one of several devices is not
            its own.
        budget: The budget, in bytes.
        limit: The largest size.
    """

    def __init__(
        self,
        trace_at: Callable[[int], Trace | None],
        peak_of: Callable[[Trace], int],
        budget: int,
        limit: int,
    ) -> None:
        self._trace_at = trace_at
        self._peak_of = peak_of
        self._budget = budget
        self._limit = limit
        self._traces: dict[int, Trace] = {}
        self._sequences: dict[int, Sequence] = {}

    def __call__(self, numbers: Iterable[int]) -> int:
        """Search.

        Args:
            numbers: The sizes to try first.

        Returns:
            The size; 0 where not even 1 is within the budget.
        """
        return largest(
            self._num_bytes,
            self._budget,
            numbers,
            self._limit,
            self._guess,
        )

    def _num_bytes(self, size: int) -> int:
        trace = self._trace_at(size)
        if trace is None:
            return _OVER_EVERY_BUDGET
        self._traces[size] = trace
        self._sequences[size] = Sequence.of(trace.ledger)
        return self._peak_of(trace)

    def _guess(self, tried: dict[int, int], budget: int) -> int | None:
        """Guess by the growth of the traces that are of one order with the one that came nearest."""
        if len(tried) == 1 and self._traces:
            return self._of_one(tried, budget)
        near = sorted(self._traces, key=lambda size: abs(tried[size] - budget))
        alike = {}
        for size in near:
            if self._sequences[size] == self._sequences[near[0]]:
                alike[size] = self._traces[size]
        if len(alike) == 1:
            return on_line(tried, budget)
        try:
            growth = Growth(alike, self._sequences)
            found = largest(growth.peak_bytes, budget, near[:2], self._limit)
        except (UnknownGrowthError, NotRepeatedError):
            return on_line(tried, budget)
        within = max((n for n in tried if tried[n] <= budget), default=0)
        beyond = min((n for n in tried if tried[n] > budget), default=self._limit + 1)
        # a growth that other traces contradict is that of other sizes
        return found if within <= found < beyond else None

    def _of_one(self, tried: dict[int, int], budget: int) -> int:
        """Guess by one trace alone: what it holds before the step stays, and the rest grows in proportion."""
        (size,) = tried
        held = self._traces[size].static().total()
        rise = max(tried[size] - held, 1)
        return size * max(budget - held, 0) // rise
