"""The warning to those who go on training after a restore.

A restore makes the base trainable again, and it is trained under their adapter.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..model.records import TensorRef
from ..model.tree import ModelTree

# The restored models to be judged, each with the parameters that were made trainable
# under an adapter; all held weakly.
_watched: weakref.WeakKeyDictionary[nn.Module, Sequence[TensorRef]]
_watched = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def warn_of_training_on(model: nn.Module, turned_on: Sequence[TensorRef]) -> None:
    """Warn once, when an optimizer steps the base under an adapter.

    Args:
        model: The restored model.
        turned_on: The places of the parameters that the restore made trainable under an
            adapter; none where there is nothing to warn of.
    """
    _watched.pop(model, None)
    if turned_on:
        _watched[model] = turned_on
    if _watched and not _hooks:
        # It stays: torch steps through its hooks while they run, so that none can be
        # removed in one.
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Judge each restored model once."""
    if not _watched or torch.compiler.is_compiling():
        return
    stepped: set[int] = set()
    for group in optimizer.param_groups:
        stepped.update(id(parameter) for parameter in group["params"])
    for model, turned_on in list(_watched.items()):
        parameters = [ref() for ref in turned_on]
        trained = [p for p in parameters if id(p) in stepped]
        if all(p is None or p.grad is None for p in trained):
            continue
        del _watched[model]
        if ModelTree(model).adapter_ids:
            warnings.warn(
                f"restore() made {len(turned_on)} base parameters trainable again, as "
                "they were before prepare(), and an adapter still sits on top: this "
                "step trains the base too; prepare again to train the adapter, or "
                "unload or merge it",
                UserWarning,
                stacklevel=3,
            )
