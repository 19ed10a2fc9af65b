"""A float32 tensor that stores half: its values are upcast each time they are used, and not kept.

Below autograd, each operation gets a copy that lives no longer than it. Autograd saves the tensor itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError, UnsupportedModelError
from .bits import without_storage
from .dtypes import HALF_DTYPES

aten = torch.ops.aten

# Operations that pick elements of the first argument: picking in half and upcasting what was picked is exact.
_GATHERS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default}


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is made of others; only in inference mode it arrives here whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns views of its first argument: a view of the half storage serves."""
    if func is aten.view.dtype:
        return False  # it reads bytes, which are the upcast ones
    returns = [value.alias_info for value in func._schema.returns]
    return func is aten._unsafe_view.default or any(alias and not alias.is_write for alias in returns)


@functools.cache
def _written(func: Any) -> frozenset[int | str]:
    """The arguments that an operation writes to, by position and by name."""
    written = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
    return frozenset(key for pair in written for key in pair)


def _of_float32(name: str) -> Any:
    """A method that reads memory: that of a float32 copy, for an upcast tensor has no memory."""

    def method(self: UpcastTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.half_storage.detach().float(), name)(*args, **kwargs)

    method.__doc__ = f"``torch.Tensor.{name}`` of a float32 copy."
    return method


class ShardedStandInError(UnsupportedModelError, AttributeError):
    """A weight that is upcast at use is asked for its shard; ``hasattr`` says that it has none."""


