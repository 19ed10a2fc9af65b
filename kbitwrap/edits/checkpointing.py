"""The edit that enables activation checkpointing, with the hooks of a preparation."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..model.tree import ModelTree
from ..model.wrappers import wrapped_children
from .base import AttributesChange, ChangeBase, EditBase, Together
from .journal import Call, WayBack


def make_inputs_require_grad(
    module: nn.Module, args: Any, output: torch.Tensor
) -> None:
    """Forward hook: let gradients flow back to a frozen embedding's output, as reentrant checkpointing needs."""
    output.requires_grad_(True)


def make_block_input_require_grad(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a block: backward hooks that PEFT's aLoRA gives it would run before it is computed again."""
    inputs = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not (module._backward_hooks and inputs and torch.is_grad_enabled()) or any(
        x.requires_grad for x in inputs
    ):
        return None
    return tuple(x.detach().requires_grad_() if x is inputs[0] else x for x in args)


def warn_of_sharding(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: warn once, and remove the hook, where FSDP has sharded the model or a part of it."""
    if (
        torch.compiler.is_compiling()
        or not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
    ):
        return
    # Both versions of FSDP mark the modules whose parameters they shard.
    if any("_is_fsdp_managed_module" in vars(child) for child in module.modules()):
        hooks = module._forward_pre_hooks
        del hooks[next(key for key, hook in hooks.items() if hook is warn_of_sharding)]
        warnings.warn(
            f"this {type(module).__name__} was sharded after it was prepared with a precision that changes dtypes; no "
            "dtype of a sharded parameter can be changed back, so restore(), suspended() and the end of a with-block "
            "will raise; write its exact base with export() on every rank",
            UserWarning,
            stacklevel=2,
        )


_INPUT_GRADIENT_HOOKS = (
    "make_inputs_require_grads",
    "make_inputs_require_grad",
    "make_block_input_require_grad",
)
_LIBRARIES = ("kbitwrap", "peft", "transformers", "transformers_modules", "trl")
_HOOK_DICTS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


def input_gradient_hooks(module: nn.Module) -> list[int]:
    """The ids of a module's input-gradient hooks: those of the libraries that prepare models."""
    return [key for key, hook in _hooks_of(module) if _is_input_gradient_hook(hook)]


def _hooks_of(module: nn.Module) -> Iterable[tuple[int, Any]]:
    hooks, pre_hooks = module._forward_hooks, module._forward_pre_hooks
    return [*hooks.items(), *pre_hooks.items()] if hooks or pre_hooks else ()


def _is_input_gradient_hook(hook: Any) -> bool:
    """Whether a hook is one of these libraries' functions; a user's may have the same name."""
    if getattr(hook, "__name__", None) not in _INPUT_GRADIENT_HOOKS:
        return False
    return str(getattr(hook, "__module__", None)).partition(".")[0] in _LIBRARIES


class HooksChange(ChangeBase):
    """The hooks before a preparation: undo removes its own, and libraries' later ones that make inputs require grad.

    They keep their ids when a module is copied.
    """

    def __init__(self, tree: ModelTree) -> None:
        self._index = tree.index
        self._before = _ids([node.module for node in tree.modules])
        # `None` while the edit is made: all that are added
        self._ours: set[int] | None = None

    def settle(self) -> None:
        """Note that the edit is made: whatever hooks were added so far are its own."""
        self._ours = _ids([module for _, module in self._index.live()]) - self._before

    def _is_added(self, key: int, hook: Any) -> bool:
        if key in self._before:
            return False
        return self._ours is None or key in self._ours or _is_input_gradient_hook(hook)

    def _affected(self, modules: list[nn.Module]) -> dict[nn.Module, list[int]]:
        found: dict[nn.Module, list[int]] = {}
        for module in modules:
            for key, hook in _hooks_of(module):
                if self._is_added(key, hook):
                    found.setdefault(module, []).append(key)
        return found

    def undo(self, tree: ModelTree) -> None:
        """Remove the hooks added since."""
        self.remove_added(self._index.live_and_of(tree), keep_one=False)

    def remove_added(self, modules: list[nn.Module], *, keep_one: bool) -> bool:
        """Remove later hooks, all or all but one of each hooked module, and say whether a later one is left."""
        is_left = False
        for module, keys in self._affected(modules).items():
            keeps_newest = keep_one and self._before.isdisjoint(
                input_gradient_hooks(module)
            )
            is_left |= keeps_newest
            for key in keys[:-1] if keeps_newest else keys:
                for name in _HOOK_DICTS:
                    getattr(module, name).pop(key, None)
        return is_left

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current hooks and their order."""
        affected = self._affected(self._index.live_and_of(tree))
        removed = {key for keys in affected.values() for key in keys}
        held = [getattr(module, name) for module in affected for name in _HOOK_DICTS]
        saved = [(hooks, list(hooks.items())) for hooks in held]

        def resume() -> None:
            for hooks, items in saved:
                # Others may have removed and added hooks of their own meanwhile.
                back = [
                    (key, hook) for key, hook in items if key in hooks or key in removed
                ]
                new = [
                    (key, hook) for key, hook in hooks.items() if key not in dict(items)
                ]
                hooks.clear()
                hooks.update(back + new)

        return Call(resume)


def _ids(modules: list[nn.Module]) -> set[int]:
    return {key for module in modules for key, _ in _hooks_of(module)}


CHECKPOINTING_ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")
# where transformers keeps the handles of its hooks
_HOOK_ATTRIBUTES = ("_require_grads_hooks", "_require_grads_hook")


class CheckpointingChange(Together):
    """Checkpointing attributes and input-gradient hooks as they were."""

    def __init__(self, tree: ModelTree) -> None:
        self.model = weakref.ref(tree.model)
        self.hooks = HooksChange(tree)
        self.attributes = AttributesChange(
            tree, (*CHECKPOINTING_ATTRIBUTES, *_HOOK_ATTRIBUTES)
        )
        super().__init__(tree.records, self.hooks, self.attributes)


def checkpointing_method(
    model: nn.Module,
) -> tuple[Callable[..., Any], str | None] | None:
    """The bound method that enables checkpointing, and its keyword for arguments; an overridden old one comes first."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    new = getattr(model, "activation_checkpointing_enable", None)
    is_overridden = getattr(model, "_is_overridden", None)
    if new is not None and not (
        callable(is_overridden) and is_overridden("gradient_checkpointing_enable")
    ):
        return new, "activation_checkpointing_kwargs"
    if old is None:
        return None
    takes_kwargs = "gradient_checkpointing_kwargs" in inspect.signature(old).parameters
    return old, "gradient_checkpointing_kwargs" if takes_kwargs else None


def refuse_without_checkpointing(tree: ModelTree) -> None:
    """Raise for a model that does not support checkpointing, has no method to enable it, or no layer that listens."""
    model = tree.model
    name = type(model).__name__
    remedy = "prepare it with gradient_checkpointing=False"
    if checkpointing_method(model) is None:
        inner = wrapped_children(model)
        instead = (
            f"prepare what it wraps, its .{inner[0]}, before it is wrapped"
            if inner
            else remedy
        )
        raise UnsupportedModelError(
            f"{name} has no method that enables activation checkpointing; {instead}"
        )
    supports = getattr(model, "supports_gradient_checkpointing", None)
    listens = any(
        hasattr(node.module, "gradient_checkpointing") for node in tree.modules
    )
    if supports is False or (supports is True and not listens):
        raise UnsupportedModelError(
            f"{name} does not support activation checkpointing; {remedy}"
        )


def refuse_without_embeddings(model: nn.Module) -> None:
    """Raise for a model that has no method to hook its input embeddings, and none that returns them."""
    if not hasattr(model, "enable_input_require_grads") and not hasattr(
        model, "get_input_embeddings"
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no get_input_embeddings() whose output could be made to require grad; prepare "
            "it with input_require_grads=False, or with gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(EditBase):
    """Enable activation checkpointing, and hook the input embeddings, the blocks or the model where asked."""

    enable: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hook_inputs: bool = False
    hook_blocks: bool = False
    # to warn when it turns out to be sharded, after its dtypes were changed
    hook_model: bool = False

    def capture(self, tree: ModelTree) -> CheckpointingChange:
        """Record attributes and hooks."""
        return CheckpointingChange(tree)

    def apply(self, change: CheckpointingChange) -> None:
        """Enable, then remove superfluous hooks: transformers installs them on enabling, needed or not."""
        model = change.model()
        assert model is not None
        if self.hook_inputs and hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()  # type: ignore[operator]
        elif self.hook_inputs:
            model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)  # type: ignore[operator]
        if self.enable:
            _enable_checkpointing(model, self.kwargs)
        live = change.attributes.index.live()
        if not change.hooks.remove_added(
            [module for _, module in live], keep_one=self.hook_inputs
        ):
            change.attributes.write(live, _HOOK_ATTRIBUTES)
        for _, block in live:
            if vars(block).get("gradient_checkpointing") is not True:
                continue
            if self.hook_blocks and not input_gradient_hooks(block):
                block.register_forward_pre_hook(make_block_input_require_grad)
        if (
            self.hook_model
            and warn_of_sharding not in model._forward_pre_hooks.values()
        ):
            model.register_forward_pre_hook(warn_of_sharding)
        change.hooks.settle()


def _enable_checkpointing(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    found = checkpointing_method(model)
    assert found is not None  # or the plan would have refused
    method, keyword = found
    if keyword is not None:
        # transformers' ``every_n_layers`` and ``offload``
        own = inspect.signature(method).parameters
        options = {name: value for name, value in kwargs.items() if name in own}
        method(
            **{
                keyword: {
                    name: value for name, value in kwargs.items() if name not in own
                }
            },
            **options,
        )
        return
    if kwargs:
        warnings.warn(
            f"gradient_checkpointing_kwargs is not supported by {type(model).__name__}, so {dict(kwargs)} is ignored; "
            "a newer transformers takes them",
            FutureWarning,
            stacklevel=2,
        )
    method()
