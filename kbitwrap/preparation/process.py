"""The state of the process that a preparation touches: allocators, autograd modes, random generators, ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..edits.base import HeldOriginal
from ..errors import StateError, UnsupportedModelError
from ..model.tree import ModelTree, NamedTensor, join
from ..model.wrappers import loaded_class
from ..tensors.devices import accelerator_type, accelerators, function_of
from ..tensors.dtypes import HALF_DTYPES, dtype_name

# From here on torch's CUDA allocator gives a block a segment of its own
# (kMinLargeAlloc).
LARGE_BLOCK_BYTES = 10 << 20


@contextlib.contextmanager
def plain_mode() -> Iterator[None]:
    """No autograd and no autocast; no inference mode, for a tensor made under it could never be trained with again."""
    with torch.inference_mode(False), torch.no_grad(), contextlib.ExitStack() as stack:
        for device_type in ("cpu", accelerator_type()):
            if device_type is not None and torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def devices_of(tree: ModelTree) -> set[torch.device]:
    """The accelerators that a model's parameters lie on."""
    return accelerators([tensor.parameter for tensor in tree.tensors])


def devices(tree: ModelTree) -> dict[str, Any]:
    """The number of processes that train together, and of devices that this one sees, those it uses counted as one.

    With the type of those devices, where it is another than CUDA's.
    """
    used = devices_of(tree)
    is_joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    world_size = (
        torch.distributed.get_world_size()
        if is_joined
        else int(os.environ.get("WORLD_SIZE", 1))
    )
    visible = torch.accelerator.device_count() - max(len(used), 1) + 1
    others = sorted({device.type for device in used} - {"cuda"})
    accelerator = others[0] if others else None
    return {
        "world_size": world_size,
        "visible_devices": max(visible, 1),
        "accelerator": accelerator,
    }


def reshard(tree: ModelTree) -> bool:
    """Shard again what FSDP2 left whole after a forward, by its own hooks; say whether it shards anything."""
    wrapped = [
        node for node in tree.modules if "_fsdp_use_orig_params" in vars(node.module)
    ]
    for path, name, p in [
        (node.path, *item)
        for node in wrapped
        for item in node.module._parameters.items()
    ]:
        if p is not None and not isinstance(p, nn.Parameter):
            raise UnsupportedModelError(
                f"{join(path, name)} is whole, as a forward under autograd leaves it until its backward with "
                "FSDP1's SHARD_GRAD_OP; call backward(), or run a forward under torch.no_grad(), first",
                fqn=join(path, name),
            )
    is_sharded = False
    for module in [node.module for node in tree.modules]:
        for hook in list(module._state_dict_pre_hooks.values()):
            if getattr(
                hook, "__name__", ""
            ) == "to_sharded_hook" and hook.__module__.startswith("torch.distributed."):
                hook(module, "", False)
                is_sharded = True
    return is_sharded


def empty_cache() -> None:
    """Return the blocks that the caching allocator of the process's accelerator holds free."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return
    device_type = accelerator_type()
    empty = None if device_type is None else function_of(device_type, "empty_cache")
    if empty is not None:
        empty()


class MixedPrecision(NamedTuple):
    """A mixed-precision policy that this process trains under, as far as it is known yet."""

    dtype: str  # that it computes in: "bfloat16" or "float16"
    # whether it casts every parameter (FSDP), and not only the operands of matrix
    # products
    casts_parameters: bool


_HALF_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


def mixed_precision(tensors: Sequence[NamedTensor]) -> MixedPrecision | None:
    """The mixed-precision policy that is known yet: accelerate's, its launcher's, or an autocast that is on."""
    state: dict[str, Any] = getattr(
        loaded_class("accelerate.state", "AcceleratorState"), "_shared_state", {}
    )
    fsdp = getattr(state.get("fsdp_plugin"), "mixed_precision_policy", None)
    param_dtype = getattr(fsdp, "param_dtype", None)
    if param_dtype in HALF_DTYPES:
        return MixedPrecision(dtype_name(param_dtype), casts_parameters=True)
    name = (
        state.get("_mixed_precision")
        or os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    )
    if name in _HALF_NAMES:
        uses_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in (
            "1",
            "true",
        )
        return MixedPrecision(
            _HALF_NAMES[name], casts_parameters=uses_fsdp and not state
        )
    device_type = tensors[0].parameter.device.type if tensors else "meta"
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        return MixedPrecision(dtype_name(dtype), casts_parameters=False)
    return None


def refuse_retyping_under_ddp(held: Sequence[HeldOriginal]) -> None:
    """Raise where a trained parameter would lose its gradient accumulator, which ``DistributedDataParallel`` hooks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for one in held:
        parameter = one.record.live()
        if (
            parameter is not None
            and parameter.requires_grad
            and parameter.dtype != one.dtype
        ):
            raise StateError(
                f"suspended() would change the dtype of {one.record.fqn}, which is being trained, and "
                "DistributedDataParallel would no longer synchronize it; use precision 'norms' or 'none', which "
                "change no dtype, or restore() and wrap the model again"
            )
