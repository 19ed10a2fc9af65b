"""The edit that enables activation checkpointing, with the hooks of a preparation."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..model.tree import ModelTree
from ..model.wrappers import wrapped_children
from .base import AttributesChange, EditBase
from .journal import Call, WayBack


def make_inputs_require_grad(
    module: nn.Module, args: Any, output: torch.Tensor
) -> None:
    """Forward hook: let gradients flow back to a frozen embedding's output.

    Reentrant checkpointing computes no gradient of a block whose input needs none.
    """
    output.requires_grad_(True)


def make_block_input_require_grad(module: nn.Module, args: Any) -> Any:
    """Forward pre-hook of a checkpointed block: let its input require grad.

    Backward hooks that PEFT's aLoRA gives a block for one step would otherwise run
    before the block is computed again.
    """
    if not module._backward_hooks or not torch.is_grad_enabled():
        return None

    inputs = [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]
    if not inputs or any(x.requires_grad for x in inputs):
        return None

    return tuple(x.detach().requires_grad_() if x is inputs[0] else x for x in args)


def warn_of_sharding(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: warn where FSDP has sharded the model or a part of it.

    It warns once: then the hook is removed.
    """
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
            "dtype of a sharded parameter can be changed back: suspended() will raise, restore() and the end of a "
            "with-block leave these dtypes; write the exact base with export() on every rank",
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
    """The ids of a module's input-gradient hooks.

    These are the hooks of the libraries that prepare models, not a user's.
    """
    found = []
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in hooks.items():
            if _is_input_gradient_hook(hook):
                found.append(key)

    return found


def _hooks_of(module: nn.Module) -> dict[int, Any]:
    """A module's forward hooks and pre-hooks by their ids, which no two hooks share."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return {}  # nearly all modules
    return {**module._forward_hooks, **module._forward_pre_hooks}


def _is_input_gradient_hook(hook: Any) -> bool:
    """Whether a hook is one of these libraries' functions.

    A user's function may have the same name.
    """
    if getattr(hook, "__name__", None) not in _INPUT_GRADIENT_HOOKS:
        return False
    return str(getattr(hook, "__module__", None)).partition(".")[0] in _LIBRARIES


class HooksChange:
    """The hooks of a model before a preparation.

    Undoing removes the preparation's own, and later ones of libraries that make inputs
    require grad. A user's hooks stay: they are neither.

    Hooks are told by their ids, which they keep when a module is copied.

    Attributes:
        before: The ids of the hooks that were there.
    """

    def __init__(self, tree: ModelTree) -> None:
        self._index = tree.index
        self.before = self._ids()
        # the ids of the edit's own; while it is made `None`, as all new ones are its own
        self._ours: set[int] | None = None

    def settle(self) -> None:
        """Note that the edit is made: whatever hooks were added so far are its own."""
        self._ours = self._ids() - self.before

    def _ids(self) -> set[int]:
        """The ids of the hooks that there are now."""
        ids: set[int] = set()
        for _, module in self._index.live():
            ids.update(_hooks_of(module))

        return ids

    def to_remove(self, module: nn.Module) -> list[int]:
        """The ids of a module's hooks that undoing removes; no user's is among them."""
        found = []
        for key, hook in _hooks_of(module).items():
            if key in self.before:
                continue
            is_ours = self._ours is None or key in self._ours
            if is_ours or _is_input_gradient_hook(hook):
                found.append(key)

        return found

    def undo(self, tree: ModelTree) -> None:
        """Remove the hooks added since."""
        for module in self._index.live_and_of(tree):
            remove_hooks(module, self.to_remove(module))

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current hooks and their order."""
        saved = []
        for module in self._index.live_and_of(tree):
            removed = self.to_remove(module)
            if not removed:
                continue
            for name in _HOOK_DICTS:
                hooks = vars(module)[name]
                saved.append((hooks, dict(hooks), removed))

        def resume() -> None:
            for hooks, saved_hooks, removed in saved:
                # What undoing removed comes back, at its place among the others. A
                # user's hook that was removed meanwhile does not; a new one stays.
                back = {}
                for key, hook in saved_hooks.items():
                    if key in removed or key in hooks:
                        back[key] = hook
                back |= hooks
                hooks.clear()
                hooks.update(back)

        return Call(resume)


def remove_hooks(module: nn.Module, keys: Iterable[int]) -> None:
    """Remove hooks of a module by their ids."""
    for name in _HOOK_DICTS:
        for key in keys:
            vars(module)[name].pop(key, None)


