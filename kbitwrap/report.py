"""What ``restore`` and ``verify`` found, and what an export wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RestoreReport:
    """What a restore met beside its own work. Names are those of the unprepared model, where it has one.

    Attributes:
        trained: Parameters whose value changed while they were stored upcast, the float32 copies that PEFT made of
            base modules included. ``restore(trained=...)`` decided what became of them.
        replaced: Names at which another parameter stands than the one that was prepared: after a merge, for
            ``modules_to_save``, after a replaced embedding.
        foreign: What others added, by its name now; it was left alone.
    """

    trained: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, list[str]]:
        """The report as plain values, ready for JSON."""
        return {"trained": list(self.trained), "replaced": list(self.replaced), "foreign": list(self.foreign)}

    def __str__(self) -> str:
        lines = [f"{name}: {', '.join(names)}" for name, names in self.to_dict().items() if names]
        return "\n".join(["restored", *lines])


@dataclass(frozen=True)
class StateDiff:
    """How a live model differs from what its preparation left. Empty, and false, where it does not.

    Attributes:
        differences: ``{fqn: {what: (expected, found)}}``. What is ``"parameter"``, ``"dtype"``, ``"shape"``,
            ``"requires_grad"``, ``"writes"`` (in-place writes since; not compared where several processes train,
            because DistributedDataParallel writes every parameter once), ``"forward"``, an attribute of
            checkpointing, or ``"input_gradient_hooks"``.
    """

    differences: Mapping[str, Mapping[str, tuple[Any, Any]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.differences)

    def to_dict(self) -> dict[str, dict[str, list[str]]]:
        """The difference as strings, ready for JSON."""
        return {
            fqn: {what: [str(value) for value in values] for what, values in found.items()}
            for fqn, found in self.differences.items()
        }

    def __str__(self) -> str:
        if not self:
            return "as preparation left it"
        return "\n".join(
            f"{fqn or 'the model'}: {what}: expected {expected}, found {found}"
            for fqn, rows in self.differences.items()
            for what, (expected, found) in rows.items()
        )


@dataclass(frozen=True)
class ExportReport:
    """What an export wrote.

    Attributes:
        path: The folder written.
        files: The names of the files in it, sorted.
        num_tensors: How many tensors were written.
        num_bytes: Their size, in bytes.
        converted: The fqns of those that were written in another dtype than they had.
        merged: The fqns of the layers that adapters were merged into.
        seconds: How long it took.
        saved_bytes: How many bytes less the tensors take than in the checkpoint that was read.
    """

    path: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int
    converted: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    seconds: float = 0.0
    saved_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("files", "converted", "merged")}
        return {**asdict(self), "path": str(self.path), **lists}

    def __str__(self) -> str:
        parts = [f"{self.num_tensors} tensors", f"{self.num_bytes:,} bytes", f"{self.seconds:.1f} s"]
        parts += [f"{len(self.converted)} converted"] if self.converted else []
        parts += [f"{self.saved_bytes:,} bytes saved"] if self.saved_bytes else []
        parts += [f"{len(self.merged)} layers merged"] if self.merged else []
        return f"{self.path}: {', '.join(parts)}"
