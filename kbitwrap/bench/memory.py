"""Reads memory: what parameters hold, what a process or a device holds at its peak, and seconds."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER_MARK = "5"  # proc(5)


@dataclass
class Timings:
    """How long each of several runs of one thing took.

    Attributes:
        seconds: By the clock.
        cpu_seconds: Those that the threads of this process computed, which others' work
            on the machine adds little to; a thread that waits for another may count.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


class MemoryMeter:
    """Measures the memory of one device, in bytes: CUDA's allocator, or this process's resident set on a host.

    The resident set is read with its high-water mark, which Linux resets where that is
    permitted. Elsewhere the mark is the process's since its start, and peaks are upper
    bounds.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._start = 0
        self.method = "torch.cuda.max_memory_allocated"
        if not self.is_cuda:
            self.method = self._host_method()

    def _host_method(self) -> str:
        if not _STATUS.exists():
            return "getrusage ru_maxrss (never reset: an upper bound)"
        try:
            _CLEAR_REFS.write_text(_RESET_HIGH_WATER_MARK)
        except OSError:
            return "VmHWM (cannot be reset here: an upper bound)"
        return "VmHWM, reset before"

    def start(self) -> None:
        """Begin to measure a peak: it is above what is held now."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            trim_heap()
            with contextlib.suppress(OSError):
                _CLEAR_REFS.write_text(_RESET_HIGH_WATER_MARK)
        self._start = self.held()

    def peak(self) -> int:
        """The most bytes held since ``start``, above those held then."""
        return max(0, self.absolute_peak() - self._start)

    def absolute_peak(self) -> int:
        """The most bytes held since ``start``."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated(self.device)
        return _status("VmHWM")

    def held(self) -> int:
        """The bytes held now."""
        if self.is_cuda:
            return torch.cuda.memory_allocated(self.device)
        return _status("VmRSS")

    def system_held(self) -> int:
        """The bytes held now of the system's: what the allocator reserved on CUDA, the resident set on a host."""
        if self.is_cuda:
            return torch.cuda.memory_reserved(self.device)
        return self.held()

    def system_peak(self) -> int:
        """The most bytes held of the system's since ``start``."""
        if self.is_cuda:
            return torch.cuda.max_memory_reserved(self.device)
        return self.absolute_peak()

    def allocator(self) -> dict[str, int] | None:
        """The bytes that CUDA's caching allocator holds now, and the most since ``start``; ``None`` on a host."""
        if not self.is_cuda:
            return None
        return {
            "allocated_bytes": self.held(),
            "allocated_peak_bytes": self.absolute_peak(),
            "reserved_bytes": self.system_held(),
            "reserved_peak_bytes": self.system_peak(),
        }

    def tensor_peak(self, stored: Callable[[], int], run: Callable[[], object]) -> int:
        """Run something, and find the most bytes that tensors held meanwhile.

        On CUDA the allocator counts. A host's allocator is recorded by torch's
        profiler, to the byte and without what the C library keeps of freed blocks,
        which makes a resident set differ from run to run. So does what Python's
        collector frees: it waits meanwhile.

        Args:
            stored: The bytes held by tensors before, which a host's allocator does not
                know.
            run: What to run.

        Returns:
            The bytes, those held before included.
        """
        self.start()
        if self.is_cuda:
            run()
            return self.absolute_peak()
        before = stored()
        with (
            _no_collection(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        ):
            run()
        return before + _most_allocated(recorded)

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked to."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def timed(self, timings: Timings) -> Iterator[None]:
        """Append how long the block took, unless it raised.

        Args:
            timings: The record to append to.

        Yields:
            Nothing.
        """
        self.synchronize()
        started = time.perf_counter()
        cpu_started = time.process_time()
        yield
        self.synchronize()
        timings.seconds.append(time.perf_counter() - started)
        timings.cpu_seconds.append(time.process_time() - cpu_started)


def _most_allocated(recorded: profile) -> int:
    """The most bytes that the host's allocator held during a recording, above those held when it began."""
    with tempfile.TemporaryDirectory(prefix="kbitwrap-bench-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]"]
    first = min(changes, key=lambda event: event["ts"])["args"]
    held_at_start = first["Total Allocated"] - first["Bytes"]
    most_held = max(event["args"]["Total Allocated"] for event in changes)
    return int(most_held - held_at_start)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def trim_heap() -> None:
    """Give the C library's free memory back to the system, where it can: what is free is not held."""
    if sys.platform == "linux":
        trim: Callable[[int], int] | None = getattr(
            ctypes.CDLL(None), "malloc_trim", None
        )
        if trim is not None:
            trim(0)


def live_bytes(model: nn.Module, is_counted: Callable[[str], bool]) -> int:
    """Sum the memory that parameters and buffers hold, shared memory once.

    Args:
        model: The model.
        is_counted: Which to count, by name.

    Returns:
        The bytes.

    Example:
        >>> live_bytes(torch.nn.Linear(4, 4, bias=False), lambda name: True)
        64
    """
    named = itertools.chain(
        model.named_parameters(remove_duplicate=False),
        model.named_buffers(remove_duplicate=False),
    )
    return _storage_bytes(tensor for name, tensor in named if is_counted(name))


def stored_bytes(model: nn.Module) -> int:
    """Sum the memory that a model's state holds, a quantized weight's scales included, shared memory once.

    Args:
        model: The model.

    Returns:
        The bytes.

    Example:
        >>> stored_bytes(torch.nn.Linear(4, 4, bias=False))
        64
    """
    return _storage_bytes(
        value
        for value in model.state_dict().values()
        if isinstance(value, torch.Tensor)
    )


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    storages: dict[tuple[torch.device, int], int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _status(field: str) -> int:
    """A field of ``/proc/self/status``, or the high-water mark where there is none."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024