CHECKPOINTING_ATTRIBUTES = ("gradient_checkpointing", "_gradient_checkpointing_func")
# where transformers keeps the handles of its hooks
_HOOK_ATTRIBUTES = ("_require_grads_hooks", "_require_grads_hook")


def checkpointing_method(
    model: nn.Module,
) -> tuple[Callable[..., Any], str | None] | None:
    """The bound method that enables checkpointing, and its keyword for arguments.

    Where a model overrides the method of older releases, that one is to be called.
    """
    old_name = "gradient_checkpointing_enable"
    old = getattr(model, old_name, None)
    new = getattr(model, "activation_checkpointing_enable", None)
    is_overridden = getattr(model, "_is_overridden", None)
    if new is not None and not (callable(is_overridden) and is_overridden(old_name)):
        return new, "activation_checkpointing_kwargs"

    if old is None:
        return None

    keyword = "gradient_checkpointing_kwargs"
    return old, keyword if keyword in inspect.signature(old).parameters else None


def refuse_without_checkpointing(tree: ModelTree) -> None:
    """Raise for a model that cannot checkpoint activations.

    It does not support it, has no method that enables it, or no layer that listens.
    """
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
    """Raise for a model whose input embeddings cannot be hooked.

    It has no method that hooks them, and none that returns them.
    """
    if not hasattr(model, "enable_input_require_grads") and not hasattr(
        model, "get_input_embeddings"
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no get_input_embeddings() whose output could be made to require grad; prepare "
            "it with input_require_grads=False, or with gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(EditBase):
    """Enable activation checkpointing, with the hooks that it needs.

    Attributes:
        enable: Whether to enable it.
        kwargs: The arguments of ``torch.utils.checkpoint.checkpoint``.
        hook_inputs: Whether the output of the input embeddings is to require grad.
        hook_blocks: Whether a block's input is to, while the block has backward hooks.
        hook_model: Whether to warn when the model turns out to be sharded, after its
            dtypes were changed.
    """

    enable: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hook_inputs: bool = False
    hook_blocks: bool = False
    hook_model: bool = False

    def capture(self, tree: ModelTree) -> list[Any]:
        """Record hooks, their handles and attributes."""
        return [
            HooksChange(tree),
            AttributesChange(tree, _HOOK_ATTRIBUTES),
            AttributesChange(tree, CHECKPOINTING_ATTRIBUTES),
        ]

    def apply(self, changes: list[Any], tree: ModelTree) -> None:
        """Enable, then remove superfluous hooks.

        transformers installs hooks whenever it enables checkpointing, needed or not.
        """
        hooks, handles, _ = changes
        model: Any = tree.model
        if self.hook_inputs and hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
        elif self.hook_inputs:
            model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)

        if self.enable:
            _enable_checkpointing(model, self.kwargs)

        if not _remove_superfluous_hooks(hooks, tree, keep_one=self.hook_inputs):
            handles.undo(tree)

        for node in tree.modules if self.hook_blocks else ():
            block = node.module
            is_checkpointed = vars(block).get("gradient_checkpointing") is True
            if is_checkpointed and not input_gradient_hooks(block):
                block.register_forward_pre_hook(make_block_input_require_grad)

        is_hooked = warn_of_sharding in model._forward_pre_hooks.values()
        if self.hook_model and not is_hooked:
            model.register_forward_pre_hook(warn_of_sharding)

        hooks.settle()


def _remove_superfluous_hooks(
    hooks: HooksChange, tree: ModelTree, *, keep_one: bool
) -> bool:
    """Remove the added hooks, and say whether one is left.

    With ``keep_one``, the newest stays on a module that had none before.
    """
    is_left = False
    for node in tree.modules:
        added = hooks.to_remove(node.module)
        if not added:
            continue
        had_one = not hooks.before.isdisjoint(input_gradient_hooks(node.module))
        if keep_one and not had_one:
            added.pop()
            is_left = True
        remove_hooks(node.module, added)

    return is_left


def _enable_checkpointing(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Enable checkpointing by the model's method, with arguments where it takes them."""
    found = checkpointing_method(model)
    assert found is not None  # or the plan would have refused
    method, keyword = found
    if keyword is None:
        if kwargs:
            warnings.warn(
                f"gradient_checkpointing_kwargs is not supported by {type(model).__name__}, so {dict(kwargs)} is "
                "ignored; a newer transformers takes them",
                FutureWarning,
                stacklevel=2,
            )
        method()
        return

    # transformers' ``every_n_layers`` and ``offload``
    own = inspect.signature(method).parameters
    options = {name: value for name, value in kwargs.items() if name in own}
    others = {name: value for name, value in kwargs.items() if name not in own}
    method(**{keyword: others}, **options)
