"""PEFT's layers: which of their adapters are active, and what a layer is when they are merged in float32.

The merge is PEFT's own, on a copy of PEFT's layer over a plain float32 base. Whether a method can be merged is not
looked up in a list: the copy's forward says what the layer computes, and the merged layer must compute the same.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .errors import ExportError
from .quantization import is_quantized_layer

# The largest difference allowed between what a layer and its merge compute, relative to the largest output. Rounding
# in float32 stays below it; half a unit in the last place of float16, the finer half dtype, is 2**-12.
_TOLERANCE = 2.0**-15
_QUANTIZED_MODULE = ".bnb"  # where PEFT has a method's layers for bitsandbytes, beside ``.layer``
_QUANTIZED_SUFFIX = re.compile(r"(4bit|8bitLt)$")
# accelerate's: the forward between its hooks, what it calls, and the hook.
_HOOKED_FORWARD = ("forward", "_old_forward", "_hf_hook")


def refusal(fqn: str, layer: nn.Module, active: Sequence[str], why: object) -> ExportError:
    """The error that says which adapters cannot be merged, and what to do.

    Args:
        fqn: The name of the module that they adapt; ``""`` is the model itself.
        layer: PEFT's module around it.
        active: The names of the adapters.
        why: What is in the way.

    Returns:
        The error.
    """
    cls = type(layer)
    method = re.sub(r"^peft\.(?:tuners\.)?", "", cls.__module__).partition(".")[0]
    adapters = f" with the adapters {list(active)}" if active else ""
    return ExportError(
        f"{fqn or 'the model'}: {cls.__name__} ({method}){adapters} cannot be merged exactly: {why}; "
        "export without merging, or disable these adapters",
        fqn=fqn,
    )


def is_tuner_layer(wrapper: nn.Module) -> bool:
    """Whether one of PEFT's modules is a layer that adapts a module of the base, and may be merged into it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(wrapper, BaseTunerLayer)


def active_adapters(layer: Any) -> tuple[str, ...]:
    """The adapters of one of PEFT's layers that take part in its forward, in their order."""
    if layer.disable_adapters:
        return ()
    there = layer._all_available_adapter_names()
    return tuple(name for name in layer.active_adapters if name in there)


def trained_copy(wrapper: Any) -> nn.Module | None:
    """The copy that one of PEFT's ``modules_to_save`` wrappers runs instead of the original; ``None`` if none."""
    copies = wrapper._modules.get("modules_to_save")
    if copies is None or wrapper.disable_adapters or not wrapper.active_adapters:
        return None
    trained: nn.Module = copies[wrapper.active_adapters[0]]
    return trained


def refuse_unmergeable(fqn: str, wrapper: Any) -> None:
    """Raise unless one of PEFT's modules that is no layer is only the frame around layers.

    Args:
        fqn: The name of the module that it is around.
        wrapper: PEFT's module.

    Raises:
        ExportError: It changes what is computed otherwise than by layers: prompt learning, gates, adapted attention.
    """
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(wrapper, (PeftModel, PeftMixedModel)):
        found: str | list[str] = wrapper.active_adapter
        active = [found] if isinstance(found, str) else found
        for config in [wrapper.peft_config[name] for name in active if name in wrapper.peft_config]:
            if config.is_prompt_learning:
                method = str(getattr(config.peft_type, "value", config.peft_type))
                raise refusal(fqn, wrapper, active, f"{method} adds to the input")
    elif type(wrapper).__name__ == "XLoraModel":
        raise refusal(fqn, wrapper, (), "it weighs adapters by the input")
    elif not isinstance(wrapper, (BaseTuner, AuxiliaryTrainingWrapper)):
        raise refusal(fqn, wrapper, (), "it has no merge of its own")


def merge_layer(
    fqn: str, layer: Any, active: tuple[str, ...], plain: nn.Module, stored: torch.Tensor | None = None
) -> nn.Module:
    """Merge a layer's active adapters into a plain float32 base, and make sure that it computes what the layer does.

    Args:
        fqn: The name of the module that is adapted.
        layer: PEFT's layer; it is only read.
        active: The adapters to merge.
        plain: The float32 base, from `float32_module`; it may be changed.
        stored: Where the base is quantized, the storage of its weight, which is what a method that does not know of
            quantization reads.

    Returns:
        The merged module, in float32.

    Raises:
        ExportError: It cannot be merged exactly.
    """
    is_by_name = parameter_name(layer) is not None
    if plain._modules and not is_by_name:
        raise refusal(fqn, layer, active, f"it adapts several modules of {type(plain).__name__} at once")
    try:
        if "forward" in vars(layer) and "_hf_hook" not in vars(layer):
            raise TypeError("its forward was replaced, and may depend on the input in any way")
        adapted = _float32_layer(layer, plain)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            # A parameter that is adapted by name is not that of a layer that could be run by itself.
            probe = None if is_by_name else _probe(plain)
            runs = adapted
            if stored is not None and not _knows_quantization(layer):
                runs = _float32_layer(layer, _as_stored(plain, stored))
            expected = None if probe is None else runs(probe)
            adapted.merge(safe_merge=False, adapter_names=list(active))
            merged: nn.Module = adapted.get_base_layer()
            found = None if probe is None else merged(probe)
    except Exception as error:
        raise refusal(fqn, layer, active, error) from error
    # Weights that are not finite are not this function's to refuse.
    if expected is not None and found is not None and bool(torch.isfinite(found).all()):
        error_ratio = float((found - expected).abs().max() / expected.abs().max())
        if not error_ratio <= _TOLERANCE:
            why = f"merged, it computes another output (off by {error_ratio:.1e} of the largest)"
            raise refusal(fqn, layer, active, why)
    return merged


