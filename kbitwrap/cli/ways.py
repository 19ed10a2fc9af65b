"""The ways to prepare that a table compares, each explained in a line."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from rich.table import Table

from .tables import table


class Way(str, Enum):
    """A way to prepare: a precision, or another that a step is planned for."""

    FULL = "full"
    COMPUTE = "compute"
    NORMS = "norms"
    ADAPTED = "adapted"
    NONE = "none"
    PEFT = "peft"
    UNPREPARED = "unprepared"


WAYS = [way.value for way in Way]
_EXPLAINED = {
    "full": "computes and stores what PEFT's function does",
    "compute": "computes what full does, and upcasts weights as they are used",
    "norms": "the default: norms compute in float32, stored as loaded",
    "adapted": "as norms, in blocks with adapters alone",
    "none": "computes and stores as loaded",
    "peft": "PEFT's prepare_model_for_kbit_training",
    "unprepared": "as loaded, without preparation",
}


def explained(names: Iterable[str]) -> Table:
    """Say what each way to prepare does, in a line for each."""
    return table(
        [["precision", "what it does"], *([name, _EXPLAINED[name]] for name in names)]
    )
