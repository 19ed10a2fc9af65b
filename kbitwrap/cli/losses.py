"""Losses and logits of a causal language model on blocks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .text import Blocks

_BATCH_SIZE = 4


def batch(blocks: Blocks, step: int) -> Tensor:
    """The training batch of a step."""
    first = step * _BATCH_SIZE
    places = torch.arange(first, first + _BATCH_SIZE) % len(blocks.training)
    return blocks.training[places]


def block_losses(model: nn.Module, blocks: Tensor) -> Tensor:
    """The mean loss of each block.

    Args:
        model: The model.
        blocks: ``(num_blocks, length)``, int64.

    Returns:
        ``(num_blocks,)``, float32.
    """
    found = model(input_ids=blocks[:, :-1], use_cache=False).logits.float()
    losses = F.cross_entropy(
        found.flatten(0, 1), blocks[:, 1:].flatten(), reduction="none"
    )
    return losses.view(len(blocks), -1).mean(dim=1)


def evaluate(model: nn.Module, held_out: Tensor) -> Tensor:
    """The loss of each held-out block, in evaluation mode, on the CPU."""
    model.eval()
    with torch.no_grad():
        return torch.cat(
            [block_losses(model, blocks) for blocks in held_out.split(_BATCH_SIZE)]
        ).cpu()


def divergence(expected: Tensor, found: Tensor) -> float:
    """The mean Kullback-Leibler divergence of a model from an expected one, in nats.

    Args:
        expected: The logits of the expected model, ``(num_blocks, length, vocab)``.
        found: Those of the other one, of the same shape.

    Returns:
        KL(expected ‖ found), the mean over all tokens.
    """
    right = F.log_softmax(expected.double(), dim=-1).flatten(0, 1)
    other = F.log_softmax(found.double(), dim=-1).flatten(0, 1)
    return F.kl_div(other, right, reduction="batchmean", log_target=True).item()


def logits(model: nn.Module, blocks: Blocks) -> Tensor:
    """The logits on the held-out blocks, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        output = model(input_ids=blocks.held_out[:, :-1], use_cache=False)
    found: Tensor = output.logits
    return found
