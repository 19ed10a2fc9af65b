"""What sharding does to a prepared model."""

from __future__ import annotations

from ..model.tree import ModelTree


def reshard(tree: ModelTree) -> bool:
    """Shard again what FSDP2 left whole after a forward, without communication; say whether it shards anything.

    Its own hooks do that before ``state_dict()``. They are on the modules that hold the parameters, and the module that
    was sharded may be outside of the tree.
    """
    is_sharded = False
    for node in tree.modules:
        for hook in list(node.module._state_dict_pre_hooks.values()):
            if getattr(hook, "__name__", "") == "to_sharded_hook" and hook.__module__.startswith("torch.distributed."):
                hook(node.module, "", False)
                is_sharded = True
    return is_sharded
