"""The growth of a step with its batch, or with the length of its sequences, told by a few traces.

Steps that make and free the same storages in the same order differ in their sizes
alone. Those are products of whole numbers, so the bytes that were asked for follow a
form with one size or two: in proportion to it, to its square, to it rounded up for a
kernel's tiles. A form is taken where every trace of the order has exactly its value.
What an allocator rounds is rounded afterwards, and the levels are added up as those of
a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from .ledger import Ledger, Storage, rounded_up
from .trace import Trace

Values = tuple[int, ...]
"""The bytes of one storage in each of the traces."""
Form = Callable[[int], int | Fraction]
"""The bytes of one storage by the size."""

# Attention works on 32, 64 or 128 tokens at a time, and pads the rows of masks to 8.
_TILES = (128, 64, 32, 16, 8)


def _multiples() -> Iterator[Form]:
    """The forms that the bytes of a storage may be a multiple of, the likely ones first."""
    yield lambda size: 1
    yield lambda size: size
    yield lambda size: size + 1  # labels, padded to be shifted
    yield lambda size: size * size
    for tile in _TILES:
        yield partial(_up, tile)
    yield lambda size: size * rounded_up(size, 8)


def _up(tile: int, size: int) -> int:
    return rounded_up(size, tile)


_MULTIPLES = tuple(_multiples())


class UnknownGrowthError(Exception):
    """The bytes of a storage follow no form, or those of a size are no whole number."""


@dataclass(frozen=True)
class Sequence:
    """The storages of a step, and the order in which they are made and freed.

    Attributes:
        storages: The storages: those that are held before the step, then the others.
        order: The kinds and the events, by number; equal in steps that differ in their
            sizes alone.
    """

    storages: tuple[Storage, ...] = field(compare=False)
    order: Hashable

    @classmethod
    def of(cls, ledger: Ledger) -> Sequence:
        """Number the storages of a ledger."""
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
        return cls(tuple(numbers), (kinds, tuple(order)))


class Growth:
    """The peak of a step by its size, of traces of one order.

    Args:
        traces: Two traces or more, by size.
        sequences: The sequences of these, which are equal.

    Attributes:
        is_seen: Whether every form was found at one size more than it needs.

    Raises:
        UnknownGrowthError: A storage follows no form.
    """

    def __init__(
        self, traces: Mapping[int, Trace], sequences: Mapping[int, Sequence]
    ) -> None:
        sizes = tuple(traces)
        columns = [sequences[size].storages for size in sizes]
        self._trace = traces[sizes[0]]
        self._values: dict[Storage, Values] = {}
        for same in zip(*columns, strict=True):
            values = tuple(storage.asked_bytes for storage in same)
            self._values[same[0]] = values
        self._forms: dict[Values, Form] = {}
        self.is_seen = True
        for values in set(self._values.values()):
            form, needed = _form(sizes, values)
            self._forms[values] = form
            self.is_seen = self.is_seen and needed < len(sizes)

    def peak_bytes(self, size: int) -> int:
        """The most bytes that a step of a size holds at any moment.

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
        counted: dict[Values, int] = {}
        for values, form in self._forms.items():
            asked = form(size)
            if asked != int(asked) or asked < 0:
                raise UnknownGrowthError(f"{asked} bytes at {size}")
            counted[values] = rounded_up(int(asked), rounding)

        def measure(storage: Storage) -> int:
            return counted[self._values[storage]]

        levels = self._trace.levels(measure)
        return max(sum(level.values()) for level in levels.values())


def _form(sizes: tuple[int, ...], values: Values) -> tuple[Form, int]:
    """The first form that has each value at its size, and how many values it needs.

    Raises:
        UnknownGrowthError: None has.
    """
    size, value = sizes[0], values[0]
    for multiple in _MULTIPLES:
        factor = Fraction(value) / multiple(size)
        of_factor: Form = partial(_times, factor, multiple)
        if _has(of_factor, sizes, values):
            return of_factor, 1
    for degree in (1, 2):
        # with one value more than a polynomial needs, where there is one
        if len(sizes) > degree:
            polynomial: Form = partial(_through, sizes[: degree + 1], values)
            if _has(polynomial, sizes, values):
                return polynomial, degree + 1
    raise UnknownGrowthError(f"{values} bytes at {sizes}")


def _times(factor: Fraction, multiple: Form, size: int) -> Fraction:
    return factor * multiple(size)


def _has(form: Form, sizes: tuple[int, ...], values: Values) -> bool:
    """Whether a form has each value at its size, and whole numbers at the sizes beside them."""
    if any(form(size) != value for size, value in zip(sizes, values, strict=True)):
        return False
    beside = [form(size + 1) for size in sizes]
    return all(value == int(value) for value in beside)


def _through(sizes: tuple[int, ...], values: Values, size: int) -> Fraction:
    """The value at a size of the polynomial that goes through as many values as there are sizes (Lagrange)."""
    total = Fraction(0)
    for place, number in enumerate(sizes):
        part = Fraction(values[place])
        for other in sizes:
            if other != number:
                part *= Fraction(size - other, number - other)
        total += part
    return total
