"""The edit that says, at the first forward, that a model whose dtypes were changed has been sharded."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..model.tree import ModelTree
from .base import ChangeBase, EditBase
from .journal import Call, WayBack


def warn_of_sharding(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: warn once, and remove the hook, where FSDP has sharded the model or a part of it."""
    if torch.compiler.is_compiling() or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    # Both versions of FSDP mark the modules whose parameters they shard.
    if any("_is_fsdp_managed_module" in vars(child) for child in module.modules()):
        WatchChange(module).undo()
        warnings.warn(
            f"this {type(module).__name__} was sharded after it was prepared with a precision that changes dtypes; no "
            "dtype of a sharded parameter can be changed back, so restore(), suspended() and the end of a with-block "
            "will raise; write its exact base with export() on every rank",
            UserWarning,
            stacklevel=2,
        )


class WatchChange(ChangeBase):
    """The absence of the hook on the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def add(self) -> None:
        """Add the hook."""
        model = self._model()
        if model is not None:
            model.register_forward_pre_hook(warn_of_sharding)

    def undo(self, tree: ModelTree | None = None) -> None:
        """Remove it."""
        hooks = self._hooks()
        for key in [key for key, hook in hooks.items() if hook is warn_of_sharding]:
            del hooks[key]

    def now(self, tree: ModelTree) -> WayBack:
        """Record whether it is there."""
        hooks = self._hooks()
        found = {key: hook for key, hook in hooks.items() if hook is warn_of_sharding}
        return Call(lambda: hooks.update(found))

    def _hooks(self) -> dict[int, Any]:
        model = self._model()
        return {} if model is None else model._forward_pre_hooks


@dataclass(frozen=True, kw_only=True)
class WatchForSharding(EditBase):
    """Hook the model, to warn when it turns out to be sharded."""

    def capture(self, tree: ModelTree) -> WatchChange:
        """Begin with no hook."""
        return WatchChange(tree.model)

    def apply(self, change: WatchChange) -> None:
        """Add the hook."""
        change.add()
