"""How much memory is held, and torch allocates on the CPU while something runs."""

from __future__ import annotations

import ctypes
import gc
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn


def profiler() -> torch.autograd.profiler.profile:
    """A profiler of what a CPU allocates, which makes tables of what it saw only where they are asked for."""
    return torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)


def allocations(call: Callable[[], object]) -> list[int]:
    """What is allocated, and negative what is freed, while something runs, in order and in bytes; mapped files too."""
    with profiler() as profile:
        call()
    return sizes_in(profile)


def sizes_in(profile: torch.autograd.profiler.profile) -> list[int]:
    """The sizes that a profile saw, as `allocations` tells them."""
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak(sizes: Iterable[int]) -> int:
    """The most that is live at any moment."""
    return max(itertools.accumulate(sizes, initial=0))


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that was live at any moment of a call beyond what was live at its start, in bytes."""
    return peak(allocations(call))


def live_bytes(model: nn.Module) -> int:
    """What parameters and buffers hold, shared memory once."""
    storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def resident_peak(call: Callable[[], object]) -> int:
    """The most of the system's memory that this process holds during a call, beyond what it held before; on Linux."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the most begins anew: proc(5)
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
