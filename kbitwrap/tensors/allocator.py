"""A model of PyTorch's caching allocator for CUDA: what it reserves for the tensors that are made and freed.

It follows c10/cuda/CUDACachingAllocator.cpp for one stream. A new segment lies behind
the ones before it. ``garbage_collection_threshold`` changes nothing, because it acts
only on a process that limits its share of the device.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_left, insort

from ..errors import ConfigError

ALLOCATION_BYTES = 512
"""The multiple that each request is rounded up to: ``kMinBlockSize``."""
_SMALL = 1 << 20  # the largest request of the small pool
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_SEGMENT = 2 << 20, 20 << 20, 10 << 20
_IDLE = (  # settings that change no size
    "garbage_collection_threshold",
    "graph_capture_",
    "pinned_",
    "release_lock_",
    "throw_on_",
)
_SMALL_POOL = -1 << 60  # its first address; those of the other begin with 0


def rounded_up(number: int, multiple: int) -> int:
    """Return the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


def process_settings() -> tuple[str, str]:
    """Return the environment variable from which torch takes its allocator's settings, and what it says.

    The older one wins wherever it is set.
    """
    variable = "PYTORCH_ALLOC_CONF"
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ:
        variable = "PYTORCH_CUDA_ALLOC_CONF"
    return variable, os.environ.get(variable, "")


def options_of(settings: str) -> list[str]:
    """Return the options of an allocator's settings, each as ``name:value`` without spaces."""
    return "".join(settings.split()).split(",")


