"""The longest sequence and the largest batch whose step fits a budget, found by few traces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Protocol

from .blocks import NotRepeatedError
from .growth import Growth, Sequence, UnknownGrowthError
from .trace import Trace

_OVER_EVERY_BUDGET = 1 << 80  # bytes
TILE = 8
"""The least number of tokens that a kernel pads to: it divides all that kernels work on."""


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

    Every third number halves the range, in case the line misleads; not where it ends at
    a number that was tried, and those beside it were not.
    """
    near = sorted(tried, key=lambda number: abs(tried[number] - budget))[:2]
    rise = tried[near[-1]] - tried[near[0]]
    if rise == 0:
        return None
    run = near[-1] - near[0]
    guess = near[0] + (budget - tried[near[0]]) * run // rise
    is_end = guess in tried and tried.keys().isdisjoint((guess - 1, guess + 1))
    return None if len(tried) % 3 == 0 and not is_end else guess


class Search:
    """Finds the largest size of a step within a budget: a batch, or the length of its sequences.

    The sizes that are tried are those that the growth of the traces so far tells. A size
    is not run where its bytes are certain without: between two that were run, and one
    beyond, where nothing can set it apart from them.

    Args:
        trace_at: Runs the step of a size; ``None`` of it is one that the model cannot
            run.
        peak_of: The peak of a step that was run, which on one of several devices is not
            its own.
        budget: The budget, in bytes.
        limit: The largest size.
        numbers: The model's own numbers of tokens, after which a step may run other
            operations.
        tile: The least number of tokens that a kernel pads to; 1 where it pads none.
    """

    def __init__(
        self,
        trace_at: Callable[[int], Trace | None],
        peak_of: Callable[[Trace], int],
        budget: int,
        limit: int,
        numbers: Set[int] = frozenset(),
        tile: int = 1,
    ) -> None:
        self._trace_at = trace_at
        self._peak_of = peak_of
        self._budget = budget
        self._limit = limit
        self._numbers = numbers
        self._tile = tile
        self._first: set[int] = set()
        self._traces: dict[int, Trace] = {}
        self._sequences: dict[int, Sequence] = {}

    def __call__(self, numbers: Iterable[int]) -> int:
        """Search.

        Args:
            numbers: The sizes to try first.

        Returns:
            The size; 0 where not even 1 is within the budget.
        """
        first = list(numbers)
        self._first.update(first)
        return largest(
            self._num_bytes,
            self._budget,
            first,
            self._limit,
            self._guess,
        )

    def _num_bytes(self, size: int) -> int:
        told = None if size in self._first else self._told(size)
        if told is not None:
            return told
        trace = self._trace_at(size)
        if trace is None:
            return _OVER_EVERY_BUDGET
        self._traces[size] = trace
        self._sequences[size] = Sequence.of(trace.ledger)
        return self._peak_of(trace)

    def _told(self, size: int) -> int | None:
        """The bytes of a size without a step of it, by the growth of traces of one order.

        They are certain between two traces, and one beyond the last, where none of the
        model's own numbers lies and kernels pad none of these or have been seen to pad
        some. The growth has to have every trace's own peak.

        Args:
            size: The size.

        Returns:
            The bytes; ``None`` where it has to be run.
        """
        before = max((one for one in self._traces if one < size), default=None)
        if before is None:
            return None
        alike = self._alike(before)
        last = max(alike)
        # a step may run other operations at such a number, or only beyond it
        end = last if size < last else size + 1
        if size - last > 1 or any(before <= number < end for number in self._numbers):
            return None
        is_padded = {one % self._tile == 0 for one in alike}
        if (size % self._tile == 0) not in is_padded:
            return None
        try:
            growth = Growth(alike, self._sequences)
            if not growth.is_seen:
                return None
            told = growth.peak_bytes(size)
            peaks = [growth.peak_bytes(one) for one in alike]
        except (UnknownGrowthError, NotRepeatedError):
            return None
        is_own = peaks == [self._peak_of(trace) for trace in alike.values()]
        return told if is_own else None

    def _alike(self, size: int) -> dict[int, Trace]:
        """The traces of one order with that of a size."""
        order = self._sequences[size]
        return {
            other: trace
            for other, trace in self._traces.items()
            if self._sequences[other] == order
        }

    def _guess(self, tried: dict[int, int], budget: int) -> int | None:
        """Guess by the growth of the traces that are of one order with the one that came nearest."""
        if len(tried) == 1 and self._traces:
            return self._of_one(tried, budget)
        near = sorted(self._traces, key=lambda size: abs(tried[size] - budget))
        alike = self._alike(near[0])
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
        guess = size * max(budget - held, 0) // rise
        # what is between the two is certain without a step where kernels pad one of them
        are_tiles = size % self._tile == guess % self._tile == 0 and self._tile > 1
        return guess + 1 if are_tiles else guess
