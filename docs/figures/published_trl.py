"""Steps of TRL's SFTTrainer as versions before the installed one computed their loss.

TRL 1.16 computes logits in tiles inside one function, and never holds more. Up to 0.29, all logits existed: in the
dtype of autocast, in float32 for the loss, in float32 once more for what the trainer measured, and a fourth time
without their last position. From 1.7 to 1.14, TRL took 256 tokens at a time, and made these logits again in the
backward pass; up to 1.12, it multiplied by a float32 copy of the head, which each chunk made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.utils
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import TrainingArguments
from trl.trainer.utils import entropy_from_logits

from trl import SFTConfig

PerToken = tuple[Tensor, Tensor, None, None, Tensor]
Project = Callable[[Tensor, Tensor], Tensor]
CHUNK = 256


def _whole(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *_: Any) -> PerToken:
    """The loss of all tokens at once, and what the trainer measured of their logits."""
    logits = F.linear(hidden, weight, bias)
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    with torch.no_grad():
        returned = logits.float()  # accelerate's copy, for who asks for the logits
        entropy = entropy_from_logits(returned)
        shifted = returned[:-1].contiguous()
        found = F.pad(shifted.argmax(dim=-1), (0, 1))
    return -losses, entropy, None, None, found == labels


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.to(hidden.dtype).t()).float()


def _project_in_float32(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.float() @ weight.float().t()


def _chunk(project: Project, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = project(hidden, weight)
    log_probs = F.log_softmax(logits, dim=-1)
    losses = F.nll_loss(log_probs, labels, reduction="none")
    is_counted = labels != -100
    is_right = (logits.argmax(dim=-1) == labels) & is_counted
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1) * is_counted
    return -losses, entropy, is_right


def _in_chunks(
    project: Project, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *_: Any
) -> PerToken:
    """The loss of a chunk of tokens after the other, each computed again in the backward pass."""
    parts = []
    for start in range(0, len(labels), CHUNK):
        some, wanted = hidden[start : start + CHUNK], labels[start : start + CHUNK]
        parts.append(checkpoint(_chunk, project, some, weight, wanted, use_reentrant=False))
    log_probs, entropy, is_right = (torch.cat(found) for found in zip(*parts, strict=True))
    return log_probs, entropy, None, None, is_right


LOSSES: dict[str, Callable[..., PerToken]] = {
    "trl-0.27": _whole,
    "trl-0.29": _whole,
    "trl-1.12": partial(_in_chunks, _project_in_float32),
    "trl-1.14": partial(_in_chunks, _project),
}
TRAINERS = ("trainer", *LOSSES)
"""The codes of steps of transformers' trainer, and of TRL's."""


@contextlib.contextmanager
def loss_of(code: str) -> Iterator[None]:
    """Let TRL compute its loss as the version that a row names, if it names one."""
    if code not in LOSSES:
        yield
        return
    utils: Any = trl.trainer.utils
    original = utils._ChunkedLogProbFunction
    utils._ChunkedLogProbFunction = SimpleNamespace(apply=LOSSES[code])
    try:
        yield
    finally:
        utils._ChunkedLogProbFunction = original


def arguments(row: dict[str, str]) -> TrainingArguments:
    """The trainer's arguments for a row: what is not said here had its default in the run too."""
    shared: dict[str, Any] = {
        "output_dir": "unused",
        "per_device_train_batch_size": int(row["batch"]),
        "gradient_accumulation_steps": 1,
        "optim": row["optimizer"],
        "bf16": True,
        "use_cpu": True,  # it refuses bfloat16 where there is no device
        "report_to": "none",
    }
    if row["code"] == "trainer":
        return TrainingArguments(gradient_checkpointing=True, **shared)
    return SFTConfig(max_length=int(row["seq"]), packing=bool(row["packed"]), **shared)