class UpcastTensor(torch.Tensor):
    """A float32 view of half storage, on the device where it was made. A module's whole weight passes for a parameter.

    The ``owner`` of a weight, or of a view of it, is a module and the parameter's name there. It is looked up at each
    use: the parameter may be moved, swapped or written to. ``chunk_bytes`` bounds the float32 alive in a product.
    """

    @staticmethod
    def __new__(cls, half: torch.Tensor, *_: Any, **__: Any) -> UpcastTensor:
        """Make a float32 tensor without storage, of the half tensor's shape and layout."""
        return without_storage(cls, half, torch.float32, half.device)  # type: ignore[no-any-return]

    def __init__(
        self,
        half: torch.Tensor,
        owner: tuple[nn.Module, str] | None = None,
        chunk_bytes: int | None = None,
        is_view: bool = False,
    ) -> None:
        self.is_view = is_view and owner is not None  # whether it stands for a view of the weight
        self._half = None if owner else half.detach()
        self.owner = owner
        self._chunk_bytes = chunk_bytes
        self._layout: tuple[Any, Any, Any] | None = None
        # Read by ``isinstance(tensor, nn.Parameter)``; false again once the module has been restored.
        self._is_param = owner is not None and not is_view
        self._is_state = False
        if self.is_view:
            start = self.parameter.storage_offset()
            self._layout = (half.shape, half.stride(), half.storage_offset() - start)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that it stands for."""
        assert self.owner is not None
        module, name = self.owner
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter

    def _refusal(self) -> StateError:
        module, name = self.owner or (None, "weight")
        return StateError(
            f"{type(module).__name__}.{name} was made trainable, but under precision 'compute' it is a frozen weight "
            "stored in half; train a copy (modules_to_save), or prepare with freeze=False or precision 'full'"
        )

    @property
    def half_storage(self) -> torch.Tensor:
        """The stored tensor: half, or float32 once it was written to; raises if it would silently not be trained."""
        if self.owner is None:
            assert self._half is not None
            return self._half
        parameter = self.parameter
        if parameter.requires_grad and torch.is_grad_enabled():
            raise self._refusal()
        if self._layout is None:
            return parameter
        shape, stride, offset = self._layout
        return parameter.detach().as_strided(shape, stride, parameter.storage_offset() + offset)

    def _for_writing(self) -> torch.Tensor:
        """The storage, cast to float32 for good: half would round what is written."""
        if self.owner is None:
            raise RuntimeError("an upcast tensor that is not a module's weight cannot be written to")
        parameter = self.parameter
        if parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
        return self.half_storage.detach()

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

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._is_state:
            upcast = self.half_storage.detach().float()
            return (nn.Parameter(upcast, requires_grad=False) if self._is_param else upcast).__reduce_ex__(protocol)
        # Shape and layout travel as an empty stand-in: when read back, the owner may not have its parameter yet.
        half = self.parameter
        empty = torch.empty_strided(half.shape, half.stride(), dtype=half.dtype, device="meta")
        return UpcastTensor, (empty, self.owner, self._chunk_bytes)

    def as_state(self) -> UpcastTensor:
        """A copy for its module's state: it is pickled as a stand-in, and not as a float32 tensor."""
        result = UpcastTensor(self.parameter, self.owner, self._chunk_bytes)
        result._is_state = True
        return result

    @property
    def _local_tensor(self) -> Any:
        """The attribute of a ``DTensor`` that FSDP2 asks of every parameter before the first forward."""
        name = "weight" if self.owner is None else f"{type(self.owner[0]).__name__}.{self.owner[1]}"
        if self.owner is not None and hasattr(self.parameter, "_local_tensor"):
            raise ShardedStandInError(
                f"{name} is upcast as it is used (precision 'compute') and was sharded by FSDP2, which takes what "
                "stands in front of a weight for the weight; prepare with precision 'norms' or 'full', and then shard. "
                "export() on every rank writes the exact base of this model"
            )
        raise AttributeError(f"{name} is not sharded")

    tolist = _of_float32("tolist")
    numpy = _of_float32("numpy")
    __dlpack__ = _of_float32("__dlpack__")
    __format__ = _of_float32("__format__")

    def data_ptr(self) -> int:
        """Raise a RuntimeError: code that reads memory by its address would read half bits for float32."""
        raise RuntimeError(
            "this float32 weight is upcast as it is used and has no memory of its own (precision 'compute'); give code "
            "that reads memory a copy, weight.clone(), or prepare with precision 'full'"
        )

    @property
    def data(self) -> torch.Tensor:
        """A detached view; changing it changes the parameter, which is stored in float32 from then on."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.owner is None:
            raise RuntimeError("only a module's own weight can be given other data")
        module, name = self.owner
        parameter = self.parameter
        parameter.data = value.half_storage.detach() if isinstance(value, UpcastTensor) else value
        vars(module)[name] = UpcastTensor(parameter, self.owner, self._chunk_bytes)

    @property
    def requires_grad(self) -> bool:
        """Whether it is a leaf to train, as a view may be (PEFT's DoRA makes one); a weight upcast at use is frozen."""
        return self.is_view and super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.is_view:
            super().requires_grad_(value)
        elif value:
            raise self._refusal()

    def requires_grad_(self, requires_grad: bool = True) -> UpcastTensor:
        """Refuse to be trained, unless this is a view: the stand-in is not a parameter of the model."""
        self.requires_grad = requires_grad
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation; see the module."""
        kwargs = kwargs or {}
        if _is_composite(func):
            return func.decompose(*args, **kwargs)
        written = [value for key, value in (*enumerate(args), *kwargs.items()) if key in _written(func)]
        if any(isinstance(value, UpcastTensor) for value in tree_leaves(written)):
            _write(func, args, kwargs)
            return written[0] if func._schema.returns else None
        first = args[0] if args else None
        if isinstance(first, UpcastTensor):
            if _is_view(func):
                return first._view(func, args[1:], kwargs)
            if func in _GATHERS:
                return func(first.half_storage, *args[1:], **kwargs).float()
            if func is aten._to_copy.default and kwargs.get("dtype") in HALF_DTYPES:
                # float32 holds every half value, so the way through it changes nothing.
                return func(first.half_storage, **kwargs)
        if func in (aten.mm.default, aten.addmm.default) and isinstance(args[-1], UpcastTensor) and not kwargs:
            return _product(func, args[:-1], args[-1])
        return func(*_upcast(args), **_upcast(kwargs))

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        # A wrapper cannot be made of a view that inference mode makes of a normal tensor.
        stored = self.half_storage
        with torch.inference_mode(False), torch.no_grad():
            view = func(stored.detach(), *args, **kwargs)
            return tree_map_only(
                torch.Tensor, lambda half: UpcastTensor(half, self.owner, self._chunk_bytes, True), view
            )


def _write(func: Any, args: Any, kwargs: Any) -> None:
    """Run an operation that writes to upcast tensors: on their storage, cast to float32 where that changes it."""
    written: list[tuple[UpcastTensor, torch.Tensor]] = []

    def upcast(tensor: UpcastTensor) -> torch.Tensor:
        written.append((tensor, tensor.half_storage.detach().to(torch.float32, copy=True)))
        return written[-1][1]

    def prepared(key: int | str, value: Any) -> Any:
        return tree_map_only(UpcastTensor, upcast, value) if key in _written(func) else _upcast(value)

    func(*[prepared(i, v) for i, v in enumerate(args)], **{name: prepared(name, v) for name, v in kwargs.items()})
    for tensor, values in written:
        # A model may clamp its weights in every forward, and change none.
        if not torch.equal(values.view(torch.int32), tensor.half_storage.detach().float().view(torch.int32)):
            tensor._for_writing().copy_(values)


def multiplies_half(left: torch.Tensor, half: torch.Tensor) -> bool:
    """Whether the device multiplies two half tensors and returns the float32 that it sums in."""
    return left.is_cuda and left.dtype == half.dtype and torch.version.hip is None and "dtype" in aten.mm.overloads()


def _upcast(arguments: Any) -> Any:
    return tree_map_only(UpcastTensor, lambda tensor: tensor.half_storage.float(), arguments)


def _product(func: Any, args: Sequence[Any], weight: UpcastTensor) -> torch.Tensor:
    """A matrix product with an upcast right-hand side, in pieces of whole columns; no sum is split."""
    half = weight.half_storage
    if func is aten.mm.default and weight.owner is None and args[0].dtype == half.dtype:
        return aten.mm.dtype(*args, half, torch.float32)  # type: ignore[no-any-return]
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
