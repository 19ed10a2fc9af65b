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
    r"|modules_to_save\.[^.]+)(?=\.|$)"
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
    FSDP, ``torch.compile`` and ``checkpoint_wrapper``.

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


def is_peft_model(module: nn.Module) -> bool:
    """Whether a module is a ``PeftModel``."""
    return isinstance(module, _loaded("peft.peft_model", "PeftModel"))


def adapter_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walk the modules that PEFT added beside the base.

    Under a tuner layer that is everything but ``base_layer``, under a ``modules_to_save`` or token wrapper everything
    but ``original_module``, under a ``PeftModel`` everything but ``base_model``.

    Args:
        model: The model, wrapped by PEFT or holding PEFT's layers.

    Yields:
        ``(fqn, module)`` of each root of such a part, wrappers that hold both the base and an adapter included.
    """
    tuner_layer = _loaded("peft.tuners.tuners_utils", "BaseTunerLayer")
    auxiliary = _loaded("peft.utils.other", "AuxiliaryTrainingWrapper")
    peft_model = _loaded("peft.peft_model", "PeftModel")
    module: nn.Module
    for prefix, module in model.named_modules():
        if isinstance(module, peft_model):
            inner = "base_model"
        elif isinstance(module, auxiliary):
            inner = "original_module"
        elif isinstance(module, tuner_layer):
            inner = "base_layer"
        else:
            continue
        for name, child in module.named_children():
            if name != inner:
                yield (f"{prefix}.{name}" if prefix else name), child


def adapter_parameter_ids(model: nn.Module) -> set[int]:
    """The ``id`` of every parameter that belongs to an adapter and not also to the base.

    Args:
        model: The model, wrapped by PEFT or holding PEFT's layers.

    Returns:
        The ids; empty where there is no adapter. A parameter shared by an adapter and the base is the base's.
    """
    roots = list(adapter_modules(model))
    adapters = {id(p) for _, root in roots for p in root.parameters()}
    tuner_layer = _loaded("peft.tuners.tuners_utils", "BaseTunerLayer")
    inside = {id(m) for _, root in roots for m in root.modules()}
    for module in model.modules():
        if id(module) in inside:
            continue
        own = {id(p) for p in module._parameters.values() if p is not None}
        if isinstance(module, tuner_layer):
            adapters |= own
        else:
            adapters -= own
    return adapters


def training_copies(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Walk the copies of base modules that PEFT trains in their place (``modules_to_save``).

    Args:
        model: The model.

    Yields:
        ``(fqn, copy)`` of each copy's root.
    """
    for prefix, child in adapter_modules(model):
        if prefix.rpartition(".")[2] == "modules_to_save":
            for name, copy in child.named_children():
                yield f"{prefix}.{name}", copy


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
