"""The state of the process that a preparation touches.

It is that of allocators, autograd modes, random generators, progress bars and ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from tqdm.auto import tqdm

from ..edits.base import OriginalSlot
from ..errors import StateError, UnsupportedModelError
from ..model.tree import ModelTree, NamedTensor, join
from ..model.wrappers import loaded_class
from ..tensors.devices import accelerator_type, accelerators, function_of

# From here on torch's CUDA allocator gives a block a segment of its own
# (kMinLargeAlloc).
LARGE_BLOCK_BYTES = 10 << 20


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """Return a context without autograd, autocast and inference mode.

    A tensor made in inference mode could never be trained with again.
    """
    with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
        for device_type in ("cpu", accelerator_type()):
            if device_type is not None and torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def devices_of(tree: ModelTree) -> set[torch.device]:
    """Return the accelerators that a model's parameters lie on."""
    return accelerators([tensor.parameter for tensor in tree.tensors])


def devices(tree: ModelTree) -> dict[str, Any]:
    """Return the number of processes that train together, and of devices that this one sees.

    The devices that the model uses count as one. Their type is returned too, where it
    is another than CUDA's.
    """
    used = devices_of(tree)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if is_distributed():
        world_size = torch.distributed.get_world_size()
    not_used = torch.accelerator.device_count() - max(len(used), 1)
    others = {device.type for device in used} - {"cuda"}
    return {
        "world_size": world_size,
        "visible_devices": max(not_used + 1, 1),
        "accelerator": min(others, default=None),
    }


def bar(
    items: Sequence[Any], what: str, *, is_shown: bool, unit: str = "edit"
) -> Iterable[Any]:
    """Return the items, with a progress bar on standard error where one is to be shown.

    Else none is made: a bar of tqdm starts a thread that stays, shown or not.
    """
    if not is_shown:
        return items
    return cast("Iterable[Any]", tqdm(items, desc=what, unit=unit, leave=False))


def is_distributed() -> bool:
    """Whether this process trains together with others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def reshard(tree: ModelTree) -> bool:
    """Shard again what FSDP2 left whole after a forward, by its own hooks.

    Returns:
        Whether it shards anything, so that parameters may have been replaced.
    """
    _refuse_whole(tree)
    is_sharded = False
    for node in tree.modules:
        module = node.module
        for hook in list(module._state_dict_pre_hooks.values()):
            name = getattr(hook, "__name__", "")
            is_torchs = hook.__module__.startswith("torch.distributed.")
            if name == "to_sharded_hook" and is_torchs:
                hook(module, "", False)
                is_sharded = True
    return is_sharded


def _refuse_whole(tree: ModelTree) -> None:
    """Raise for what FSDP1 left whole."""
    for node in tree.modules:
        if "_fsdp_use_orig_params" not in vars(node.module):
            continue
        for name, parameter in node.module._parameters.items():
            if parameter is None or isinstance(parameter, nn.Parameter):
                continue
            fqn = join(node.path, name)
            raise UnsupportedModelError(
                f"{fqn} is whole, as a forward under autograd leaves it until its "
                "backward with FSDP1's SHARD_GRAD_OP; call backward(), or run a "
                "forward under torch.no_grad(), first",
                fqn=fqn,
            )


def empty_cache() -> None:
    """Return freed blocks to CUDA, as PEFT does, and to an accelerator of another type."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    device_type = accelerator_type()
    if device_type not in (None, "cuda"):
        empty = function_of(device_type, "empty_cache")
        if empty is not None:
            empty()


def is_autocast(tensors: Sequence[NamedTensor]) -> bool:
    """Whether half precision is what accelerate or torch computes in, as far as is known."""
    shared = loaded_class("accelerate.state", "AcceleratorState")
    state = getattr(shared, "_shared_state", {})
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if (state.get("_mixed_precision") or launched.lower()) != "no":
        return True
    device_type = tensors[0].parameter.device.type if tensors else "meta"
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def refuse_retyping_under_ddp(held: Sequence[OriginalSlot]) -> None:
    """Raise where a trained parameter would lose its gradient accumulator.

    ``DistributedDataParallel`` hooks it, and would not synchronize the parameter again.
    """
    for one in held if is_distributed() else ():
        parameter = one.record.live()
        if parameter is None or parameter.dtype == one.dtype:
            continue
        if parameter.requires_grad:
            raise StateError(
                f"suspended() would change the dtype of {one.record.fqn}, which is "
                "being trained, and DistributedDataParallel would no longer "
                "synchronize it; use precision 'norms' or 'none', which change no "
                "dtype, or restore() and wrap the model again"
            )
