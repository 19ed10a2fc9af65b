"""The part that each parameter plays in its model, which modules are norms, and in which dtype layers compute."""

from __future__ import annotations

import copy
import functools
import re
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..tensors.dtypes import HALF_DTYPES
from .quantization import is_quantized_parameter
from .tree import ModelTree, NamedTensor, Node, shallow_copy

_EXPERT = re.compile(r"(?:^|[._])experts?(?:[._]|$)")


class Role(str, Enum):
    """The part that a parameter plays in its model."""

    INPUT_EMBEDDINGS = "input embeddings"
    OUTPUT_EMBEDDINGS = "output embeddings"
    NORM = "norm"
    EXPERT = "expert"
    ADAPTER = "adapter"
    QUANTIZED = "quantized"
    OTHER = "other"

    __str__ = str.__str__
    __hash__ = str.__hash__  # in a tenth of the time


def is_norm(module: nn.Module, norm_modules: tuple[type | str, ...] = ()) -> bool:
    """Whether a module is one of ``norm_modules``, or a leaf of a class named a norm whose parameters are vectors."""
    parameters = [
        parameter for parameter in module._parameters.values() if parameter is not None
    ]
    if not parameters:
        return False
    cls: Any = type(module)
    if any(_is_wanted(cls, wanted) for wanted in norm_modules):
        return True
    if not _is_named_norm(cls) or any(
        child is not None for child in module._modules.values()
    ):
        return False
    return all(parameter.dim() <= 1 for parameter in parameters)


def _is_wanted(cls: type, wanted: type | str) -> bool:
    """Whether a class is the one wanted or derived from it, or a base of it has a name that the pattern matches."""
    if not isinstance(wanted, str):
        return issubclass(cls, wanted)
    names = [base.__name__ for base in cls.__mro__ if base not in (nn.Module, object)]
    return any(re.fullmatch(wanted, name) for name in names)


@functools.cache
def _is_named_norm(cls: Any) -> bool:
    """Whether a class, or a base of it, is named a norm, and it keeps no statistics: these are buffers, never cast."""
    is_named = any("norm" in base.__name__.lower() for base in cls.__mro__)
    return is_named and not issubclass(cls, nn.modules.batchnorm._NormBase)


def _embeddings(tree: ModelTree, getter: str) -> list[nn.Module]:
    """The modules that ``getter`` returns of the model and of every model inside it, with the modules in them."""
    found: list[nn.Module] = []
    for node in tree.of_class(lambda cls: hasattr(cls, getter)):
        get = getattr(node.module, getter)
        try:
            embeddings = get()
        except (NotImplementedError, AttributeError):
            continue  # transformers' way to say that this model has none
        if isinstance(embeddings, nn.Module):
            found += embeddings.modules()
    return found


def _parameter_ids(modules: list[nn.Module]) -> set[int]:
    return {
        id(parameter) for module in modules for parameter in module._parameters.values()
    }


def parameter_roles(
    tree: ModelTree, norm_modules: tuple[type | str, ...] = ()
) -> dict[int, Role]:
    """The role of every parameter, by its ``id``. A tied embedding counts as input embedding."""
    inputs = _parameter_ids(_embeddings(tree, "get_input_embeddings"))
    outputs = _parameter_ids(_embeddings(tree, "get_output_embeddings"))

    def role_of(tensor: NamedTensor) -> Role:
        module, parameter = tensor.module, tensor.parameter
        if id(parameter) in tree.adapter_ids:
            return Role.ADAPTER
        if is_quantized_parameter(parameter) or not torch.is_floating_point(parameter):
            return Role.QUANTIZED
        if id(parameter) in inputs:
            return Role.INPUT_EMBEDDINGS
        if id(parameter) in outputs:
            return Role.OUTPUT_EMBEDDINGS
        if is_norm(module, norm_modules) or isinstance(
            module, nn.modules.batchnorm._NormBase
        ):
            return Role.NORM
        return Role.EXPERT if _EXPERT.search(tensor.fqn) else Role.OTHER

    return {id(tensor.parameter): role_of(tensor) for tensor in tree.tensors}


def heads(tree: ModelTree) -> list[Node]:
    """The output heads that are unquantized linear layers with a half weight, and the trained copies of such."""
    inside = {id(module) for module in _embeddings(tree, "get_output_embeddings")}
    fqns = {node.fqn for node in tree.base if id(node.module) in inside}
    found = []
    for node in tree.modules:
        if node.fqn not in fqns or not isinstance(node.module, nn.Linear):
            continue
        weight = node.module._parameters.get("weight")
        if type(weight) is nn.Parameter and weight.dtype in HALF_DTYPES:
            found.append(node)
    return found


def loses_gradients(weight: torch.Tensor) -> bool:
    """Whether a linear layer's output has no gradient for its input, tried on zeros; false where it refuses these."""
    # plans disable the last
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C._EnableTorchFunction(),
    ):
        row = torch.zeros(
            1,
            weight.shape[1],
            dtype=weight.dtype,
            device=weight.device,
            requires_grad=True,
        )
        try:
            return not nn.functional.linear(row, weight).requires_grad
        except (RuntimeError, AssertionError):
            return False


class _AsItsInput(nn.Linear):
    """A layer that returns the dtype of its input, as quantized ones do."""

    def reset_parameters(self) -> None:
        """Draw no values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute nothing."""
        return x.new_empty(*x.shape[:-1], self.out_features)


class _OnMeta(TorchFunctionMode):
    """Runs what is called without values: a forward computes dtypes and shapes, and draws no random numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function on tensors without memory in place of those that have some."""
        return func(
            *_to_meta(args),
            **{name: _to_meta(value) for name, value in (kwargs or {}).items()},
        )


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor).to("meta")
    if type(value) in (list, tuple):
        return type(value)(map(_to_meta, value))
    return value


def _copied(module: nn.Module, base: nn.Module, plain: nn.Module) -> nn.Module:
    """A copy that shares its tensors, with another base: a forward may set attributes, and fill lists and dicts."""
    if module is base:
        return plain
    made = shallow_copy(module)
    fields = vars(made)
    for name, value in fields.items():
        if type(value) in (list, dict, set):
            fields[name] = copy.copy(value)
    for name, child in module._modules.items():
        if child is not None:
            made._modules[name] = _copied(child, base, plain)
    return made


def returns_float32(adapter: nn.Module, dtype: torch.dtype) -> bool:
    """Whether PEFT's layer makes float32 of a half input: a copy of it is run, without values, as it may write them."""
    width = getattr(adapter, "in_features", 0)
    try:
        # inside, the mode would see how no_grad ends, where an interrupt leaves it on
        with torch.no_grad(), _OnMeta():
            plain = _AsItsInput(width, adapter.out_features, False, "meta", dtype)  # type: ignore[arg-type]
            copied = _copied(adapter, adapter.get_submodule("base_layer"), plain)
            row = torch.empty(1, 1, width, dtype=dtype, device="meta")
            output: torch.Tensor = type(copied).forward(copied, row)
            return output.dtype == torch.float32
    except (
        Exception
    ):  # a layer that is not linear, or does not run so: of that nothing is said
        return False
