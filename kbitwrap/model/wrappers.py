"""The wrappers that PEFT, torch and DeepSpeed put around modules.

One table, for live models and names from files.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import torch
from torch import nn

# The children that hold what is wrapped. Those of PEFT's layers, and torch's, stand
# anywhere in a name.
_OF_LAYERS = ("base_layer", "token_adapter", "original_module")
_OF_MODELS = ("base_model", "lora_model", "model")
_OF_TORCH = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# By library. The first child that a wrapper has counts.
_CHILDREN = {
    "peft": (*_OF_LAYERS, *_OF_MODELS),
    "torch": ("module", *_OF_TORCH),
    "deepspeed": ("module",),
}
COPIES = ("modules_to_save", "ln_tuning_layers")
"""The children of PEFT's wrappers that hold copies of what is wrapped, by adapter."""
_LEADS = "|".join((r"base_model\.model", "module", *_OF_TORCH))
_LEADING = re.compile(rf"^(?:{_LEADS})(?:\.|$)")
_INNER = "|".join((*_OF_LAYERS, *_OF_TORCH))
_COPIES = "|".join(COPIES)
# PEFT's files leave out the name of the adapter, which follows in a live model.
_INSIDE = re.compile(rf"\.(?:{_INNER}|(?:{_COPIES})(?:\.[^.]+(?=\.))?)(?=\.|$)")


def canonical_fqn(fqn: str) -> str:
    """Strip wrappers from a name that comes from a file.

    A ``modules_to_save`` copy gets the name of its original.
    """
    # A prompt-learning ``PeftModel`` has the model itself at ``base_model``, which no
    # name tells from an adapter's.
    while match := _LEADING.match(fqn):
        fqn = fqn[match.end() :]
    return _INSIDE.sub("", "." + fqn)[1:]


REPLACES = "_kbitwrap_replaces"
"""The attribute of a drop-in for the function of PEFT that it replaces."""


def loaded_class(module_name: str, attribute: str) -> type | tuple[()]:
    """Return a class of a module that is loaded already, or ``()``.

    A class that is not loaded has no instances.
    """
    return getattr(sys.modules.get(module_name), attribute, ())


@functools.cache
def is_d_tensor(cls: Any) -> bool:
    """Return whether a class is ``DTensor`` or made from it.

    An answer stays true: ``DTensor`` was loaded when the class was made.
    """
    return issubclass(cls, loaded_class("torch.distributed.tensor", "DTensor"))


def is_sharded_tensor(tensor: Any) -> bool:
    """Return whether a tensor is a ``DTensor``, or one that FSDP1 or ZeRO-3 laid out flat.

    Only a part of it need be on this rank.
    """
    cls: Any = type(tensor)
    return is_flattened(tensor) or is_partition(tensor) or is_d_tensor(cls)


def is_flattened(tensor: Any) -> bool:
    """Return whether FSDP1 laid a tensor out flat, together with others."""
    return "_fsdp_flattened" in vars(tensor)


def is_partition(tensor: Any) -> bool:
    """Return whether ZeRO-3 partitioned a tensor, which may be whole for a while."""
    return "ds_id" in vars(tensor)


def whole_shape(tensor: Any) -> torch.Size | None:
    """Return the shape of the whole of a tensor, whatever is on this rank.

    It is ``None`` where FSDP1 laid the tensor out flat.
    """
    if is_flattened(tensor):
        return None
    return tensor.ds_shape if is_partition(tensor) else tensor.shape  # type: ignore[no-any-return]


@functools.cache
def _owner(cls: Any) -> str:
    """Return the library of a wrapper's class.

    It is ``""`` for torch's own layers and containers, which wrap nothing.
    """
    if any(base.__module__.partition(".")[0] == "peft" for base in cls.__mro__):
        return "peft"

    module: str = cls.__module__
    return "" if module.startswith("torch.nn.modules") else module.partition(".")[0]


def is_adapter_class(cls: Any) -> bool:
    """Return whether a module's class is PEFT's: its own parameters belong to an adapter."""
    return _owner(cls) == "peft"


def class_before_sharding(module: nn.Module) -> Any:
    """Return a module's class, or the one that it had before ``fully_shard`` replaced it."""
    made = loaded_class("torch.distributed.fsdp", "FSDPModule")
    return next(base for base in type(module).__mro__ if not issubclass(base, made))


def wrapped_children(module: nn.Module) -> tuple[str, ...]:
    """Return the children that hold the wrapped module, the one to follow first.

    There are none where a module is no wrapper.
    """
    if not module._modules:
        return ()

    children = _CHILDREN.get(_owner(class_before_sharding(module)), ())
    return tuple(child for child in children if module._modules.get(child) is not None)


def unwrap(module: nn.Module) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return the module underneath wrappers, and PEFT's modules around it.

    The outermost is the first.
    """
    adapters = []
    while names := wrapped_children(module):
        if is_adapter_class(type(module)):
            adapters.append(module)
        module = module.get_submodule(names[0])

    return module, tuple(adapters)
