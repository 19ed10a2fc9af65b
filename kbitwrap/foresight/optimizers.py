"""Optimizers by the names that `transformers.TrainingArguments` has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError

_NAMES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {}),
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {}),
}


def make_optimizer(
    optimizer: str | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    kernels: str,
) -> torch.optim.Optimizer:
    """Make an optimizer, by its name or by a function of the parameters."""
    if callable(optimizer):
        made = optimizer(parameters)
    elif optimizer in _NAMES:
        cls, options = _NAMES[optimizer]
        # On CUDA torch updates all parameters at once, unless told otherwise.
        made = cls(parameters, lr=1e-4, **(options or {"foreach": kernels == "cuda"}))
    else:
        raise ConfigError(
            f"optimizer: expected one of {', '.join(map(repr, _NAMES))} or a function, found {optimizer!r}"
        )
    return made
