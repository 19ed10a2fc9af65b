"""Measures seconds and memory on a CPU."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile
from torch.utils import benchmark


class Taken(NamedTuple):
    """How long a call took: by the clock, and the CPU time of all threads of this process."""

    seconds: float
    cpu_seconds: float


def clock(call: Callable[[], Any]) -> Taken:
    """Call, and say how long that took; garbage of earlier calls costs no time in it."""
    gc.collect()
    start, cpu_start = benchmark.timer(), time.process_time()
    call()
    return Taken(benchmark.timer() - start, time.process_time() - cpu_start)


def summary(values: list[float]) -> dict[str, Any]:
    """The median, the least and the most of some values, and all of them."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "all": values}


def resident_peak(call: Callable[[], Any]) -> int:
    """The most that this process held while it ran a call, above what it held before, in bytes."""
    reset_resident_peak()
    before = resident()
    call()
    return max(0, resident("VmHWM") - before)


def resident(field: str = "VmRSS") -> int:
    """The bytes that this process holds of the system's; of `"VmHWM"` the most since `reset_resident_peak`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def reset_resident_peak() -> None:
    """Let the most that was held begin anew, as proc(5) has it; what the C library keeps of freed blocks goes first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def tensor_peak(call: Callable[[], Any]) -> int:
    """The most bytes that tensors held while a call ran, above what they held before, as torch's profiler counts.

    Unlike a resident set this is the same in each run: Python's collector, which frees whenever it likes, waits.
    """
    gc.collect()
    gc.disable()
    try:
        with profile(profile_memory=True, use_kineto=True) as recorded:
            call()
    finally:
        gc.enable()
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes, initial=0))


def held_bytes(values: Iterable[Any]) -> int:
    """The bytes that tensors hold, shared memory once."""
    storages = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
