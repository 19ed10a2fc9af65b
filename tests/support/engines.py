"""Engines that shard a model, as users call them, and adapters copied out of one that is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from support import zoo

Shard = Callable[..., nn.Module]
SHARDS_INTEGERS = torch.__version__ >= "2.12"
"""Whether FSDP2 lays out integers, such as those that 4-bit weights are packed in."""
FSDP2_STORAGE = torch.uint8 if SHARDS_INTEGERS else torch.bfloat16


def load_for_fsdp2(
    name: str, quant: str | None = "nf4", dtype: torch.dtype = torch.bfloat16
) -> transformers.PreTrainedModel:
    """A model of the zoo that FSDP2 can shard."""
    if SHARDS_INTEGERS or quant in (None, "int8"):
        return zoo.load(name, quant, dtype)
    config = zoo._quantization_config(zoo.ARCHITECTURES[name], quant, dtype)
    config.bnb_4bit_quant_storage = dtype
    return zoo.load(name, dtype=dtype, quantization_config=config)


def fsdp2(live: nn.Module, **options: Any) -> nn.Module:
    """Each block, then the rest; 8-bit weights stay whole, because their scales would be lost."""
    ignored = {p for p in live.parameters() if type(p).__name__ == "Int8Params"}
    for block in next(module for module in live.modules() if isinstance(module, nn.ModuleList)):
        fully_shard(block, ignored_params=ignored, **options)
    fully_shard(live, ignored_params=ignored, **options)
    if hasattr(live, "generate"):
        register_fsdp_forward_method(live, "generate")
    return live


def fsdp1(live: nn.Module, **options: Any) -> nn.Module:
    """The same with wrappers, which keep the parameters' objects."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu")} | options
    layers = next(module for module in live.modules() if isinstance(module, nn.ModuleList))
    for index, block in enumerate(layers):
        layers[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(live, **options)


def fsdp1_of_peft(live: nn.Module) -> nn.Module:
    """What PEFT's policy wraps: the blocks, and each layer of an adapter by itself."""
    policy = fsdp_auto_wrap_policy(live)
    return FullyShardedDataParallel(live, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


ENGINES: dict[str, Shard] = {"fsdp2": fsdp2, "fsdp1": fsdp1}


def copy_adapters(live: nn.Module, plain: nn.Module) -> None:
    """Give an unsharded model the adapters of a sharded one; all ranks call it."""
    to = {canonical(fqn): p for fqn, p in plain.named_parameters() if "lora_" in fqn}
    with whole(live, recurse=True):
        for fqn, parameter in live.named_parameters():
            if "lora_" in fqn:
                value = parameter.detach()
                to.pop(canonical(fqn)).data.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
    assert not to


def flags(model: nn.Module) -> dict[tuple[int, str], bool]:
    """The flags of what is there, by owner and name: sharding replaces parameters, and keeps their owners."""
    return {
        (id(m), name): p.requires_grad for m in model.modules() for name, p in m._parameters.items() if p is not None
    }


def canonical(fqn: str) -> str:
    return fqn.replace("_fsdp_wrapped_module.", "")


def whole(live: nn.Module, *, recurse: bool) -> contextlib.AbstractContextManager[None]:
    """Where FSDP1's parameters are whole; FSDP2 needs no such thing."""
    if isinstance(live, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(live, recurse=recurse, writeback=False)
    return contextlib.nullcontext()
