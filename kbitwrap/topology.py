"""What is wrapped around a model, and what a tensor is called underneath.

A tensor is identified by the module that owns it and by its canonical name: the fully qualified name (fqn) it had
before PEFT, DDP, FSDP, ``torch.compile`` or an activation-checkpoint wrapper put their own parts into the name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from .errors import UnsupportedModelError

_LEADING = re.compile(
    r"^(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_model\.model)(?:\.|$)"
)
_INNER = re.compile(
    r"\.(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer|original_module|token_adapter"
    r"|(?:modules_to_save|ln_tuning_layers)\.[^.]+)(?=\.|$)"
)


class NamedTensor(NamedTuple):
    """A parameter where it lives: ``module._parameters[name] is parameter``."""

    fqn: str
    module: nn.Module
    name: str
    parameter: nn.Parameter


def canonical_fqn(fqn: str) -> str:
    """Strip from a fully qualified name what wrappers put into it.

    A ``modules_to_save`` copy gets the name of the module that it is a copy of. The parts are those of PEFT, DDP,
    FSDP, ``torch.compile`` and ``checkpoint_wrapper``. A prompt-learning ``PeftModel`` has the model itself at
    ``base_model``, which no name can tell from an adapter's ``base_model.model``; its names are not canonical.

    Args:
        fqn: The name of a module or a tensor.

    Returns:
        The name in the unwrapped model.

    Example:
        >>> canonical_fqn("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
        'model.layers.0.self_attn.q_proj.weight'
        >>> canonical_fqn("base_model.model.lm_head.modules_to_save.default.weight")
        'lm_head.weight'
    """
    while match := _LEADING.match(fqn):
        fqn = fqn[match.end() :]
    return _INNER.sub("", "." + fqn)[1:]


def named_tensors(model: nn.Module) -> list[NamedTensor]:
    """List each parameter object once, under the first name it has.

    Args:
        model: The model.

    Returns:
        The parameters with their owners, in the order of ``model.named_parameters()``.
    """
    seen: set[int] = set()
    found = []
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append(NamedTensor(f"{prefix}.{name}" if prefix else name, module, name, parameter))
    return found


def _loaded(module_name: str, attribute: str) -> type | tuple[()]:
    """A class of a library that is loaded already, or ``()``: nothing can be an instance of a class not loaded."""
    found: type | tuple[()] = getattr(sys.modules.get(module_name), attribute, ())
    return found


def is_adapter_module(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's own classes, whose own parameters belong to an adapter."""
    return any(cls.__module__.partition(".")[0] == "peft" for cls in type(module).__mro__)


# Below one of PEFT's modules that has such children, the base goes on in these and nowhere else.
_BASE_CHILDREN = ({"base_layer"}, {"original_module", "token_adapter"}, {"base_model"})


def base_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walk the modules of the base, through whatever PEFT put around and between them.

    Args:
        model: The model, wrapped by PEFT or holding PEFT's layers.

    Yields:
        ``(fqn, module)``, each module once and PEFT's own on the way included, in the order of ``named_modules``.
    """
    seen: set[int] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield prefix, module
        children = dict(module.named_children())
        if is_adapter_module(module):
            base = next((names for names in _BASE_CHILDREN if names & children.keys()), children.keys())
            children = {name: child for name, child in children.items() if name in base}
        for name, child in children.items():
            yield from walk(f"{prefix}.{name}" if prefix else name, child)

    yield from walk("", model)


def adapter_parameter_ids(model: nn.Module) -> set[int]:
    """The ``id`` of every parameter that belongs to an adapter and not also to the base.

    Args:
        model: The model, wrapped by PEFT or holding PEFT's layers.

    Returns:
        The ids; empty where there is no adapter. A parameter shared by an adapter and the base is the base's.
    """
    base = {
        id(parameter)
        for _, module in base_modules(model)
        if not is_adapter_module(module)
        for parameter in module._parameters.values()
    }
    return {id(parameter) for parameter in model.parameters()} - base


def refuse_unsupported_tensors(model: nn.Module, *, allow_meta: bool) -> None:
    """Raise for a model whose parameters cannot be edited one by one.

    Args:
        model: The model.
        allow_meta: Whether parameters on the meta device are fine (they are for planning).

    Raises:
        UnsupportedModelError: It is no module, has no parameters, is sharded (DTensor, FSDP1, FSDP2, ZeRO-3) or has a
            parameter on the meta device. ``fqn`` names the first one found.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            "expected a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained(...), "
            f"found {type(model).__name__}"
        )
    tensors = named_tensors(model)
    if not tensors:
        raise UnsupportedModelError(f"{type(model).__name__} has no parameters: there is nothing to prepare")
    d_tensor = _loaded("torch.distributed.tensor", "DTensor")
    flat_parameter = _loaded("torch.distributed.fsdp", "FlatParameter")
    for fqn, _, _, parameter in tensors:
        sharding = None
        if isinstance(parameter, d_tensor):
            sharding = "a DTensor (FSDP2 or tensor parallelism)"
        elif isinstance(parameter, flat_parameter) or getattr(parameter, "_is_flat_param", False):
            sharding = "an FSDP1 flat parameter"
        elif hasattr(parameter, "ds_id"):
            sharding = "a ZeRO-3 partition"
        if sharding:
            raise UnsupportedModelError(
                f"{fqn} is {sharding}: no dtype of a sharded parameter can be changed safely; "
                "prepare the model before it is sharded",
                fqn=fqn,
            )
    fsdp1 = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    for fqn, module in model.named_modules():
        if isinstance(module, fsdp1):
            raise UnsupportedModelError(
                f"{fqn or 'the model'} is wrapped by FSDP1: no dtype of a sharded parameter can be changed safely; "
                "prepare the model before it is sharded",
                fqn=fqn,
            )
    if allow_meta:
        return
    for fqn, module, _, parameter in tensors:
        if parameter.is_meta:
            offloaded = getattr(module, "_hf_hook", None) is not None
            remedy = (
                "its values are offloaded by accelerate; load the model without offloading (device_map={'': device})"
                if offloaded
                else "load its weights first; build_plan works on the meta device"
            )
            raise UnsupportedModelError(f"{fqn} is on the meta device: {remedy}", fqn=fqn)


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share exactly when they share memory.

    Args:
        tensor: A strided tensor.

    Returns:
        The identity of its storage, on the meta device too, where storages have no address.
    """
    return int(tensor.untyped_storage()._cdata)
