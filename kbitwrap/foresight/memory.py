"""The predicted memory of a training step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..config import format_bytes
from ..reports import table
from .ledger import KINDS, PHASES


@dataclass(frozen=True)
class StepMemory:
    """The memory of one training step, predicted: a step after the first, whose gradients are ``None`` at its start.

    ``print(step)`` is a table.

    Attributes:
        precision: The precision predicted for; ``"peft"`` is PEFT's own preparation.
        batch_size: Sequences in the batch.
        seq_len: Tokens in a sequence.
        kernels: ``"cuda"`` or ``"cpu"``: the device whose operations were followed.
        static_by_kind: The bytes held when the step begins, by kind.
        phases: The most bytes held in each phase: ``"forward"``, ``"backward"``, ``"optimizer"``.
        by_kind: The bytes held at the peak of all, by kind.
        traced_blocks: The blocks that were run, and ``num_blocks`` those that the model has: the others do the same.
    """

    precision: str
    batch_size: int
    seq_len: int
    kernels: str
    static_by_kind: dict[str, int]
    phases: dict[str, int]
    by_kind: dict[str, int]
    traced_blocks: int = 0
    num_blocks: int = 0
    notes: tuple[str, ...] = field(default=())

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
        """The most bytes held in the optimizer's step."""
        return self.phases["optimizer"]

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return max(self.phases.values())

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain values, ready for JSON."""
        names = ("precision", "batch_size", "seq_len", "kernels", "static_bytes", "static_by_kind")
        peaks = (*(f"{phase}_bytes" for phase in PHASES), "peak_bytes", "by_kind", "traced_blocks", "num_blocks")
        return {name: getattr(self, name) for name in (*names, *peaks)} | {"notes": list(self.notes)}

    def __str__(self) -> str:
        rows = [("held for", "before the step", "at the peak")]
        for kind in KINDS:
            before, peak = self.static_by_kind.get(kind, 0), self.by_kind.get(kind, 0)
            if before or peak:
                rows.append((kind.replace("_", " "), format_bytes(before), format_bytes(peak)))
        rows.append(("total", format_bytes(self.static_bytes), format_bytes(self.peak_bytes)))
        phases = ", ".join(f"{phase} {format_bytes(num_bytes)}" for phase, num_bytes in self.phases.items())
        head = f"precision {self.precision!r}, batch {self.batch_size}, {self.seq_len} tokens, on {self.kernels}"
        return "\n".join([head, table(rows), f"peaks: {phases}", *(f"note: {note}" for note in self.notes)])
