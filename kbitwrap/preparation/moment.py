"""Hooks, flags, modes and memory of a model at one moment, for the manifest."""

from __future__ import annotations

import torch

from ..edits.checkpointing import input_gradient_hooks
from ..model.tree import ModelTree, only_reading
from .payloads import MemoryRecord, MomentRecord, StateRecord


def read_moment(tree: ModelTree) -> MomentRecord:
    """Read a model as it is now, as fast as a preparation can afford: the manifest validates it."""
    with only_reading():
        return MomentRecord.model_construct(state=_state(tree), memory=_memory(tree))


def _state(tree: ModelTree) -> StateRecord:
    modules = tree.base_modules
    use_cache = getattr(getattr(tree.model, "config", None), "use_cache", None)
    return StateRecord.model_construct(
        input_gradient_hooks={
            fqn: len(keys) for m, fqn in modules.items() if m._forward_hooks and (keys := input_gradient_hooks(m))
        },
        checkpointing=tuple([fqn for m, fqn in modules.items() if vars(m).get("gradient_checkpointing") is True]),
        use_cache=use_cache if isinstance(use_cache, bool) else None,
        num_modules=len(modules),
        num_training=sum([module.training for module in modules]),
    )


def _memory(tree: ModelTree) -> MemoryRecord:
    parameters = [tensor.parameter for tensor in tree.tensors]
    storages = [parameter.untyped_storage() for parameter in parameters]
    devices = {parameter.device for parameter in parameters if parameter.is_cuda}
    return MemoryRecord.model_construct(
        parameter_bytes=sum({storage._cdata: storage.nbytes() for storage in storages}.values()),
        allocated_bytes=sum(map(torch.cuda.memory_allocated, devices)) if devices else None,
        reserved_bytes=sum(map(torch.cuda.memory_reserved, devices)) if devices else None,
    )
