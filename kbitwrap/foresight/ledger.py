"""The memory of a step, written down: every storage that was made or freed, in order, and what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
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
FORWARD, BACKWARD, OPTIMIZER_STEP = PHASES = ("forward", "backward", "optimizer")


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


class Position(NamedTuple):
    """A place in a step.

    Attributes:
        phase: One of ``PHASES``; empty before the step.
        part: The part of the model that runs; ``None`` outside all parts.
        turn: How often a forward pass through a stack of parts has begun by then.
    """

    phase: str
    part: Hashable = None
    turn: int = 0


Sizes = Counter[str]
"""Bytes by kind."""
Times = Mapping[tuple[Position, Position], int]
"""The blocks that a storage stands for when a run frees it, by the run's mark and the storage's origin."""


@dataclass(eq=False, frozen=True)
class Storage:
    """A storage.

    Attributes:
        asked_bytes: The bytes that were asked for.
        num_bytes: Its bytes, as an allocator counts them.
        kind: One of ``KINDS``.
        origin: Where in the step it was made.
    """

    asked_bytes: int
    num_bytes: int
    kind: str
    origin: Position


Measure = Callable[[Storage], int]
"""The figures of a storage that are added up."""


def in_bytes(storage: Storage) -> int:
    """Measure a storage in bytes."""
    return storage.num_bytes


@dataclass(frozen=True)
class Run:
    """The effect on memory of what happens between two marks.

    Attributes:
        mark: The first of them.
        net: What is made and not freed, less what is freed and was made before, by kind.
        at_peak: The highest level above the start, by kind; empty where none is.
    """

    mark: Position
    net: Sizes
    at_peak: Sizes


@dataclass(frozen=True)
class Span:
    """The events between two marks.

    Attributes:
        mark: The first of them.
        events: The storages that are made (``True``) or freed, in order.
    """

    mark: Position
    events: list[tuple[Storage, bool]] = field(default_factory=list)

    def run(self, measure: Measure, times: Times) -> Run:
        """Return the effect on memory of all that happens."""
        net = Sizes()
        at_peak = Sizes()
        level = peak = 0
        is_rising = False
        for storage, is_made in self.events:
            size = measure(storage)
            if is_made:
                level += size
                net[storage.kind] += size
                if level > peak:
                    peak = level
                    is_rising = True
            else:
                if is_rising:
                    at_peak = net.copy()
                    is_rising = False
                size *= times.get((self.mark, storage.origin), 1)
                level -= size
                net[storage.kind] -= size
        if is_rising:
            at_peak = net.copy()
        return Run(self.mark, net, at_peak)


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
        self._last = Span(Position(""))

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
        storage = Storage(num_bytes, counted, kind, self._last.mark)
        self._last.events.append((storage, True))
        return storage

    def freed(self, storage: Storage) -> None:
        """Write down that a storage was freed."""
        self._last.events.append((storage, False))

    def mark(self, phase: str, part: Hashable, turn: int = 0) -> None:
        """Begin a span, unless it continues the last one."""
        mark = Position(phase, part, turn)
        if self._last.mark != mark:
            self._last = Span(mark)
            self.spans.append(self._last)

    def held(self, measure: Measure = in_bytes) -> Sizes:
        """Return the bytes held when the step began, by kind."""
        total = Sizes()
        for storage in self.holders:
            total[storage.kind] += measure(storage)
        return total

    def runs(
        self, measure: Measure = in_bytes, times: Times | None = None
    ) -> list[Run]:
        """Return the runs of the step, in order.

        Args:
            measure: What is added up.
            times: How often what one run made is freed by another, for (the other, the
                one); once where it does not say.

        Returns:
            The runs.
        """
        return [span.run(measure, times or {}) for span in self.spans]


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
    highest: dict[str, Sizes] = {}
    for run in runs:
        phase = run.mark.phase
        reached = level.copy()
        reached.update(run.at_peak)
        if phase not in highest or reached.total() > highest[phase].total():
            highest[phase] = reached
        level.update(run.net)
    levels = {}
    for phase, reached in highest.items():
        levels[phase] = {kind: reached[kind] for kind in KINDS if reached[kind]}
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
        phases = self.phases
        highest = max(phases, key=phases.__getitem__, default=None)
        return {} if highest is None else dict(self.levels[highest])

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return max(self.phases.values(), default=0)
