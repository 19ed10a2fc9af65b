"""A model at one moment of its preparation, as the manifest records it."""

from __future__ import annotations

from typing import Any

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
    modules: dict[nn.Module, str] = {}
    for node in tree.base:
        modules.setdefault(node.module, node.fqn)
    hooks = {fqn: len(input_gradient_hooks(m)) for m, fqn in modules.items()}
    use_cache = getattr(getattr(tree.model, "config", None), "use_cache", None)
    return {
        "input_gradient_hooks": {fqn: count for fqn, count in hooks.items() if count},
        "checkpointing": [
            fqn
            for module, fqn in modules.items()
            if vars(module).get("gradient_checkpointing") is True
        ],
        "use_cache": use_cache if isinstance(use_cache, bool) else None,
        "num_modules": len(modules),
        "num_training": sum(module.training for module in modules),
    }


def _memory(tree: ModelTree) -> dict[str, int | None]:
    parameters = [tensor.parameter for tensor in tree.tensors]
    storages = [parameter.untyped_storage() for parameter in parameters]
    counted = {storage._cdata: storage.nbytes() for storage in storages}
    figures: dict[str, int | None] = {"parameter_bytes": sum(counted.values())}
    for name in ("allocated", "reserved"):
        counts = []
        for device in accelerators(parameters):
            count = function_of(device.type, f"memory_{name}")
            if count is not None:
                counts.append(count(device))
        figures[f"{name}_bytes"] = sum(counts) if counts else None
    return figures
