"""The longest sequence and the largest batch whose step fits a budget, found by few traces.

Steps that make and free the same storages in the same order differ in their sizes
alone. Those are products of whole numbers, so the bytes that were asked for follow a
form with one size or two: in proportion to it, to its square, to it rounded up for a
kernel's tiles. A form is taken where every trace of the order has exactly its value.
What an allocator rounds is rounded afterwards, and the levels are added up as those of
a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from fractions import Fraction
from functools import partial

from .blocks import NotRepeatedError
from .ledger import Ledger, Storage, rounded_up
from .trace import Trace

_OVER_EVERY_BUDGET = 1 << 80  # bytes
TILE = 8
"""The least number of tokens that a kernel pads to: it divides all that kernels work on."""

Guess = Callable[[dict[int, int], int], int | None]
"""Guesses the largest number within a budget by the bytes of those that were tried; ``None``: the middle one."""
Values = tuple[int, ...]
"""The bytes of one storage in each of the traces."""
Form = Callable[[int], int | Fraction]
"""The bytes of one storage by the size."""

# Attention works on 32, 64 or 128 tokens at a time, and pads the rows of masks to 8.
_TILES = (128, 64, 32, 16, 8)
# The forms that the bytes of a storage may be a multiple of, the likely ones first.
_MULTIPLES: tuple[Form, ...] = (
    lambda size: 1,
    lambda size: size,
    lambda size: size + 1,  # labels, padded to be shifted
    lambda size: size * size,
    *(partial(lambda tile, size: rounded_up(size, tile), tile) for tile in _TILES),
    lambda size: size * rounded_up(size, 8),
)


def on_line(tried: dict[int, int], budget: int) -> int | None:
    """Guess the number where the line through the two numbers that came nearest to a budget meets it.

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


def largest(
    num_bytes: Callable[[int], int],
    budget: int,
    numbers: Iterable[int],
    limit: int,
    guess: Guess = on_line,
) -> int:
    """Find the largest whole number up to ``limit`` whose bytes are within a budget; 0 where 1 is not.

    That a number is within the budget and the next one is not is seen of their own
    bytes; a guess that misleads costs trials alone.

    Args:
        num_bytes: The bytes of a number, which must not fall as it grows.
        budget: The most bytes.
        numbers: The numbers to try first; those beyond the limit are left out.
        limit: The largest number that may be given back.
        guess: Guesses the next number to try.

    Returns:
        The number.
    """
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


class UnknownGrowthError(Exception):
    """The bytes of a storage follow no form, or those of a size are no whole number."""


def _numbered(ledger: Ledger) -> tuple[list[Storage], Hashable]:
    """Number the storages of a step.

    Args:
        ledger: The ledger of the step.

    Returns:
        The storages, those that are held before the step first; and their kinds and the
        events by number, which are equal in steps that differ in their sizes alone.
    """
    numbers: dict[Storage, int] = {}
    for storage in ledger.holders:
        numbers[storage] = len(numbers)
    order: list[Hashable] = list(ledger.holders.values())
    for span in ledger.spans:
        order.append(span.mark)
        for storage, is_made in span.events:
            number = numbers.setdefault(storage, len(numbers))
            order.append((number, is_made))
    kinds = tuple(storage.kind for storage in numbers)
    return list(numbers), (kinds, tuple(order))


class Growth:
    """The peak of a step by its size, of traces of one order.

    Args:
        traces: Two traces or more, by size.
        storages: The storages of each, in their order.

    Attributes:
        is_seen: Whether every form was found at one size more than it needs.

    Raises:
        UnknownGrowthError: A storage follows no form.
    """

    def __init__(
        self, traces: Mapping[int, Trace], storages: Mapping[int, list[Storage]]
    ) -> None:
        sizes = tuple(traces)
        self._trace = traces[sizes[0]]
        self._values: dict[Storage, Values] = {}
        for same in zip(*(storages[size] for size in sizes), strict=True):
            values = tuple(storage.asked_bytes for storage in same)
            self._values[same[0]] = values
        self._forms: dict[Values, Form] = {}
        self.is_seen = True
        for values in set(self._values.values()):
            needed, self._forms[values] = _form_of(sizes, values)
            self.is_seen = self.is_seen and needed < len(sizes)

    def peak_bytes(self, size: int) -> int:
        """Return the most bytes that a step of a size holds at any moment.

        Args:
            size: The batch, or the length of its sequences.

        Returns:
            The bytes.

        Raises:
            UnknownGrowthError: The bytes of a storage are no whole number at this size.
            NotRepeatedError: The blocks that are left out cannot be told from the
                others.
        """
        rounding = self._trace.ledger.rounding
        counted: dict[Values | None, int] = {}
        for values, form in self._forms.items():
            asked = form(size)
            if asked != int(asked) or asked < 0:
                raise UnknownGrowthError(f"{asked} bytes at {size}")
            counted[values] = rounded_up(int(asked), rounding)
        levels = self._trace.levels(
            # the optimizer's state is of its own size
            lambda storage: counted.get(self._values.get(storage), storage.num_bytes)
        )
        return max(sum(level.values()) for level in levels.values())


