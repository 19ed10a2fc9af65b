"""Sharding again a prepared model that a forward left whole."""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedModelError
from ..model.tree import ModelTree, join


def reshard(tree: ModelTree) -> bool:
    """Shard again what FSDP2 left whole after a forward, without communication; say whether it shards anything.

    Its own hooks do that before ``state_dict()``. They are on the modules that hold the parameters, and the module that
    was sharded may be outside of the tree. Nothing does it for FSDP1, whose parameters are out of reach meanwhile.
    """
    for node in tree.modules:
        parameters = node.module._parameters.items() if "_fsdp_use_orig_params" in vars(node.module) else ()
        for name in [name for name, p in parameters if p is not None and not isinstance(p, nn.Parameter)]:
            raise UnsupportedModelError(
                f"{join(node.path, name)} is whole, as a forward under autograd leaves it until its backward with "
                "FSDP1's SHARD_GRAD_OP; call backward(), or run a forward under torch.no_grad(), first",
                fqn=join(node.path, name),
            )
    is_sharded = False
    for module in [node.module for node in tree.modules if node.module._state_dict_pre_hooks]:
        for hook in list(module._state_dict_pre_hooks.values()):
            if getattr(hook, "__name__", "") == "to_sharded_hook" and hook.__module__.startswith("torch.distributed."):
                hook(module, "", False)
                is_sharded = True
    return is_sharded
