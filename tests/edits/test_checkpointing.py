"""Gradients flow through checkpointed blocks of models that transformers' classes did not make."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kbitwrap import KbitPreparedModel


class Checkpointed(nn.Module):
    """A model with embeddings and one block, which has checkpointing and no method that hooks its inputs."""

    is_loaded_in_8bit = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.block = nn.Linear(4, 4)
        self.gradient_checkpointing = False

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        self.gradient_checkpointing = True

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        if self.gradient_checkpointing and self.training:
            found: torch.Tensor = checkpoint(self.block, hidden, use_reentrant=True)
            return found
        return self.block(hidden)


def test_an_adapter_behind_reentrant_checkpointing_gets_gradients() -> None:
    model = Checkpointed().train()
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with KbitPreparedModel(model, precision="none", **options):
        factor = nn.Parameter(torch.zeros(4, 4))
        model.block.register_forward_hook(lambda module, args, output: output + args[0] @ factor)
        model(torch.tensor([[1, 2]])).sum().backward()
    assert factor.grad is not None
    assert factor.grad.any()


def test_a_hook_that_a_suspension_took_away_comes_back_at_its_place() -> None:
    model = Checkpointed()
    model.embed.register_forward_hook(lambda *_: None)
    prepared = KbitPreparedModel(model, gradient_checkpointing_kwargs={"use_reentrant": True}).prepare()
    model.embed.register_forward_hook(lambda *_: None)
    before = list(model.embed._forward_hooks)
    assert len(before) == 3
    with prepared.suspended():
        assert list(model.embed._forward_hooks) == before[::2]
    assert list(model.embed._forward_hooks) == before