def _form_of(sizes: tuple[int, ...], values: Values) -> tuple[int, Form]:
    """Return the first form that has each value at its size, and the number of sizes that it is made of.

    Raises:
        UnknownGrowthError: None has.
    """
    for multiple in _MULTIPLES:
        factor = Fraction(values[0]) / multiple(sizes[0])
        form: Form = partial(lambda by, of, size: by * of(size), factor, multiple)
        if _has(form, sizes, values):
            return 1, form
    for degree in (1, 2):
        # with one value more than a polynomial needs, where there is one
        if len(sizes) > degree:
            form = partial(_polynomial, sizes[: degree + 1], values)
            if _has(form, sizes, values):
                return degree + 1, form
    raise UnknownGrowthError(f"{values} bytes at {sizes}")


def _polynomial(sizes: tuple[int, ...], values: Values, size: int) -> Fraction:
    """Return the value at a size of the polynomial that goes through as many values as there are sizes (Lagrange)."""
    total = Fraction(0)
    for number, value in zip(sizes, values, strict=False):
        part = Fraction(value)
        for other in sizes:
            if other != number:
                part *= Fraction(size - other, number - other)
        total += part
    return total


def _has(form: Form, sizes: tuple[int, ...], values: Values) -> bool:
    """Return whether a form has each value at its size, and whole numbers at the sizes beside them."""
    if any(form(size) != value for size, value in zip(sizes, values, strict=True)):
        return False
    beside = [form(size + 1) for size in sizes]
    return all(value == int(value) for value in beside)


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
        self._first: list[int] = []
        self._traces: dict[int, Trace] = {}
        self._peaks: dict[int, int] = {}
        self._storages: dict[int, list[Storage]] = {}
        self._orders: dict[int, Hashable] = {}

    def __call__(self, numbers: Iterable[int]) -> int:
        """Search.

        Args:
            numbers: The sizes to try first.

        Returns:
            The size; 0 where not even 1 is within the budget.
        """
        self._first = list(numbers)
        return largest(
            self._num_bytes, self._budget, self._first, self._limit, self._guess
        )

    def _num_bytes(self, size: int) -> int:
        told = None if size in self._first else self._told(size)
        if told is not None:
            return told
        trace = self._trace_at(size)
        if trace is None:
            return _OVER_EVERY_BUDGET
        self._traces[size] = trace
        self._storages[size], self._orders[size] = _numbered(trace.ledger)
        self._peaks[size] = self._peak_of(trace)
        return self._peaks[size]

    def _told(self, size: int) -> int | None:
        """Return the bytes of a size without a step of it, by the growth of traces of one order.

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
            growth = Growth(alike, self._storages)
            if not growth.is_seen:
                return None
            are_own = [growth.peak_bytes(one) == self._peaks[one] for one in alike]
            return growth.peak_bytes(size) if all(are_own) else None
        except (UnknownGrowthError, NotRepeatedError):
            return None

    def _alike(self, size: int) -> dict[int, Trace]:
        """Return the traces of one order with that of a size."""
        alike = {}
        for other, trace in self._traces.items():
            if self._orders[other] == self._orders[size]:
                alike[other] = trace
        return alike

    def _guess(self, tried: dict[int, int], budget: int) -> int | None:
        """Guess by the growth of the traces that are of one order with the one that came nearest."""
        if len(tried) == 1 and self._traces:
            return self._guess_of_one(tried, budget)
        near = sorted(self._traces, key=lambda size: abs(tried[size] - budget))
        alike = self._alike(near[0])
        if len(alike) == 1:
            return on_line(tried, budget)
        try:
            growth = Growth(alike, self._storages)
            found = largest(growth.peak_bytes, budget, near[:2], self._limit)
        except (UnknownGrowthError, NotRepeatedError):
            return on_line(tried, budget)
        within = max((n for n in tried if tried[n] <= budget), default=0)
        beyond = min((n for n in tried if tried[n] > budget), default=self._limit + 1)
        # a growth that other traces contradict is that of other sizes
        return found if within <= found < beyond else None

    def _guess_of_one(self, tried: dict[int, int], budget: int) -> int:
        """Guess by one trace alone: what it holds before the step stays, and the rest grows in proportion."""
        (size,) = tried
        held = self._traces[size].held().total()
        rise = max(tried[size] - held, 1)
        guess = size * max(budget - held, 0) // rise
        # what is between the two is certain without a step where kernels pad one of them
        are_tiles = size % self._tile == guess % self._tile == 0 and self._tile > 1
        return guess + 1 if are_tiles else guess
