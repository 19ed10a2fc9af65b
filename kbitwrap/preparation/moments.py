"""A model at one moment of its preparation, as the manifest records it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..edits.checkpointing import input_gradient_hooks
from ..model.tree import ModelTree, only_reading
from ..tensors.devices import accelerators, function_of

Moment = dict[str, dict[str, Any]]
"""``"state"`` and ``"memory"``, each with the fields that the manifest documents."""


def read_moment(tree: ModelTree) -> Moment:
    """Read hooks, flags, modes and memory of a model as it is now."""
    with only_reading():
        return {"state": _state(tree), "memory": _memory(tree)}


def _state(tree: ModelTree) -> dict[str, Any]:
    """Hooks, flags and modes of the base. Modules are named by their fqns.

    Input-gradient hooks are counted by module, and those modules are named whose
    ``gradient_checkpointing`` is true.
    """
    modules: dict[nn.Module, str] = {}
    for node in tree.base:
        modules.setdefault(node.module, node.fqn)
    hooks: dict[str, int] = {}
    checkpointing: list[str] = []
    num_training = 0
    for module, fqn in modules.items():
        num_hooks = len(input_gradient_hooks(module))
        if num_hooks:
            hooks[fqn] = num_hooks
        if vars(module).get("gradient_checkpointing") is True:
            checkpointing.append(fqn)
        num_training += module.training
    use_cache = getattr(getattr(tree.model, "config", None), "use_cache", None)
    return {
        "input_gradient_hooks": hooks,
        "checkpointing": checkpointing,
        "use_cache": use_cache if isinstance(use_cache, bool) else None,
        "num_modules": len(modules),
        "num_training": num_training,
    }


def _memory(tree: ModelTree) -> dict[str, int | None]:
    """Bytes of the parameters' storages, each counted once, and as allocators count.

    The latter are over all accelerators that hold parameters; ``None`` where there is
    none whose allocator counts.
    """
    storages: dict[int, int] = {}
    for tensor in tree.tensors:
        storage = tensor.parameter.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    used = accelerators([tensor.parameter for tensor in tree.tensors])
    return {
        "parameter_bytes": sum(storages.values()),
        "allocated_bytes": _counted(used, "memory_allocated"),
        "reserved_bytes": _counted(used, "memory_reserved"),
    }


def _counted(devices: set[torch.device], function: str) -> int | None:
    """The sum of what a function of each device's module counts."""
    counts = []
    for device in devices:
        count = function_of(device.type, function)
        if count is not None:
            counts.append(count(device))
    return sum(counts) if counts else None
