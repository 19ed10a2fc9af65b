"""The ways to prepare that a table compares, each explained in a line."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group

from .console import hanging

_WAYS = {
    "peft": "PEFT's prepare_model_for_kbit_training",
    "full": "computes and stores what PEFT's function does",
    "compute": "computes what full does, and upcasts weights as they are used",
    "norms": "the default: norms compute in float32, stored as loaded",
    "adapted": "as norms, in blocks with adapters alone",
    "none": "computes and stores as loaded",
    "unprepared": "as loaded, without preparation",
}


def explained(names: Iterable[str]) -> Group:
    """Say what each way to prepare does.

    Args:
        names: Precisions, ``"peft"`` or ``"unprepared"``.

    Returns:
        A line for each, for ``show``.
    """
    width = max(map(len, _WAYS)) + 1
    return Group(*(hanging(f"{name:<{width}}{_WAYS[name]}", width) for name in names))
