"""The predicted memory of a training step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..config import format_bytes
from ..reports import Report, few, table
from .ledger import KINDS, Levels, Peaks
from .unknown import Unknown

# Figures of a prediction that are computed of its fields.
_COMPUTED = (
    "static_bytes",
    "forward_bytes",
    "backward_bytes",
    "optimizer_bytes",
    "peak_bytes",
    "by_kind",
    "reserved_bytes",
)


@dataclass(frozen=True, repr=False)
class StepMemory(Peaks, Report):
    """The memory of one training step, predicted: a step after the first, whose gradients are ``None`` at its start.

    ``print(step)`` is a table.

    Attributes:
        precision: The precision predicted for; ``"peft"`` is PEFT's own preparation.
        batch_size: Sequences in the batch.
        seq_len: Tokens in a sequence.
        kernels: ``"cuda"`` or ``"cpu"``: the device whose operations were followed.
        static_by_kind: The bytes held when the step begins, by kind.
        levels: The bytes by kind at the highest level of each phase: ``"forward"``,
            ``"backward"``, ``"optimizer"``.
        phases: The most bytes held in each phase.
        by_kind: The bytes held at the peak of all, by kind.
        peak_bytes: The most bytes held at any moment.
        reserved_by_phase: What CUDA's caching allocator reserves, with its settings in
            ``PYTORCH_ALLOC_CONF``: when the model is ``"loaded"``, when it is
            ``"prepared"``, and the most in the ``"step"``; ``None`` on a CPU, and where
            the order of what is allocated is not known. The small workspaces of cuBLAS
            and the samples of a preparation are in it.
        reserved_bytes: The most that is reserved in the step.
        loading_bytes: The most bytes that ``from_pretrained`` holds on the device while it
            loads and quantizes the model; ``None`` for a model that was loaded already,
            on a CPU, and where it is not known. It is in no other figure.
        mapped_bytes: The bytes of the largest tensor of the model's files, whose pages
            unified memory holds while it is copied, beside what loading holds; 0 where
            loading is not known.
        unknown: What a device's allocator may count beside the figures, and what is not
            known before; it is in none of them.
        traced_blocks: The blocks that were run, and ``num_blocks`` those that the model
            has: the others do the same.
        notes: What was assumed of the values, which the prediction does not know.
        warnings: Those of the plan of the preparation, and of the length of the
            sequence.
    """

    precision: str
    batch_size: int
    seq_len: int
    kernels: str
    static_by_kind: dict[str, int]
    levels: Levels
    reserved_by_phase: dict[str, int] | None = None
    loading_bytes: int | None = None
    mapped_bytes: int = 0
    traced_blocks: int = 0
    num_blocks: int = 0
    notes: tuple[str, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def static_bytes(self) -> int:
        """The bytes held when the step begins: weights, statistics, adapters, the optimizer's state, the inputs."""
        return sum(self.static_by_kind.values())

    @property
    def forward_bytes(self) -> int:
        """The most bytes held in the forward pass."""
        return self.phases["forward"]

    @property
    def backward_bytes(self) -> int:
        """The most bytes held in the backward pass."""
        return self.phases["backward"]

    @property
    def optimizer_bytes(self) -> int:
        """The most bytes held in the optimizer's step; 0 without an optimizer."""
        return self.phases.get("optimizer", 0)

    @property
    def reserved_bytes(self) -> int | None:
        """The most bytes that the allocator reserves in the step."""
        by_phase = self.reserved_by_phase
        return None if by_phase is None else by_phase["step"]

    @property
    def unknown_bytes(self) -> tuple[int, int]:
        """The least and the most that the peak of the allocator may differ from ``peak_bytes``."""
        least = sum(part.least_bytes for part in self.unknown)
        most = sum(part.most_bytes for part in self.unknown)
        return least, most

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as plain values, ready for JSON."""
        figures = asdict(self)
        for name in _COMPUTED:
            figures[name] = getattr(self, name)
        figures["unknown_bytes"] = list(self.unknown_bytes)
        return figures

    def __str__(self) -> str:
        levels = {"before": self.static_by_kind, **self.levels}
        rows = [("held for", *levels)]
        for kind in KINDS:
            sizes = [level.get(kind, 0) for level in levels.values()]
            if any(sizes):
                rows.append((kind.replace("_", " "), *map(format_bytes, sizes)))
        totals = [sum(level.values()) for level in levels.values()]
        rows.append(("total", *map(format_bytes, totals)))
        lines = [f"precision {self._brief()}", table(rows)]
        if self.loading_bytes is not None:
            loading = format_bytes(self.loading_bytes)
            lines.append(f"loading, before the step: {loading}")
        if self.reserved_by_phase is not None:
            reserved = self.reserved_by_phase.items()
            parts = [f"{phase} {format_bytes(size)}" for phase, size in reserved]
            lines.append(f"reserved by the allocator: {', '.join(parts)}")
        if self.unknown:
            least, most = map(format_bytes, self.unknown_bytes)
            lines.append(f"unknown, beside the peak: {least} to {most}")
            lines += [f"  {part}" for part in self.unknown]
        lines += [f"note: {note}" for note in self.notes]
        lines += few([f"warning: {warning}" for warning in self.warnings])
        return "\n".join(lines)

    def _brief(self) -> str:
        return (
            f"{self.precision!r}, batch {self.batch_size}, {self.seq_len} tokens, "
            f"on {self.kernels}: {format_bytes(self.peak_bytes)} at the peak"
        )
