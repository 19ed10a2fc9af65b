"""A float32 tensor that stores half: its values are upcast each time they are used, and not kept.

An embedding or a head that computes in float32 needs its weight in float32 for one lookup or one product. An
``UpcastTensor`` stands in for such a weight. To autograd, autocast and every reader of ``dtype`` it is a float32
tensor; below them, each operation gets a float32 copy that lives no longer than the operation. What autograd saves for
backward is the stand-in itself, so backward makes the copy anew, and issues the very product that a stored float32
weight would get.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .quantization import HALF_DTYPES, is_quantized_parameter

aten = torch.ops.aten

# Operations that return a view of the first argument: a view of the half storage serves.
_VIEWS = {
    aten.alias.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
}
# Operations that pick elements of the first argument: picking in half and upcasting what was picked is exact.
_GATHERS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default}


class UpcastTensor(torch.Tensor):
    """A float32 view of half storage.

    Args:
        half: The half tensor that it stands for, any shape.
        owner: For the weight of a module: the module and the parameter's name in it. The parameter is looked up at
            each use, so that it may be moved, or swapped by ``functional_call``.
        chunk_bytes: The largest float32 piece alive at once in a matrix product, in bytes; ``None``: one piece.
    """

    @staticmethod
    def __new__(
        cls, half: torch.Tensor, owner: tuple[nn.Module, str] | None = None, chunk_bytes: int | None = None
    ) -> UpcastTensor:
        """Make a float32 tensor without storage, of the half tensor's shape and layout."""
        wrapper: UpcastTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            half.shape,
            strides=half.stride(),
            storage_offset=half.storage_offset(),
            dtype=torch.float32,
            device=half.device,
        )
        return wrapper

    def __init__(
        self, half: torch.Tensor, owner: tuple[nn.Module, str] | None = None, chunk_bytes: int | None = None
    ) -> None:
        self._half = None if owner else half.detach()
        self._owner = owner
        self._chunk_bytes = chunk_bytes

    @property
    def half_storage(self) -> torch.Tensor:
        """The half tensor; a module's own parameter itself, so that a compiler can follow it.

        Raises:
            RuntimeError: It is a parameter that was made trainable, which this stand-in would silently not train.
        """
        if self._owner is None:
            assert self._half is not None
            return self._half
        module, name = self._owner
        parameter = module._parameters[name]
        assert parameter is not None
        if parameter.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{type(module).__name__}.{name} was made trainable, but under precision 'compute' it is a frozen "
                "weight stored in half; train a copy (modules_to_save), or prepare with freeze=False or 'full'"
            )
        return parameter

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UpcastTensor(shape={tuple(self.shape)}, stored={self.half_storage.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], int | None]:
        return ["half_storage"], self._chunk_bytes

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], chunk_bytes: int | None, size: Any, stride: Any
    ) -> UpcastTensor:
        return UpcastTensor(inner["half_storage"], None, chunk_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.half_storage.float(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Shape and layout travel as an empty stand-in: when read back, the owner may not have its parameter yet.
        half = self.half_storage
        if self._owner is not None:
            half = torch.empty_strided(half.shape, half.stride(), dtype=half.dtype, device="meta")
        return UpcastTensor, (half, self._owner, self._chunk_bytes)

    @property
    def data(self) -> torch.Tensor:
        """A detached view; writing to it writes to the half storage."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self._owner is None:
            raise RuntimeError("only a module's own weight can be given other data")
        module, name = self._owner
        parameter = module._parameters[name]
        assert parameter is not None
        parameter.data = value.half_storage if isinstance(value, UpcastTensor) else value
        vars(module)[name] = UpcastTensor(parameter, self._owner, self._chunk_bytes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation; see the module."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, UpcastTensor):
            if func in _VIEWS:
                view = func(first.half_storage, *args[1:], **kwargs)
                wrap = first._chunk_bytes
                return tree_map_only(torch.Tensor, lambda half: UpcastTensor(half, None, wrap), view)
            if func in _GATHERS:
                return func(first.half_storage, *args[1:], **kwargs).float()
            if func._schema.is_mutable:
                func(first.half_storage, *_upcast(args[1:]), **_upcast(kwargs))
                return first
        if func in (aten.mm.default, aten.addmm.default) and isinstance(args[-1], UpcastTensor) and not kwargs:
            return _product(func, args[:-1], args[-1])
        return func(*_upcast(args), **_upcast(kwargs))


def _upcast(arguments: Any) -> Any:
    return tree_map_only(UpcastTensor, lambda tensor: tensor.half_storage.float(), arguments)


def _product(func: Any, args: Sequence[Any], weight: UpcastTensor) -> torch.Tensor:
    """A matrix product with an upcast right-hand side ``(k, n)``, in pieces of whole columns.

    Forward, the columns are rows of a head's weight, backward they are its columns; the sum over ``k`` is never split.
    """
    half = weight.half_storage
    columns = half.shape[1]
    if weight._chunk_bytes is not None:
        columns = max(1, weight._chunk_bytes // (half.shape[0] * torch.float32.itemsize))
    args = _upcast(list(args))
    if columns >= half.shape[1]:
        result: torch.Tensor = func(*args, half.float())
        return result
    left = args[-1]
    output: torch.Tensor = left.new_empty(left.shape[0], half.shape[1])
    for start in range(0, half.shape[1], columns):
        piece = slice(start, start + columns)
        bias = [bias[..., piece] if bias.shape[-1] > 1 else bias for bias in args[:-1]]
        output[:, piece] = func(*bias, left, half[:, piece].float())
    return output


class Float32Copy:
    """An instance's ``__deepcopy__``: a copy of a module whose weights are stood in for stores them in float32.

    PEFT copies modules to train them (``modules_to_save``), and a trained weight is kept in float32, as it would be
    where the module itself stored float32.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the module.

        Args:
            memo: As in ``copy.deepcopy``; parameters shared with other modules stay shared among the copies.

        Returns:
            The copy, with nothing of a preparation's on it.
        """
        module = self.module
        result: nn.Module = object.__new__(type(module))
        memo[id(module)] = result
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in memo or is_quantized_parameter(parameter):
                continue
            if parameter.dtype in HALF_DTYPES:
                upcast = parameter.detach().float()
                memo[id(parameter)] = nn.Parameter(upcast, requires_grad=parameter.requires_grad)
        for name, value in vars(module).items():
            if not isinstance(value, (UpcastTensor, Float32Copy)):
                result.__dict__[name] = copy.deepcopy(value, memo)
        return result


def can_stand_in(module: nn.Module, name: str) -> bool:
    """Whether an instance attribute can stand in for a module's parameter.

    Not where the class has an attribute of that name (a parametrization's property) or the instance has one already,
    and not where the embedding renormalizes its rows in place as it looks them up.
    """
    is_renormalized = isinstance(module, nn.Embedding) and module.max_norm is not None
    return not (
        hasattr(type(module), name) or name in vars(module) or "__deepcopy__" in vars(module) or is_renormalized
    )
