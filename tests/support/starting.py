"""Whether DeepSpeed starts on this machine."""

from __future__ import annotations

import datetime
import importlib
import os
from typing import Any

from torch.multiprocessing.spawn import ProcessException

from support import forks

LIMIT = 60  # seconds, in which DeepSpeed starts, or does not


def why_deepspeed_does_not_start() -> str | None:
    """What DeepSpeed fails with when it is imported and starts one gloo group; None if it starts."""
    started = forks.start_ranks(start, world_size=1)
    try:
        is_done = started.join(timeout=LIMIT)
    except ProcessException as error:
        return str(error).strip().splitlines()[-1]
    if is_done:
        return None
    for process in started.processes:
        process.kill()
        process.join()
    return f"it is not done after {LIMIT} seconds"


def start(rank: int, join: forks.Join) -> None:
    """Import DeepSpeed, and start one group."""
    deepspeed = import_deepspeed(rank)
    with join(timeout=datetime.timedelta(seconds=LIMIT)):
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        deepspeed.comm.barrier()


def import_deepspeed(rank: int) -> Any:
    """DeepSpeed, for the CPU."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    deepspeed: Any = importlib.import_module("deepspeed")
    # It would compile an operation for one machine's CPU; gloo reduces instead.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
