"""Hooks, flags, modes and memory of a model at one moment, for the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..edits.checkpointing import input_gradient_hooks
from ..model.tree import ModelTree, only_reading


@dataclass(frozen=True)
class Moment:
    """Hooks, flags, modes and memory of a model at one moment, read as fast as a preparation can afford.

    Attributes:
        state: As ``StateRecord``.
        memory: As ``MemoryRecord``.
    """

    state: dict[str, Any]
    memory: dict[str, Any]

    @classmethod
    def of(cls, tree: ModelTree) -> Moment:
        """Read a model as it is now."""
        with only_reading():
            return cls(cls._state(tree), cls._memory(tree))

    @staticmethod
    def _state(tree: ModelTree) -> dict[str, Any]:
        modules = {node.module: node.fqn for node in reversed(tree.base)}
        modules = dict(reversed(modules.items()))
        use_cache = getattr(getattr(tree.model, "config", None), "use_cache", None)
        return {
            "input_gradient_hooks": {
                fqn: len(keys) for m, fqn in modules.items() if m._forward_hooks and (keys := input_gradient_hooks(m))
            },
            "checkpointing": [fqn for m, fqn in modules.items() if vars(m).get("gradient_checkpointing") is True],
            "use_cache": use_cache if isinstance(use_cache, bool) else None,
            "num_modules": len(modules),
            "num_training": sum([module.training for module in modules]),
        }

    @staticmethod
    def _memory(tree: ModelTree) -> dict[str, Any]:
        parameters = [tensor.parameter for tensor in tree.tensors]
        storages = [parameter.untyped_storage() for parameter in parameters]
        devices = {parameter.device for parameter in parameters if parameter.is_cuda}
        return {
            "parameter_bytes": sum({storage._cdata: storage.nbytes() for storage in storages}.values()),
            "allocated_bytes": sum(map(torch.cuda.memory_allocated, devices)) if devices else None,
            "reserved_bytes": sum(map(torch.cuda.memory_reserved, devices)) if devices else None,
        }
