"""The memory of a step, written down: every storage that was made or freed, in order, and what it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

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

Mark = tuple[str, Hashable]
"""Where in a step it is: the phase, and the part of the model that runs, ``None`` outside all parts."""


@dataclass(frozen=True)
class Run:
    """The net bytes by kind of all that was made and freed between two marks, and the highest level above the start."""

    mark: Mark
    net: Counter[str]
    at_peak: Counter[str]

    @property
    def rise_bytes(self) -> int:
        """The highest level above the start, in bytes; at least 0."""
        return self.at_peak.total()


@dataclass
class Ledger:
    """Storages by number, with their bytes and kinds; and the events: ``i`` was made, ``~i`` was freed."""

    sizes: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    # where each was made; ``None`` before the step
    origins: list[Mark | None] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    # with the number of events before
    marks: list[tuple[int, Mark]] = field(default_factory=list)

    def made(self, num_bytes: int, kind: str) -> int:
        """Write down a new storage, and return its number."""
        number = len(self.sizes)
        self.sizes.append(num_bytes)
        self.kinds.append(kind)
        self.origins.append(self.marks[-1][1] if self.marks else None)
        self.events.append(number)
        return number

    def freed(self, number: int) -> None:
        """Write down that a storage was freed."""
        self.events.append(~number)

    def mark(self, phase: str, part: Hashable) -> None:
        """Begin a run, unless it continues the last one."""
        if not self.marks or self.marks[-1][1] != (phase, part):
            self.marks.append((len(self.events), (phase, part)))

    @property
    def start(self) -> int:
        """The number of events before the first run: what was held when the step began."""
        return self.marks[0][0] if self.marks else len(self.events)

    def held(self) -> Counter[str]:
        """The bytes by kind that were held when the step began."""
        return self._run(("", None), 0, self.start, {}).net

    def spans(self) -> list[tuple[Mark, int, int]]:
        """The runs of the step, in order: where each is, its first event, and the one after its last."""
        ends = [start for start, _ in self.marks[1:]] + [len(self.events)]
        return [
            (mark, start, end)
            for (start, mark), end in zip(self.marks, ends, strict=True)
        ]

    def runs(
        self, times: Mapping[tuple[Mark, Mark | None], int] | None = None
    ) -> list[Run]:
        """The runs of the step, in order.

        What one run made and another frees is freed as many times as ``times`` says for
        (the other, the one), or once.
        """
        return [self._run(*span, times or {}) for span in self.spans()]

    def freed_origins(self) -> dict[Mark, set[Mark | None]]:
        """The runs that made what each run frees."""
        return {
            mark: {
                self.origins[~event] for event in self.events[start:end] if event < 0
            }
            for mark, start, end in self.spans()
        }

    def _run(
        self,
        mark: Mark,
        start: int,
        end: int,
        times: Mapping[tuple[Mark, Mark | None], int],
    ) -> Run:
        net: Counter[str] = Counter()
        level = peak = 0
        at_peak: Counter[str] = Counter()
        rising = False
        for event in self.events[start:end]:
            number = event if event >= 0 else ~event
            size = self.sizes[number]
            if event >= 0:
                level += size
                net[self.kinds[number]] += size
                rising = rising or level > peak
                peak = max(peak, level)
            else:
                if rising:
                    at_peak, rising = net.copy(), False
                size *= times.get((mark, self.origins[number]), 1)
                level -= size
                net[self.kinds[number]] -= size
        return Run(mark, net, net.copy() if rising else at_peak)


@dataclass(frozen=True)
class Peaks:
    """The highest level that a step reaches in each phase, in bytes by kind."""

    by_phase: dict[str, dict[str, int]]

    @classmethod
    def of(cls, held: Counter[str], runs: Sequence[Run]) -> Peaks:
        """Add up the runs of a step, one after the other, on top of what was held."""
        level = Counter(held)
        highest: dict[str, Counter[str]] = {}
        for run in runs:
            phase = run.mark[0]
            if (
                phase not in highest
                or level.total() + run.rise_bytes > highest[phase].total()
            ):
                highest[phase] = level.copy()
                highest[phase].update(run.at_peak)
            level.update(run.net)
        return cls(
            {
                phase: {kind: found[kind] for kind in KINDS if found[kind]}
                for phase, found in highest.items()
            }
        )

    @property
    def phases(self) -> dict[str, int]:
        """The bytes of each phase."""
        return {phase: sum(found.values()) for phase, found in self.by_phase.items()}

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes by kind at the highest level of all, the first one reached."""
        return max(
            self.by_phase.values(), key=lambda found: sum(found.values()), default={}
        )

    @property
    def peak_bytes(self) -> int:
        """The highest level of all, in bytes."""
        return sum(self.by_kind.values())
