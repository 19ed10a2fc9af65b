"""The warning to those who go on training after a restore: the base under their adapter is trained too."""

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


class Watch:
    """The parameters that a restore made trainable under an adapter, held weakly."""

    def __init__(self, model: nn.Module, turned_on: Sequence[TensorRef]) -> None:
        self.model = weakref.ref(model)
        self.turned_on = turned_on

    def is_due(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer of the model is about to step and the parameters have gradients."""
        model = self.model()
        if model is None:
            return True
        parameters = [ref() for ref in self.turned_on]
        if all(parameter is None or parameter.grad is None for parameter in parameters):
            return False
        stepped = {
            id(parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return any(id(parameter) in stepped for parameter in model.parameters())

    def warn(self) -> None:
        """Warn, unless the model or its adapters are gone."""
        model = self.model()
        if model is None or not ModelTree(model).adapter_ids:
            return
        warnings.warn(
            f"restore() made {len(self.turned_on)} base parameters trainable again, as they were before prepare(), and "
            "an adapter still sits on top: this step trains the base too where its optimizer holds them; prepare again "
            "to train the adapter, or unload or merge it",
            UserWarning,
            stacklevel=4,
        )


_watches: list[Watch] = []
_hooks: list[Any] = []


def warn_of_training_on(model: nn.Module, turned_on: Sequence[TensorRef]) -> None:
    """Warn once, when an optimizer steps, if the model's base is trained under the adapters that are on it now."""
    others = [watch for watch in _watches if watch.model() not in (None, model)]
    _watches[:] = [*others, Watch(model, turned_on)] if turned_on else others
    if _watches and not _hooks:
        # It stays: torch steps through its hooks while they run, so that none can be
        # removed in one.
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Judge each restored model once."""
    if torch.compiler.is_compiling():
        return
    for watch in list(_watches):
        if watch.is_due(optimizer):
            _watches.remove(watch)
            watch.warn()
