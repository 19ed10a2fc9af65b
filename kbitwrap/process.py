"""What of the process a preparation touches: allocator caches, autograd modes, random generators, process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .errors import StateError
from .journal import Resume
from .storage import CopyChange, StorageChange


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """No autograd, and no inference mode: a tensor made under it could never be trained with again."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def random_state(model: nn.Module) -> Resume:
    """Read the states of the random generators that the model draws from; the call returned puts them back."""
    cpu = torch.get_rng_state()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    states = {device: torch.cuda.get_rng_state(device) for device in devices}

    def put_back() -> None:
        torch.set_rng_state(cpu)
        for device, state in states.items():
            torch.cuda.set_rng_state(state, device)

    return put_back


def empty_cache() -> None:
    """Return the blocks that the caching allocators hold free, on every kind of device there is."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def refuse_retyping_under_ddp(changes: Sequence[StorageChange | CopyChange]) -> None:
    """Raise where suspending would take a trained parameter out of ``DistributedDataParallel``.

    A parameter that changes its dtype loses its gradient accumulator, and with it the hook that synchronizes it.

    Args:
        changes: What would be suspended.

    Raises:
        StateError: Several processes train together, and one of these parameters is trained in another dtype.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for change in changes:
        parameter = change.reference()
        is_retyped = parameter is not None and parameter.requires_grad and parameter.dtype != change.dtype
        if is_retyped and torch.distributed.get_world_size() > 1:
            raise StateError(
                f"suspended() would change the dtype of {change.fqn}, which is being trained, and "
                "DistributedDataParallel would no longer synchronize it; use precision 'norms' or 'none', where "
                "nothing changes its dtype, or restore(), and wrap anew"
            )
