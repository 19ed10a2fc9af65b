"""A tiny model, and what is wrapped around one."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.q_proj(x))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(4, 8, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.model(ids))


def lora(model: nn.Module, **kwargs: Any) -> nn.Module:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2, **kwargs))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: Any) -> nn.Module:
    """Wrap each layer, wherever it is by now."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = checkpoint_wrapper(layer)
    return model


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: Any) -> nn.Module:
    def shard(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))

    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for i, layer in enumerate(module):
                module[i] = shard(layer)
    return shard(model)


def fsdp2(model: Any) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model
