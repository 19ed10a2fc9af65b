"""The part that each parameter plays in its model, and which modules are norms.

The room also tells layers that lose gradients or return float32.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from ..tensors.dtypes import HALF_DTYPES
from .quantization import is_quantized_parameter
from .tree import ModelTree, NamedTensor, Node

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


def is_norm(module: nn.Module, norm_modules: tuple[type | str, ...] = ()) -> bool:
    """Return whether a module is one of ``norm_modules``, or a leaf named a norm.

    A string among these is a pattern of the names of classes. The parameters of such a
    leaf are vectors; it keeps no statistics, which are buffers, and never cast.
    """
    parameters = [*module.parameters(recurse=False)]
    if not parameters:
        return False

    cls = type(module)
    names = [base.__name__ for base in cls.__mro__ if base not in (nn.Module, object)]
    for wanted in norm_modules:
        if not isinstance(wanted, str):
            is_wanted = issubclass(cls, wanted)
        else:
            is_wanted = any(re.fullmatch(wanted, name) for name in names)
        if is_wanted:
            return True

    if isinstance(module, nn.modules.batchnorm._NormBase):
        return False
    is_leaf = next(module.children(), None) is None
    is_of_vectors = all(parameter.dim() <= 1 for parameter in parameters)
    return is_leaf and is_of_vectors and any("norm" in name.lower() for name in names)


def _embeddings(tree: ModelTree, getter: str) -> Iterator[nn.Module]:
    """Yield the modules that ``getter`` returns of every model, with the modules in them.

    There may be models inside the model.
    """
    for node in tree.modules:
        if not hasattr(type(node.module), getter):
            continue
        try:
            embeddings = getattr(node.module, getter)()
        except (NotImplementedError, AttributeError):
            continue  # transformers' way to say that this model has none
        if isinstance(embeddings, nn.Module):
            yield from embeddings.modules()


def parameter_roles(
    tree: ModelTree, norm_modules: tuple[type | str, ...] = ()
) -> dict[int, Role]:
    """Return the role of every parameter, by its ``id``.

    A tied embedding counts as input embedding.
    """

    def ids_of(getter: str) -> set[int]:
        modules = _embeddings(tree, getter)
        return {id(p) for module in modules for p in module.parameters(recurse=False)}

    inputs = ids_of("get_input_embeddings")
    outputs = ids_of("get_output_embeddings")

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
    """Return the output heads, and trained copies of them, that store half.

    They are linear layers that are not quantized.
    """
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


def loses_gradients(weight: Tensor) -> bool:
    """Try on zeros whether a linear layer's output has no gradient for its input.

    The answer is false where the layer refuses these.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C._EnableTorchFunction(),  # which plans disable
    ):
        row = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        try:
            output = nn.functional.linear(row.requires_grad_(), weight)
        except (RuntimeError, AssertionError):
            return False
    return not output.requires_grad


def returns_float32(
    adapter: Any, dtype: torch.dtype, adapter_dtype: torch.dtype | None = None
) -> bool:
    """Try whether PEFT's layer makes float32 of a half input.

    A copy of it is run on fake tensors, which have no values and draw no random
    numbers, around a layer that returns the dtype of its input, as quantized ones do.
    The copy is in ``adapter_dtype``, or in the layer's own dtypes.
    """
    fakes = FakeTensorMode()
    base = adapter.get_submodule("base_layer")
    try:
        plain = nn.Module()
        plain.out_features = size = adapter.out_features
        # of the size alone: with the layer itself it would be a cycle
        plain.forward = lambda x: x.new_empty(*x.shape[:-1], size)
        with FakeCopyMode(fakes):
            copied = copy.deepcopy(adapter, {id(base): plain})
        if adapter_dtype is not None:
            for parameter in copied.parameters():
                parameter.data = parameter.data.to(adapter_dtype)
        device = next(copied.parameters()).device
        with fakes, torch.no_grad():
            row = torch.empty(1, 1, adapter.in_features, dtype=dtype, device=device)
            output: Tensor = type(copied).forward(copied, row)
    except Exception:  # a layer that is not linear, or does not run so
        return False

    return output.dtype == torch.float32
