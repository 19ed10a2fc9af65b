"""Losing a rank in the middle of an export: the others raise within the limit of their group, nothing is written."""

from __future__ import annotations

import datetime
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kbitwrap import ExportError, KbitPreparedModel
from kbitwrap.export.sharding import Gathering
from support import forks
from support.files import SHARD

LIMIT = 20  # seconds, of the process group
TIMEOUT = datetime.timedelta(seconds=LIMIT)


def kill_at(number: int) -> None:
    """Kill this process with SIGKILL when it gathers for that time."""
    gather = Gathering._gather
    calls = itertools.count(1)

    def gather_or_die(self: Gathering, index: int) -> torch.Tensor:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, index)

    Gathering._gather = gather_or_die  # type: ignore[method-assign]


def export_until_killed(rank: int, killed: int, prepared: KbitPreparedModel, folder: Path) -> None:
    """Export merged on every rank, of which one is killed; the others write down what they raise, and end."""
    if rank == killed:
        kill_at(20)
    start = time.monotonic()
    try:
        prepared.export(folder / "merged", merge_adapters=True, max_shard_size=SHARD)
    except ExportError as error:
        (folder / f"rank-{rank}").write_text(f"{time.monotonic() - start} {error}")
    else:
        raise AssertionError("it was exported")
    os._exit(0)  # nothing is left of the group to be destroyed


def lose(function: Callable[..., None], killed: int, *args: Any, folder: Path, world_size: int) -> None:
    """Start `function(rank, join, killed, *args, folder)`, which exports until killed, and check how it ends."""
    started = forks.start_ranks(function, killed, *args, folder, world_size=world_size)
    end = time.monotonic() + 3 * LIMIT
    for process in started.processes:
        process.join(end - time.monotonic())
    codes = {rank: process.exitcode for rank, process in enumerate(started.processes)}
    assert codes == {rank: -signal.SIGKILL if rank == killed else 0 for rank in range(world_size)}
    for rank in {*range(world_size)} - {killed}:
        seconds, _, message = (folder / f"rank-{rank}").read_text().partition(" ")
        assert float(seconds) < LIMIT + 5, message
        assert "all ranks export together" in message
        assert "cannot be merged" not in message
    assert not (folder / "merged").exists()
    if killed != 0:  # the one that writes
        assert {path.name for path in folder.iterdir()} == {f"rank-{rank}" for rank in codes if rank != killed}
