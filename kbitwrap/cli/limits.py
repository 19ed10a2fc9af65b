"""The bytes that something has to fit, and the verdict: the same words for a plan, a step, and a script's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import format_bytes
from .console import InputError

if TYPE_CHECKING:
    from .. import StepMemory

_CUDA_CONTEXT_BYTES = 666_632_192  # with all kernels loaded, pytorch#86509
_PROCESS_BYTES = 760_135_680  # once libraries are imported, docs/benchmarks/host.json


def budget_of(
    budget: int | None, device_memory: int | None, is_unified: bool = False
) -> int | None:
    """Return the bytes that tensors may take: the budget, or what a CUDA context leaves of a device's memory.

    If host and device share the memory, what the process needs is taken off too.

    Raises:
        InputError: Nothing says how large the memory of both is.
    """
    if device_memory is None:
        if is_unified:
            raise InputError(
                "--unified says that host and device share --device-memory: give both"
            )
        return budget
    process = _PROCESS_BYTES if is_unified else 0
    return max(device_memory - _CUDA_CONTEXT_BYTES - process, 0)


def budget_of_step(step: StepMemory, budget: int, is_unified: bool) -> int:
    """Return the budget of a step; 0, which no step fits, where loading its model exceeds it.

    ``StepPredictor.fits`` compares loading too, but without the largest tensor of the
    files, which loading also holds in unified memory.
    """
    mapped = step.mapped_bytes if is_unified else 0
    return budget if (step.loading_bytes or 0) + mapped <= budget else 0


def on_unified(mapped_bytes: int) -> str:
    """Say what the host takes of unified memory, and what is assumed."""
    return (
        f"The memory is the host's too. {format_bytes(_PROCESS_BYTES)} are taken off for the process: Python, torch "
        "for CUDA, transformers, bitsandbytes and PEFT, as imported. Loading maps the files: beside what it holds, "
        f"{format_bytes(mapped_bytes)} of them have to fit, the largest tensor, and the system is assumed to take back "
        "what was read. Not counted are other programs, so give --device-memory what they leave, and the state of a "
        "paged optimizer, which fails on a Jetson (bitsandbytes#1225)."
    )


def memory_of(budget: int, device_memory: int | None) -> str:
    """Name the memory: the budget, or a device's with what is left of it."""
    left = format_bytes(budget)
    if device_memory is None:
        return left
    return f"{format_bytes(device_memory)} ({left} for torch)"


def verdict(
    memory: str, fits: Mapping[str, bool], batch: str = "", smaller: str = ""
) -> str:
    """Say with which precisions something fits, and with which it does not.

    Args:
        memory: What it has to fit.
        fits: The answers by precision.
        batch: The batch whose step has to fit; ``""`` for a preparation.
        smaller: A batch that fits with all, or ``""``.
    """
    fitting = [name for name in fits if fits[name]]
    others = [name for name in fits if not fits[name]]
    does, does_not = ("fit", "do not fit") if batch else ("fits", "does not fit")
    parts = []
    if fitting:
        parts.append(f"{does} with {', '.join(fitting)}")
    if others:
        parts.append(f"{does_not} with {', '.join(others)}")
    if smaller:
        with_all = " with all" if len(fits) > 1 else ""
        parts.append(f"{smaller} fit{with_all}")
    subject = f"{batch} tokens " if batch else ""
    return f"{memory}: {subject}{'; '.join(parts)}."