def parameter_name(layer: nn.Module) -> str | None:
    """The one parameter that a layer of ``target_parameters`` adapts; ``None`` for a layer that adapts a module."""
    name: str | None = getattr(layer, "parameter_name", None)
    return name


def _knows_quantization(layer: Any) -> bool:
    return type(layer).__module__.endswith(_QUANTIZED_MODULE) or layer.quantization_backend is not None


def _float32_layer(layer: Any, plain: nn.Module) -> Any:
    """A copy of one of PEFT's layers in float32, over a plain base."""
    base = layer._modules["base_layer"]
    memo: dict[int, Any] = {id(base): plain}
    # Hooks, accelerate's forward and the adapter that another one is tied to reach far beyond the layer.
    memo |= {id(vars(layer)[name]): None for name in _HOOKED_FORWARD if name in vars(layer)}
    memo |= {id(tied): [] for name, tied in vars(layer).items() if name == "_tied_adapter"}
    stack: list[nn.Module] = [layer]
    while stack:
        module = stack.pop()
        memo |= {id(hooks): OrderedDict() for name, hooks in vars(module).items() if name.endswith("_hooks")}
        # Of an adapter that is tied to another it keeps views with a history, which cannot be copied.
        tensors = [value for value in tree_leaves(dict(vars(module))) if isinstance(value, torch.Tensor)]
        memo |= {id(tensor): tensor.detach().clone() for tensor in tensors if not tensor.is_leaf}
        stack += [child for child in module._modules.values() if child is not None and child is not base]
    copied = copy.deepcopy(layer, memo)
    for name in _HOOKED_FORWARD:
        vars(copied).pop(name, None)
    cls = type(copied)
    if cls.__module__.endswith(_QUANTIZED_MODULE):
        plain_module = importlib.import_module(cls.__module__.removesuffix(_QUANTIZED_MODULE) + ".layer")
        copied.__class__ = getattr(plain_module, _QUANTIZED_SUFFIX.sub("", cls.__name__))
        # A layer for bitsandbytes need not know: its weights are stored as those of ``nn.Linear``.
        vars(copied).setdefault("fan_in_fan_out", False)
    copied.quantization_backend = None
    device = next(p.device for p in plain._parameters.values() if p is not None)
    return copied.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def _as_stored(plain: nn.Module, stored: torch.Tensor) -> nn.Module:
    """A base that computes what a plain one does, while its weight reads as the quantized storage."""
    made = shallow_copy(plain)
    vars(made)["_parameters"]["weight"] = nn.Parameter(stored.detach().as_subclass(torch.Tensor), requires_grad=False)
    vars(made)["forward"] = plain.forward
    return made


def _probe(plain: nn.Module) -> torch.Tensor:
    """An input for a plain module, drawn from torch's generator."""
    weight = plain._parameters["weight"]
    assert weight is not None
    if isinstance(plain, nn.Embedding):
        return torch.randint(0, plain.num_embeddings, (2, 8)).to(weight.device)
    fields = vars(plain)
    if "kernel_size" in fields:
        sides = [2 * size + 1 for size in fields["kernel_size"]]
        return torch.randn(2, fields["in_channels"], *sides).to(weight.device)
    # ``nx`` is that of transformers' ``Conv1D``; norms have the last dimension of their weight.
    features = fields.get("in_features", fields.get("nx", weight.shape[-1]))
    return torch.randn(2, 8, features).to(weight.device)


# ----------------------------------------------------------------------------------------------------
# Plain modules.
# ----------------------------------------------------------------------------------------------------


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class that shares everything but the dictionary of its parameters."""
    made: nn.Module = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__["_parameters"] = dict(module._parameters)
    return made


def is_transposed(module: nn.Module) -> bool:
    """Whether a quantized layer was made of transformers' ``Conv1D``, whose weight is that of a linear, transposed."""
    return is_quantized_layer(module) and getattr(vars(module).get("source_cls"), "__name__", "") == "Conv1D"


def plain_layer(module: nn.Module, *, as_linear: bool = False) -> nn.Module:
    """Make the layer that a quantized one was made from.

    Args:
        module: A 4-bit or 8-bit layer.
        as_linear: Make an ``nn.Linear`` of a ``Conv1D`` too, which is how the quantized layer computes.

    Returns:
        The plain layer, its parameters on the meta device.
    """
    with torch.device("meta"):
        if isinstance(module, nn.Embedding):
            return nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx)
        assert isinstance(module, nn.Linear)
        if is_transposed(module) and not as_linear:
            made: nn.Module = vars(module)["source_cls"](module.out_features, module.in_features)
            return made
        return nn.Linear(module.in_features, module.out_features, module._parameters.get("bias") is not None)


def float32_module(source: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Make a plain module that computes what another does, in float32 and without hooks.

    Args:
        source: The module, quantized or not.
        values: Its parameters by name, in float32; the module takes hold of them. Those left out are ``None``.

    Returns:
        The module, in evaluation mode.
    """
    made = plain_layer(source, as_linear=True) if is_quantized_layer(source) else shallow_copy(source)
    fields = vars(made)
    fields |= {name: type(value)() for name, value in fields.items() if name.endswith("_hooks")}
    for name in _HOOKED_FORWARD:
        fields.pop(name, None)
    fields["_parameters"] = {
        name: nn.Parameter(values[name], requires_grad=False) if name in values else None for name in made._parameters
    }
    fields["training"] = False
    return made
