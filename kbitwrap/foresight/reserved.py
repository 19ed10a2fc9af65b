"""The memory that a device's allocator reserves, from loading a model to the end of its second step."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..tensors.allocator import Allocator
from .ledger import BACKWARD, FORWARD, OPTIMIZER_STEP, Events, Storage
from .loading import storage_of

# Of cuBLAS, for each thread that multiplies, ATen/cuda/CublasHandlePool.cpp:
# ":4096:2:16:8", and from Hopper on 32 MiB.
WORKSPACE_BYTES = (2 * 4096 * 1024 + 8 * 16 * 1024, 32 << 20)


class Reserved(NamedTuple):
    """The bytes that an allocator reserves.

    Attributes:
        by_phase: Those that are reserved when the model is loaded and when it is
            prepared, and the most in a step.
        most: The most at any moment.
        allocated: The most bytes of blocks in use in a step.
    """

    by_phase: dict[str, int]
    most: int
    allocated: int


def replay(
    loading: Iterable[tuple[Any, Events]],
    casts: Iterable[Any],
    kept_bytes: int,
    step: Any,
    limit: float = math.inf,
) -> Reserved:
    """Let an allocator make and free what a run does.

    Spans of one block stand for those of several, so that which storage is freed is told
    by its bytes and its place alone: of those alive with the same bytes it is the newest
    that was made at the same place, or else the oldest.

    Args:
        loading: What loading the model makes and frees: ``Loading.turns``, or one event for
            each tensor of a model of which that is not known (``SimulatedModel.loaded``).
        casts: The parameters that preparing casts, and ``None`` where it empties the
            cache (``SimulatedModel.casts``).
        kept_bytes: What preparing keeps beside the parameters: samples of them.
        step: The whole model's ``Step``, of ``trace.py``, with what is held before it.
        limit: The most that can be reserved.

    Returns:
        What it reserves.

    Raises:
        ConfigError: The allocator's settings are not followed.
        MemoryError: The limit does not suffice.
    """
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    settings = os.environ.get("PYTORCH_ALLOC_CONF", settings)
    allocator = Allocator(settings, limit)
    held = defaultdict[int, dict[Storage, int]](dict)
    for owner, events in loading:
        blocks = held[id(owner)]
        for storage, number in events:
            if number > 0:
                blocks[storage] = allocator.allocate(storage.num_bytes)
            else:
                allocator.free(blocks.pop(storage))
    loaded = allocator.reserved_bytes
    for parameter in casts:
        if parameter is None:
            allocator.empty_cache()
            continue
        cast = storage_of(parameter.nbytes)
        made = {cast: allocator.allocate(cast.num_bytes)}
        for block in held[id(parameter)].values():
            allocator.free(block)
        held[id(parameter)] = made
    if kept_bytes:
        allocator.allocate(kept_bytes)
    prepared = allocator.reserved_bytes

    # Free what the model does not hold when the step begins, and allocate what it holds
    # beside that.
    still_needed = Counter(step.static)
    for blocks in held.values():
        for storage, block in blocks.items():
            if still_needed[storage.num_bytes]:
                still_needed[storage.num_bytes] -= 1
            else:
                allocator.free(block)
    for num_bytes in still_needed.elements():
        allocator.allocate(num_bytes)
    # workspaces and the optimizer's state, which the first step makes and keeps
    lasting = {
        FORWARD: [WORKSPACE_BYTES[0]],
        BACKWARD: [WORKSPACE_BYTES[0]],
        OPTIMIZER_STEP: step.state,
    }
    most = 0
    for _ in range(2):
        most = max(most, allocator.peak_reserved_bytes)
        allocator.reset_peaks()
        live = defaultdict[int, list[tuple[Any, int]]](list)
        for mark, events in step.spans:
            for num_bytes in lasting.pop(mark.phase, ()):
                allocator.allocate(num_bytes)
            for storage, number in events:
                alike = live[storage.num_bytes]
                if number > 0 and storage.num_bytes:
                    block = allocator.allocate(storage.num_bytes)
                    alike.append((storage.place, block))
                for _ in range(min(-number, len(alike))):
                    last = len(alike) - 1
                    while last and alike[last][0] != storage.place:
                        last -= 1
                    allocator.free(alike.pop(last)[1])
        for alike in live.values():
            for _, block in alike:
                allocator.free(block)
    by_phase = {
        "loaded": loaded,
        "prepared": prepared,
        "step": allocator.peak_reserved_bytes,
    }
    most = max(most, allocator.peak_reserved_bytes)
    return Reserved(by_phase, most, allocator.peak_allocated_bytes)
