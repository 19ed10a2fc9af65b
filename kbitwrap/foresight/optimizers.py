"""Optimizers by the names that `transformers.TrainingArguments` has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .quantization import eight_bit_optimizer

_NAMES = ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor")
# By library: the bits of the state, and whether it lies in managed memory, which the device's allocator does not count.
_OF_LIBRARY: dict[str, tuple[int, bool]] = {
    "adamw_bnb_8bit": (8, False),
    "adamw_8bit": (8, False),
    "paged_adamw_8bit": (8, True),
    "paged_adamw_32bit": (32, True),
}


def _made(name: str, parameters: Sequence[nn.Parameter], kernels: str) -> torch.optim.Optimizer:
    if name in _OF_LIBRARY:
        bits, is_paged = _OF_LIBRARY[name]
        return eight_bit_optimizer(parameters, bits, is_paged)  # type: ignore[no-any-return]
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-4, scale_parameter=False, relative_step=False)
    # On CUDA torch updates all parameters at once, unless told otherwise.
    options: dict[str, Any] = {"fused": True} if name.endswith("fused") else {"foreach": kernels == "cuda"}
    cls: Any = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    return cls(parameters, lr=1e-4, **options)  # type: ignore[no-any-return]


def make_optimizer(
    optimizer: str | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    kernels: str,
) -> torch.optim.Optimizer:
    """Make an optimizer, by its name or by a function of the parameters."""
    if callable(optimizer):
        return optimizer(parameters)
    if optimizer in (*_NAMES, *_OF_LIBRARY):
        return _made(optimizer, parameters, kernels)
    names = ", ".join(map(repr, (*_NAMES, *_OF_LIBRARY)))
    raise ConfigError(f"optimizer: expected one of {names} or a function, found {optimizer!r}")
