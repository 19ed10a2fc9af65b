"""The memory of a step, written down: every storage that was made or freed, in order, and what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..tensors.allocator import rounded_up

WEIGHTS = "weights"
STATISTICS = "quantization_statistics"
ADAPTERS = "adapters"
OPTIMIZER = "optimizer"
INPUTS = "inputs"
ACTIVATIONS = "activations"
LOGITS = "logits_and_loss"
DEQUANTIZED = "dequantized_weights"
GRADIENTS = "gradients"
KINDS = (
    WEIGHTS,
    STATISTICS,
    ADAPTERS,
    OPTIMIZER,
    INPUTS,
    ACTIVATIONS,
    LOGITS,
    DEQUANTIZED,
    GRADIENTS,
)
"""The kinds of memory, in the order in which they are shown."""
FORWARD, BACKWARD, OPTIMIZER_STEP = ("forward", "backward", "optimizer")


class Position(NamedTuple):
    """A place in a step.

    Attributes:
        phase: ``FORWARD``, ``BACKWARD`` or ``OPTIMIZER_STEP``; empty before the step.
        part: The part of the model that runs; ``None`` outside all parts.
        turn: How often a forward pass through a stack of parts has begun by then.
    """

    phase: str
    part: Hashable = None
    turn: int = 0


Sizes = Counter[str]
"""Bytes by kind."""


@dataclass(eq=False, frozen=True)
class Storage:
    """A storage.

    Attributes:
        num_bytes: Its bytes, as an allocator counts them.
        kind: One of ``KINDS``.
        origin: Where in the step it was made.
        place: Phase, stack, turn and the number of the event: equal for the same storage
            of blocks that do the same.
    """

    num_bytes: int
    kind: str
    origin: Any = None
    place: Any = None


Events = list[tuple[Storage, int]]
"""Storages in the order of what is done: 1 makes one; -1 frees it; -n frees n like it."""


def sizes_of(storages: Iterable[Storage]) -> Sizes:
    """Add up the bytes of storages by kind."""
    total = Sizes()
    for storage in storages:
        total[storage.kind] += storage.num_bytes
    return total


class Span(NamedTuple):
    """The events between two marks.

    Attributes:
        mark: The first of them.
        events: What is made and freed.
    """

    mark: Position
    events: Events


class Ledger:
    """The memory held before a step, and made and freed in it: one span after the other.

    Attributes:
        holders: The part of the model that holds each storage that is there before the
            step; ``None`` for what several parts hold, or none.
        spans: The spans of the step, in order.
        rounding: The multiple that an allocator rounds each storage up to.
    """

    def __init__(self, rounding: int = 1) -> None:
        self.rounding = rounding
        self.holders: dict[Storage, Any] = {}
        self.spans: list[Span] = []
        self._last = Span(Position(""), [])

    def hold(self, storage: Storage, part: Hashable) -> None:
        """Write down that a part of the model holds a storage before the step."""
        if self.holders.setdefault(storage, part) != part:
            self.holders[storage] = None

    def made(self, num_bytes: int, kind: str) -> Storage:
        """Write down a new storage.

        Args:
            num_bytes: The bytes that are asked for.
            kind: One of ``KINDS``.

        Returns:
            The storage, to be given to ``freed``.
        """
        counted = rounded_up(num_bytes, self.rounding)
        mark, events = self._last
        stack = getattr(mark.part, "stack", None)
        place = mark.phase, stack, mark.turn, len(events)
        storage = Storage(counted, kind, mark, place)
        events.append((storage, 1))
        return storage

    def freed(self, storage: Storage) -> None:
        """Write down that a storage was freed."""
        self._last.events.append((storage, -1))

    def mark(self, phase: str, part: Hashable, turn: int = 0) -> None:
        """Begin a span, unless it continues the last one."""
        mark = Position(phase, part, turn)
        if self._last.mark != mark:
            self._last = Span(mark, [])
            self.spans.append(self._last)

    def held(self) -> Sizes:
        """Return the bytes held when the step began, by kind."""
        return sizes_of(self.holders)


Levels = dict[str, dict[str, int]]
"""The highest level that a step reaches in each phase, in bytes by kind; phases that did not run are absent."""


def highest_levels(held: Sizes, spans: Iterable[Span]) -> Levels:
    """Follow what is held through a step.

    Args:
        held: What was held before it, by kind.
        spans: Its spans, in order.

    Returns:
        The highest level of each phase.
    """
    level = held.copy()
    levels = {}
    highest: dict[str, int] = {}
    total = level.total()

    def note(phase: str) -> None:
        if total > highest.get(phase, -1):
            highest[phase] = total
            levels[phase] = {kind: level[kind] for kind in KINDS if level[kind]}

    for mark, events in spans:
        note(mark.phase)
        for storage, number in events:
            size = number * storage.num_bytes
            level[storage.kind] += size
            total += size
            if size > 0:
                note(mark.phase)
    return levels


class Peaks:
    """The figures that are read off the highest levels of a step.

    Attributes:
        levels: The bytes by kind at the highest level of each phase: ``"forward"``,
            ``"backward"``, ``"optimizer"``, without those that did not run.
    """

    levels: Levels

    @property
    def phases(self) -> dict[str, int]:
        """The most bytes held in each phase."""
        return {phase: sum(level.values()) for phase, level in self.levels.items()}

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes held at the peak of all, the first one reached, by kind."""
        highest: dict[str, int] = {}
        for level in self.levels.values():
            if sum(level.values()) > sum(highest.values()):
                highest = level
        return dict(highest)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return sum(self.by_kind.values())
