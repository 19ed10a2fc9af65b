"""The edit that enables activation checkpointing, with the hooks of a preparation."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PrepareConfig
from ..errors import UnsupportedModelError
from ..model.quantization import Quantization
from ..model.tree import ModelTree
from ..model.wrappers import wrapped_children
from .base import Edit, ModuleAttributes
from .journal import Journal, Slot, Undoing


def make_inputs_require_grad(module: nn.Module, args: Any, output: Tensor) -> None:
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

    inputs = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    if not inputs or any(x.requires_grad for x in inputs):
        return None

    return tuple(x.detach().requires_grad_() if x is inputs[0] else x for x in args)


def warn_of_sharding(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: warn where FSDP has sharded the model or a part of it.

    It warns once: then the hook is removed.
    """
    distributed = torch.distributed
    if torch.compiler.is_compiling() or not distributed.is_available():
        return
    if not distributed.is_initialized():
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


def _forward_hooks(module: nn.Module) -> dict[int, Any]:
    """Return a module's forward hooks and pre-hooks by their ids; no two of them share one."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return {}  # nearly all modules
    return {**module._forward_hooks, **module._forward_pre_hooks}


def input_gradient_hooks(module: nn.Module) -> list[int]:
    """Return the ids of a module's input-gradient hooks.

    These are functions of the libraries that prepare models. A user's function may have
    the same name.
    """
    found = []
    for key, hook in _forward_hooks(module).items():
        library = str(getattr(hook, "__module__", None)).partition(".")[0]
        name = getattr(hook, "__name__", None)
        if name in _INPUT_GRADIENT_HOOKS and library in _LIBRARIES:
            found.append(key)
    return found


class Hooks(Slot):
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
        # the ids of the hooks that the edit added; `None` while it is made, when every new
        # hook counts as its own
        self._ours = None

    def settle(self) -> None:
        """Note that the edit is made: whatever hooks were added so far are its own."""
        self._ours = self._ids() - self.before

    def _ids(self) -> set[int]:
        """Return the ids of the hooks that there are now."""
        return set().union(*map(_forward_hooks, self._index.numbers))

    def to_remove(self, module: nn.Module) -> list[int]:
        """Return the ids of a module's hooks that undoing removes, oldest first."""
        new = _forward_hooks(module).keys() - self.before
        if new and self._ours is not None:
            new &= self._ours | {*input_gradient_hooks(module)}
        return sorted(new)

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Remove the hooks added since."""
        for module in self._index.live_and_of(tree):
            remove_hooks(module, self.to_remove(module))

    def read(self, tree: ModelTree) -> list[tuple[dict[int, Any], dict[int, Any], Any]]:
        """Return each dict of hooks with a copy, and the ids that undoing removes."""
        found = []
        for module in self._index.live_and_of(tree):
            removed = self.to_remove(module)
            for name in _HOOK_DICTS if removed else ():
                hooks = vars(module)[name]
                found.append((hooks, dict(hooks), removed))
        return found

    def resume(self, tree: ModelTree, value: Any) -> None:
        """Put back what undoing removed, at its place among the others.

        A user's hook that was removed meanwhile stays away, and a new one stays.
        """
        for hooks, before, removed in value:
            # by others meanwhile
            taken_away = before.keys() - hooks.keys() - {*removed}
            merged = {key: before[key] for key in before if key not in taken_away}
            merged |= hooks  # new ones come last
            hooks.clear()
            hooks.update(merged)


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
    """Return the bound method that enables checkpointing, and its keyword for arguments.

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
        if inner:
            remedy = f"prepare what it wraps, its .{inner[0]}, before it is wrapped"
        raise UnsupportedModelError(
            f"{name} has no method that enables activation checkpointing; {remedy}"
        )

    supports = getattr(model, "supports_gradient_checkpointing", None)
    listens = [hasattr(node.module, "gradient_checkpointing") for node in tree.modules]
    if supports is False or (supports is True and not any(listens)):
        raise UnsupportedModelError(
            f"{name} does not support activation checkpointing; {remedy}"
        )


def checkpoint(
    tree: ModelTree, config: PrepareConfig, quantization: Quantization
) -> Edit:
    """Make the edit that enables activation checkpointing, with the hooks that it needs.

    Reentrant checkpointing of a frozen model needs inputs that require grad. The other
    kind needs none, but its blocks are hooked for backward hooks of others. A hook of
    the model warns when it turns out to be sharded, after its dtypes were changed.
    """
    checkpoints = config.gradient_checkpointing and quantization.is_quantized
    warns_of_sharding = config.precision.upcasts_all and quantization.casts
    if checkpoints:
        refuse_without_checkpointing(tree)
    kwargs = dict(config.gradient_checkpointing_kwargs)
    hooks_inputs, hooks_blocks = config.input_require_grads, False
    if hooks_inputs is None:
        # torch's own default is reentrant, also where None is given.
        use_reentrant = kwargs.get("use_reentrant")
        is_reentrant = use_reentrant is None or bool(use_reentrant)
        hooks_inputs = checkpoints and is_reentrant
        hooks_blocks = checkpoints and not is_reentrant
    methods = ("enable_input_require_grads", "get_input_embeddings")
    if hooks_inputs and not any(hasattr(tree.model, method) for method in methods):
        raise UnsupportedModelError(
            f"{type(tree.model).__name__} has no get_input_embeddings() whose output could be made to require grad; "
            "prepare it with input_require_grads=False, or with gradient_checkpointing_kwargs={'use_reentrant': False}"
        )

    def apply(journal: Journal, tree: ModelTree) -> None:
        hooks = Hooks(tree)
        handles = ModuleAttributes(_HOOK_ATTRIBUTES, tree)
        journal.save(ModuleAttributes(CHECKPOINTING_ATTRIBUTES, tree), handles, hooks)
        model: Any = tree.model
        if hooks_inputs and hasattr(model, "enable_input_require_grads"):
            model.enable_input_require_grads()
        elif hooks_inputs:
            model.get_input_embeddings().register_forward_hook(make_inputs_require_grad)

        if checkpoints:
            _enable_checkpointing(model, kwargs)

        # transformers installs hooks whenever it enables checkpointing, needed or not.
        keeps_one = False
        for node in tree.modules:
            added = hooks.to_remove(node.module)
            if not added:
                continue
            had_one = not hooks.before.isdisjoint(input_gradient_hooks(node.module))
            if hooks_inputs and not had_one:
                added.pop()  # the newest stays
                keeps_one = True
            remove_hooks(node.module, added)

        if not keeps_one:
            # transformers holds handles of hooks that were just removed: put its
            # attributes back
            handles.undo(tree, Undoing())

        for node in tree.modules if hooks_blocks else ():
            block = node.module
            is_checkpointed = vars(block).get("gradient_checkpointing") is True
            if is_checkpointed and not input_gradient_hooks(block):
                block.register_forward_pre_hook(make_block_input_require_grad)

        is_hooked = warn_of_sharding in model._forward_pre_hooks.values()
        if warns_of_sharding and not is_hooked:
            model.register_forward_pre_hook(warn_of_sharding)

        hooks.settle()

    return Edit("checkpoint", ("",), apply)


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
