"""The memory of a step, written down: every storage that was made or freed, in order, and what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


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
    """

    num_bytes: int
    kind: str
    origin: Position


Measure = Callable[[Storage], int]
"""The figures of a storage that are added up."""


def in_bytes(storage: Storage) -> int:
    """Measure a storage in bytes."""
    return storage.num_bytes


class Run(NamedTuple):
    """The effect on memory of what happens between two marks.

    Attributes:
        mark: The first of them.
        net: What is made and not freed, less what is freed and was made before, by kind.
        at_peak: The highest level above the start, by kind; empty where none is.
    """

    mark: Position
    net: Sizes
    at_peak: Sizes


class Span(NamedTuple):
    """The events between two marks.

    Attributes:
        mark: The first of them.
        events: The storages that are made (``True``) or freed, in order.
    """

    mark: Position
    events: list[tuple[Storage, bool]]


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
        storage = Storage(counted, kind, self._last.mark)
        self._last.events.append((storage, True))
        return storage

    def freed(self, storage: Storage) -> None:
        """Write down that a storage was freed."""
        self._last.events.append((storage, False))

    def mark(self, phase: str, part: Hashable, turn: int = 0) -> None:
        """Begin a span, unless it continues the last one."""
        mark = Position(phase, part, turn)
        if self._last.mark != mark:
            self._last = Span(mark, [])
            self.spans.append(self._last)

    def held(self, measure: Measure = in_bytes) -> Sizes:
        """Return the bytes held when the step began, by kind."""
        total = Sizes()
        for storage in self.holders:
            total[storage.kind] += measure(storage)
        return total

    def runs(
        self,
        measure: Measure = in_bytes,
        times: Mapping[tuple[Position, Position], int] | None = None,
    ) -> list[Run]:
        """Return the runs of the step, in order.

        Args:
            measure: What is added up.
            times: How many storages one stands for when it is freed, by the mark of the
                run that frees it and its origin; one where it does not say.

        Returns:
            The runs.
        """
        times = times or {}
        runs = []
        for mark, events in self.spans:
            net = Sizes()
            at_peak = Sizes()
            level = peak = 0
            for storage, is_made in events:
                size = measure(storage)
                if not is_made:
                    size *= -times.get((mark, storage.origin), 1)
                level += size
                net[storage.kind] += size
                if level > peak:
                    peak = level
                    at_peak = net.copy()
            runs.append(Run(mark, net, at_peak))
        return runs


Levels = dict[str, dict[str, int]]
"""The highest level that a step reaches in each phase, in bytes by kind; phases that did not run are absent."""


def highest_levels(held: Sizes, runs: Sequence[Run]) -> Levels:
    """Add up the runs of a step, one after the other.

    Args:
        held: What was held before it, by kind.
        runs: The runs, in order.

    Returns:
        The highest level of each phase.
    """
    level = held.copy()
    levels: Levels = {}
    for run in runs:
        reached = {}
        for kind in KINDS:
            size = level[kind] + run.at_peak[kind]
            if size:
                reached[kind] = size
        highest = levels.setdefault(run.mark.phase, reached)
        if sum(reached.values()) > sum(highest.values()):
            levels[run.mark.phase] = reached
        level.update(run.net)
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
