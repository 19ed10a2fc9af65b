"""Sharding again a prepared model that a forward left whole."""

from __future__ import annotations

from torch import nn

from ..errors import UnsupportedModelError
from ..model.tree import ModelTree


def reshard(tree: ModelTree) -> bool:
    """Shard again what FSDP2 left whole after a forward, without communication; say whether it shards anything.

    Its own hooks do that before ``state_dict()``. They are on the modules that hold the parameters, and the module that
    was sharded may be outside of the tree. Nothing does it for FSDP1, whose parameters are out of reach meanwhile.
    """
    for tensor in tree.tensors:
        if "_fsdp_use_orig_params" in vars(tensor.module) and not isinstance(tensor.parameter, nn.Parameter):
            raise UnsupportedModelError(
                f"{tensor.path} is whole, as a forward under autograd leaves it until its backward with FSDP1's "
                "SHARD_GRAD_OP; call backward(), or run a forward under torch.no_grad(), first",
                fqn=tensor.path,
            )
    is_sharded = False
    for node in tree.modules:
        for hook in list(node.module._state_dict_pre_hooks.values()):
            if getattr(hook, "__name__", "") == "to_sharded_hook" and hook.__module__.startswith("torch.distributed."):
                hook(node.module, "", False)
                is_sharded = True
    return is_sharded
