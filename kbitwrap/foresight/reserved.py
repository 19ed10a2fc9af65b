"""The memory that a device's allocator reserves, from loading a model to the end of its second step."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ..errors import ConfigError
from ..preparation.plan import Plan
from ..preparation.process import LARGE_BLOCK_BYTES
from ..tensors.allocator import Allocator, process_settings
from .ledger import BACKWARD, FORWARD, OPTIMIZER_STEP, Events, Storage
from .loading import storage_of

Cast = tuple[nn.Parameter, int] | None
"""A parameter that preparing casts, with its bytes then; ``None`` where the allocator's cache is emptied."""

# Of cuBLAS, for each thread that multiplies, ATen/cuda/CublasHandlePool.cpp:
# ":4096:2:16:8", and from Hopper on 32 MiB.
WORKSPACE_BYTES = (2 * 4096 * 1024 + 8 * 16 * 1024, 32 << 20)


class Reserved(NamedTuple):
    """The bytes that an allocator reserves.

    Attributes:
        by_phase: Those that are reserved when the model is loaded and when it is
            prepared, and the most in a step.
        allocated: The most bytes of blocks in use in a step.
    """

    by_phase: dict[str, int]
    allocated: int


def casts_of(plan: Plan) -> list[Cast]:
    """Return what a plan casts, in order; a large cast's freed blocks are returned to the device before the next."""
    casts: list[Cast] = []
    for edit in plan.edits:
        if edit.dtype is None:
            continue
        for parameter in {ref(): None for ref in edit.refs}:
            assert parameter is not None  # the model is there
            casts.append((parameter, parameter.numel() * edit.dtype.itemsize))
        if plan.config.empty_cache and edit.transient_bytes >= LARGE_BLOCK_BYTES:
            casts.append(None)
    if plan.config.empty_cache:
        casts.append(None)
    return casts


def plan_of_peft(full: Plan) -> Plan:
    """Return the plan of PEFT's function: it casts what "full" does, in the model's order, and keeps freed blocks."""
    (order,) = [edit.fqns for edit in full.edits if edit.action == "freeze"]
    casts = [edit for edit in full.edits if edit.action == "store"]
    casts.sort(key=lambda cast: min(map(order.index, cast.fqns)))
    added = peak = 0
    for cast in casts:
        peak = max(peak, added + cast.transient_bytes)
        added += cast.added_bytes
    return dataclasses.replace(
        full,
        config=dataclasses.replace(full.config, empty_cache=False),
        edits=tuple(casts),
        added_bytes=added,
        peak_bytes=peak,
    )


class Prepared:
    """A model that was loaded and prepared, as an allocator sees it.

    Args:
        loading: What loading the model makes and frees (``events_of``).
        casts: What preparing casts.
        kept_bytes: What preparing keeps beside the parameters: samples of them.
        limit: The most that can be reserved.

    Attributes:
        allocator: The allocator, with the settings of the process.
        blocks: Each storage of the model with its block.
        reserved_by_phase: The bytes that are reserved when the model is ``"loaded"`` and
            when it is ``"prepared"``.

    Raises:
        ConfigError: The allocator's settings are not followed.
        MemoryError: The limit does not suffice.
    """

    def __init__(
        self,
        loading: Iterable[tuple[Any, Events]],
        casts: Iterable[Cast],
        kept_bytes: int,
        limit: float = math.inf,
    ) -> None:
        variable, settings = process_settings()
        try:
            self.allocator = allocator = Allocator(settings, limit)
        except ConfigError as error:
            raise ConfigError(f"{variable}: {error}") from None
        held = defaultdict[int, dict[Storage, int]](dict)
        for owner, events in loading:
            blocks = held[id(owner)]
            for storage, number in events:
                if number > 0:
                    blocks[storage] = allocator.allocate(storage.num_bytes)
                else:
                    allocator.free(blocks.pop(storage))
        loaded = allocator.reserved_bytes
        for cast in casts:
            if cast is None:
                allocator.empty_cache()
                continue
            parameter, num_bytes = cast
            made = storage_of(num_bytes)
            block = allocator.allocate(made.num_bytes)
            for original in held[id(parameter)].values():
                allocator.free(original)
            held[id(parameter)] = {made: block}
        if kept_bytes:
            allocator.allocate(kept_bytes)
        self.blocks = [one for blocks in held.values() for one in blocks.items()]
        self.reserved_by_phase = {
            "loaded": loaded,
            "prepared": allocator.reserved_bytes,
        }


def replay(prepared: Prepared, step: Any) -> Reserved:
    """Let an allocator make and free what two steps do.

    Spans of one block stand for those of several, so that which storage is freed is told
    by its bytes and its place alone: of those alive with the same bytes it is the newest
    that was made at the same place, or else at the nearest of the same pass, since the
    first block of a pass may do less than the others; or else the oldest.

    Args:
        prepared: The model before the step; it changes.
        step: The whole model's ``Step``, of ``trace.py``, with what is held before it.

    Returns:
        What it reserves.

    Raises:
        MemoryError: The allocator's limit does not suffice.
    """
    allocator = prepared.allocator
    # Free what the model does not hold when the step begins, and allocate what it holds
    # beside that.
    still_needed = Counter(step.static)
    for storage, block in prepared.blocks:
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
    for _ in range(2):
        allocator.reset_peaks()
        live = defaultdict[int, list[tuple[Any, int]]](list)
        for mark, events in step.spans:
            for num_bytes in lasting.pop(mark.phase, ()):
                allocator.allocate(num_bytes)
            for storage, number in events:
                alike = live[storage.num_bytes]
                if number > 0:
                    if storage.num_bytes:
                        block = allocator.allocate(storage.num_bytes)
                        alike.append((storage.place, block))
                    continue
                for _ in range(min(-number, len(alike))):
                    last = len(alike) - 1
                    while last >= 0 and alike[last][0] != storage.place:
                        last -= 1
                    if last < 0:
                        last = _nearest(alike, storage.place)
                    allocator.free(alike.pop(last)[1])
        for alike in live.values():
            for _, block in alike:
                allocator.free(block)
    by_phase = {**prepared.reserved_by_phase, "step": allocator.peak_reserved_bytes}
    return Reserved(by_phase, allocator.peak_allocated_bytes)


def _nearest(alike: list[tuple[Any, int]], place: Any) -> int:
    """Return the index of the newest of those made nearest to a place in its pass; 0 where none was made in that pass.

    Args:
        alike: The storages alive, oldest first: the place and the block of each.
        place: The place of the storage that is freed.
    """
    *of_pass, number = place
    found = [
        (abs(other[-1] - number), -index)
        for index, (other, _) in enumerate(alike)
        if list(other[:-1]) == of_pass
    ]
    return -min(found)[1] if found else 0
