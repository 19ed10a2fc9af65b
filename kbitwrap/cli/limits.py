"""The bytes that something has to fit, and the verdict: the same words for a plan, a step, and a script's step."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import format_bytes

_CUDA_CONTEXT_BYTES = 666_632_192  # with all kernels loaded, pytorch#86509


def budget_of(budget: int | None, device_memory: int | None) -> int | None:
    """Return the bytes that tensors may take: the budget, or what a CUDA context leaves of a device's memory."""
    if device_memory is None:
        return budget
    return max(device_memory - _CUDA_CONTEXT_BYTES, 0)


def verdict(budget: int, fits: Mapping[str, bool]) -> str:
    """Say with which precisions something fits, and with which it does not."""
    fitting = [name for name in fits if fits[name]]
    others = [name for name in fits if not fits[name]]
    parts = []
    if fitting:
        parts.append(f"fits with {', '.join(fitting)}")
    if others:
        parts.append(f"does not fit with {', '.join(others)}")
    return f"{format_bytes(budget)}: {'; '.join(parts)}."
