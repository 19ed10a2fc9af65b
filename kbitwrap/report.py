"""What ``restore`` and ``verify`` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