class Allocator:
    """Counts what the allocator reserves on a device.

    Args:
        settings: Its settings, in the form in which ``PYTORCH_ALLOC_CONF`` gives them.
        limit: The most bytes that can be reserved.

    Attributes:
        blocks: The sizes of the blocks in use, by their addresses, and ``free_blocks``
            those of the others. Small blocks have addresses below 0; segments do not
            touch each other.
        allocated_bytes: Their bytes, and ``peak_allocated_bytes`` the most so far.
        reserved_bytes: The bytes of all segments, and ``peak_reserved_bytes`` the most.

    Raises:
        ConfigError: A setting is not followed, or has no such value.
    """

    def __init__(self, settings: str = "", limit: float = math.inf) -> None:
        self._expands = False
        self._most_split = math.inf
        for option in options_of(settings):
            name, _, value = option.partition(":")
            is_number = name == "max_split_size_mb" and re.fullmatch("[0-9]+", value)
            if is_number and int(value) >= 20:  # torch takes no less
                self._most_split = int(value) * _SMALL
            elif option in ("expandable_segments:True", "expandable_segments:False"):
                self._expands = value == "True"
            elif option not in ("", "backend:native") and not name.startswith(_IDLE):
                raise ConfigError(
                    "expected the native backend, True or False as expandable_segments, at least "
                    "20 as max_split_size_mb, and nothing else that decides what is reserved, found "
                    f"{option!r}"
                )
        self._limit = limit
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.blocks: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self.free_blocks: dict[int, int] = {}
        # of free blocks, the addresses by the ends; and the sizes with the addresses, in order, of both pools
        self._ends: dict[int, int] = {}
        self._pools: tuple[list[tuple[int, int]], ...] = [], []
        # the sizes of address ranges without memory; those that touch are one
        self._unmapped = dict.fromkeys((_SMALL_POOL, 0), 1 << 59)

    def reset_peaks(self) -> None:
        """Start both peaks from what is there now."""
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_allocated_bytes = self.allocated_bytes

    def allocate(self, num_bytes: int) -> int:
        """Return the address of a block of so many bytes, or of a few more.

        Raises:
            MemoryError: The limit does not allow it, even if all that is free is released.
        """
        size = rounded_up(max(num_bytes, 1), ALLOCATION_BYTES)
        address = self._best_fit(size)
        if address is None:
            address = self._reserve(size)
        if address is None and self._release_unsplit(size):
            address = self._reserve(size)
        if address is None:
            self.empty_cache()
            address = self._reserve(size)
        if address is None:
            raise MemoryError(f"{size:,} bytes more than {self.reserved_bytes:,}")
        whole = self._remove(address)
        rest = whole - size
        is_exact = size <= _SMALL or self._expands
        if rest and (is_exact or (rest > _SMALL and size < self._most_split)):
            self._add(address + size, rest)
            whole = size
        self.blocks[address] = whole
        self.allocated_bytes += whole
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return address

    def free(self, address: int) -> None:
        """Give back a block."""
        size = self.blocks.pop(address)
        self.allocated_bytes -= size
        self._add(address, size)

    def empty_cache(self) -> None:
        """Release every segment in which nothing is in use, or the whole granules of it where segments expand."""
        for address, size in list(self.free_blocks.items()):
            if self._expands:
                self._unmap(address, address + size)
            elif self._segments.get(address) == size:
                self._release(address)

    def _best_fit(self, size: int) -> int | None:
        """Return the smallest free block that is large enough and may be split; ``None`` without one."""
        pool = self._pools[size <= _SMALL]
        index = bisect_left(pool, (size,))
        if index == len(pool):
            return None

        def room(index: int) -> int:
            found, address = pool[index]
            return found + self._unmapped.get(address + found, 0)

        # Of blocks that can expand, the one with the least room is taken.
        while self._expands and index + 1 < len(pool) and room(index + 1) < room(index):
            index += 1
        found, address = pool[index]
        limit = self._most_split
        if size >= limit:
            limit = size + _LARGE_SEGMENT
        return address if found < limit else None

    def _reserve(self, size: int) -> int | None:
        """Make a free block of at least so many bytes; return its address, or ``None`` where the limit forbids it."""
        is_small = size <= _SMALL
        granule = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT
        if self._expands:
            return self._expand(size, granule)
        num_bytes = granule if size < _OWN_SEGMENT else rounded_up(size, _SMALL_SEGMENT)
        if self.reserved_bytes + num_bytes > self._limit:
            return None
        (begin,) = (one for one in self._unmapped if (one < 0) == is_small)
        room = self._unmapped.pop(begin)
        taken = num_bytes + ALLOCATION_BYTES  # a gap keeps segments apart
        self._unmapped[begin + taken] = room - taken
        self._segments[begin] = num_bytes
        self._map(begin, num_bytes)
        return begin

    def _expand(self, size: int, granule: int) -> int | None:
        """Map the unmapped ones of the first free addresses that have room for so many bytes.

        Returns:
            Where they begin; ``None`` where the limit forbids it, though some may be
            mapped by then.
        """
        begin = end = 0
        for start in sorted(self._unmapped):
            if (start < 0) != (granule == _SMALL_SEGMENT):
                continue
            begin = end = self._ends.get(start, start)
            while end - begin < size and (
                end in self.free_blocks or end in self._unmapped
            ):
                end += self.free_blocks.get(end) or self._unmapped[end]
            if end - begin >= size:
                break
        while (free := self.free_blocks.get(begin, 0)) < size:
            start = begin + free
            room = self._unmapped[start]
            num_bytes = min(room, rounded_up(size - free, granule))
            if self.reserved_bytes + num_bytes > self._limit:
                return None
            del self._unmapped[start]
            if num_bytes < room:
                self._unmapped[start + num_bytes] = room - num_bytes
            self._map(start, num_bytes)
        return begin

    def _map(self, address: int, num_bytes: int) -> None:
        self._add(address, num_bytes)
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _unmap(self, begin: int, end: int) -> None:
        """Return to the device what a free block has of whole granules."""
        granule = _SMALL_SEGMENT if begin < 0 else _LARGE_SEGMENT
        first, last = rounded_up(begin, granule), end // granule * granule
        if first >= last:
            return
        self._remove(begin)
        for left, right in ((begin, first), (last, end)):
            if left < right:
                self._add(left, right - left)
        self.reserved_bytes -= last - first
        before = next(
            (one for one, size in self._unmapped.items() if one + size == first), first
        )
        after = self._unmapped.pop(last, 0)
        self._unmapped[before] = last + after - before

    def _release(self, address: int) -> int:
        """Return a segment that is one free block to the device; return its size."""
        size = self._remove(address)
        del self._segments[address]
        self.reserved_bytes -= size
        return size

    def _release_unsplit(self, size: int) -> bool:
        """Return free segments that are never split to the device, as many as a request needs.

        Returns:
            Whether they suffice.
        """
        if self._expands or math.isinf(self._most_split):
            return False
        wanted = max(size, self._most_split)
        pool = self._pools[size <= _SMALL]
        index = bisect_left(pool, (wanted,))
        if index < len(pool):
            self._release(pool[index][1])
            return True
        released = 0
        while released < wanted and pool and pool[-1][0] >= self._most_split:
            released += self._release(pool[-1][1])
        return released >= wanted

    def _add(self, address: int, size: int) -> None:
        """Add a free block, united with those next to it."""
        before = self._ends.get(address)
        if before is not None:
            size += self._remove(before)
            address = before
        if address + size in self.free_blocks:
            size += self._remove(address + size)
        self.free_blocks[address] = size
        self._ends[address + size] = address
        insort(self._pools[address < 0], (size, address))

    def _remove(self, address: int) -> int:
        """Remove a free block, and return its size."""
        size = self.free_blocks.pop(address)
        del self._ends[address + size]
        pool = self._pools[address < 0]
        del pool[bisect_left(pool, (size, address))]
        return size
