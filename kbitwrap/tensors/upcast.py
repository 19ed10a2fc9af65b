"""A float32 tensor that stores half.

Its values are upcast each time they are used, and not kept.

Below autograd, each operation gets a copy that lives no longer than it. Autograd saves
the tensor itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import StateError, UnsupportedModelError
from .bits import Layout, without_storage
from .dtypes import HALF_DTYPES

aten = torch.ops.aten

# Operations that pick elements of the first argument: picking in half and upcasting
# what was picked is exact.
_GATHERS = {aten.embedding.default, aten.index.Tensor, aten.index_select.default}
# Matrix products with the last argument, which can be made in pieces of its columns.
_PRODUCTS = {aten.mm.default, aten.addmm.default}


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to, as its schema says; those in lists one by one.

    ``func.is_view`` says whether its results are views of an argument.
    """
    values = []
    for position, name in _written(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        values.append(value)

    return tree_leaves(values) if values else []


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Find the positions and names of the arguments that an operation writes to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            found.append((position, argument.name))

    return found


def _of_float32(name: str) -> Any:
    """Make a method that reads a float32 copy: an upcast tensor has no memory to read."""

    def method(self: UpcastTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.half_storage.detach().float(), name)(*args, **kwargs)

    method.__doc__ = f"``torch.Tensor.{name}`` of a float32 copy."
    return method


class ShardedStandInError(UnsupportedModelError, AttributeError):
    """The error of a weight that is upcast at use and is asked for its shard.

    It is an ``AttributeError``, so that ``hasattr`` says that there is none.
    """


class Address:
    """The address of an upcast tensor's half memory.

    It can be compared, to tell ties, and asked for its alignment, but not read from.
    """

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Address) else other)

    def __hash__(self) -> int:
        return hash(self.value)

    def _refuse(self, *_: Any) -> Any:
        """Raise: code that reads memory by its address would take half for float32."""
        raise RuntimeError(
            "this float32 weight is upcast as it is used and has no memory of its own (precision 'compute'); give code "
            "that reads memory a copy, weight.clone(), or prepare with precision 'full'"
        )

    __int__ = __index__ = __add__ = _refuse

    def __mod__(self, alignment: int) -> int:
        """Return 0: each operation gets new memory, which is aligned to 64 bytes."""
        if 64 % alignment:
            self._refuse()
        return 0


class UpcastTensor(Tensor):
    """A float32 view of half storage.

    A module's whole weight passes for a parameter.

    Args:
        half: The stored tensor, or the view of it that this one stands for.
        owner: Of a weight, or of a view of it, the module and the parameter's name
            there. It is looked up at each use: the parameter may be moved, swapped or
            written to. ``None``: ``half`` itself is upcast.
        chunk_bytes: The most float32 of it that is alive in a matrix product, in bytes;
            ``None`` upcasts it whole.
        layout: Of a view of the owner's weight, its layout from the weight's first
            element on.
        held: Of a weight, or of a view of it, the parameter: others may take it away
            from the owner, as pruning does.
    """

    @staticmethod
    def __new__(cls, half: Tensor, *_: Any, **__: Any) -> UpcastTensor:
        """Make a float32 tensor without storage, shaped and laid out as the half one."""
        return without_storage(cls, half, torch.float32, half.device)  # type: ignore[no-any-return]

    def __init__(
        self,
        half: Tensor,
        owner: tuple[nn.Module, str] | None = None,
        chunk_bytes: int | None = None,
        layout: Layout | None = None,
        held: nn.Parameter | None = None,
    ) -> None:
        self.owner = owner
        self.held = held
        self._half = half.detach() if owner is None else None
        self._chunk_bytes = chunk_bytes
        self._layout = layout
        # Read by ``isinstance(tensor, nn.Parameter)``; false again once the module has
        # been restored.
        self._is_param = self.is_weight
        self._is_state = False

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that it stands for."""
        assert self.owner is not None
        module, name = self.owner
        parameter = module._parameters.get(name)
        if parameter is None:  # others took it away, and may register another there
            if vars(module).get(name) is self:
                del vars(module)[name]
            parameter = self.held
        assert parameter is not None
        return parameter

    @property
    def is_weight(self) -> bool:
        """Whether it stands for the owner's weight itself.

        It may stand for a view of that, or for a tensor without owner.
        """
        return self.owner is not None and self._layout is None

    @property
    def _name(self) -> str:
        """The weight's name, for messages."""
        if self.owner is None:
            return "weight"
        module, name = self.owner
        return f"{type(module).__name__}.{name}"

    @property
    def is_whole(self) -> bool:
        """Whether it stands for a whole weight; a frozen view of all of it does too."""
        if self._layout is None:
            return True
        half = self.parameter
        return not self.requires_grad and self._layout == Layout(
            0, half.shape, half.stride()
        )

    @property
    def half_storage(self) -> Tensor:
        """The stored tensor: half, or float32 after an operation wrote to it.

        It raises if the weight would silently not be trained.
        """
        if self.owner is None:
            assert self._half is not None
            return self._half
        parameter = self.parameter
        if parameter.requires_grad and torch.is_grad_enabled():
            raise StateError(
                f"{self._name} was made trainable, but under precision 'compute' it is a frozen weight stored in 16 "
                "bits; train a copy (modules_to_save), or prepare with freeze=False or precision 'full'"
            )
        if self._layout is None:
            return parameter
        offset = parameter.storage_offset() + self._layout.offset
        return parameter.detach().as_strided(
            self._layout.shape, self._layout.stride, offset
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UpcastTensor(shape={tuple(self.shape)}, stored={self.half_storage.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], int | None]:
        return ["half_storage"], self._chunk_bytes

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], chunk_bytes: int | None, size: Any, stride: Any
    ) -> UpcastTensor:
        return UpcastTensor(inner["half_storage"], None, chunk_bytes)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(self.half_storage.float(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._is_state:
            # Shape and layout travel as an empty stand-in: when read back, the owner
            # may not have its parameter yet.
            empty = torch.empty_like(self.parameter, device="meta")
            return UpcastTensor, (empty, self.owner, self._chunk_bytes)
        upcast = self.half_storage.detach().float()
        if self._is_param:
            upcast = nn.Parameter(upcast, requires_grad=False)
        return upcast.__reduce_ex__(protocol)

    def as_state(self) -> UpcastTensor:
        """Copy it for its module's state: the copy is pickled as a stand-in, not as float32."""
        result = UpcastTensor(self.parameter, self.owner, self._chunk_bytes)
        result._is_state = True
        return result

    @property
    def _local_tensor(self) -> Any:
        """The attribute of a ``DTensor`` that FSDP2 asks of every parameter, at first."""
        if self.owner is not None and hasattr(self.parameter, "_local_tensor"):
            raise ShardedStandInError(
                f"{self._name} is upcast as it is used (precision 'compute') and was sharded by FSDP2, which takes "
                "what stands in front of a weight for the weight; tell the engine, prepare(engine='fsdp2'), or take "
                "precision 'norms', and then shard. export() on every rank writes the exact base of this model"
            )
        raise AttributeError(f"{self._name} is not sharded")

    tolist = _of_float32("tolist")
    numpy = _of_float32("numpy")
    __dlpack__ = _of_float32("__dlpack__")
    __format__ = _of_float32("__format__")

    def data_ptr(self) -> Address:  # type: ignore[override]
        """Return the address of the half memory, only to be compared."""
        # a weight that was made trainable is refused when it is used, not when it is
        # looked at
        with torch.no_grad():
            return Address(self.half_storage.data_ptr())

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the half memory, which is all that is held.

        A tracer takes tensors that share memory for views of each other.
        """
        if torch._guards.TracingContext.try_get() is not None:
            return super().untyped_storage()
        with torch.no_grad():
            return self.half_storage.untyped_storage()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The bytes of the half memory."""
        with torch.no_grad():
            return self.half_storage.nbytes

    def follow_device(self) -> None:
        """Put another stand-in in front of a weight that was moved to another device."""
        moved = self.parameter
        if moved.device != self.device:
            self.data = moved.data  # the setter puts a new stand-in there

    @property
    def data(self) -> Tensor:
        """A detached view.

        Changing it changes the parameter, which is stored in float32 from then on.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if self.owner is None:
            raise RuntimeError("only a module's own weight can be given other data")
        module, name = self.owner
        parameter = self.parameter
        if isinstance(value, UpcastTensor):
            value = value.half_storage.detach()
        parameter.data = value
        vars(module)[name] = UpcastTensor(
            parameter, self.owner, self._chunk_bytes, held=parameter
        )

    @property
    def requires_grad(self) -> bool:
        """Whether it is to be trained.

        A view is a leaf of its own, as PEFT's DoRA makes one; a weight has its
        parameter's.
        """
        if self.is_weight:
            return self.parameter.requires_grad
        return super().requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.is_weight:
            self.parameter.requires_grad_(value)
        else:
            super().requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> UpcastTensor:
        """Set the flag, of a weight on its parameter.

        A weight that is to be trained is refused when it is used.
        """
        self.requires_grad = requires_grad
        return self

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation on float32 copies; the docstring of this file says why."""
        kwargs = kwargs or {}
        # In inference mode a composite operation arrives undivided; elsewhere autograd
        # divided it before.
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        values = written_arguments(func, args, kwargs)
        written = [value for value in values if isinstance(value, UpcastTensor)]
        if written:
            return _write(func, args, kwargs, written)
        if args and isinstance(args[0], UpcastTensor):
            first, *others = args
            # A view of the half storage serves, unless it reads bytes, which are the
            # upcast ones.
            is_view = func.is_view or func is aten._unsafe_view.default
            if is_view and func is not aten.view.dtype:
                return first._view(func, others, kwargs)
            if func in _GATHERS:
                return func(first.half_storage, *others, **kwargs).float()
            if func is aten._to_copy.default and kwargs.get("dtype") in HALF_DTYPES:
                # float32 holds every half value, so the way through it changes nothing.
                return func(first.half_storage, **kwargs)
        if func in _PRODUCTS and isinstance(args[-1], UpcastTensor) and not kwargs:
            return _product(func, args[:-1], args[-1])
        return func(*_upcast(args), **_upcast(kwargs))

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make the stand-in for a view of the weight, or a list of them."""

        def stand_in(half: Tensor) -> UpcastTensor:
            if self.owner is None:
                return UpcastTensor(half, None, self._chunk_bytes)
            offset: Any = half.storage_offset() - self.parameter.storage_offset()
            layout = Layout(offset, half.shape, half.stride())
            return UpcastTensor(half, self.owner, self._chunk_bytes, layout, self.held)

        stored = self.half_storage
        # A wrapper cannot be made of a view that inference mode makes of a normal
        # tensor.
        with torch.inference_mode(False), torch.no_grad():
            views = func(stored.detach(), *args, **kwargs)
            return tree_map_only(Tensor, stand_in, views)


def _write(func: Any, args: Any, kwargs: Any, written: list[UpcastTensor]) -> Any:
    """Run an operation that writes to upcast tensors.

    If values change, the storage is cast to float32, and stays so.
    """
    copies = {tensor: tensor.half_storage.detach().float() for tensor in written}

    def upcast(tensor: UpcastTensor) -> Tensor:
        return copies[tensor] if tensor in copies else tensor.half_storage.float()

    args, kwargs = tree_map_only(UpcastTensor, upcast, (args, kwargs))
    results = func(*args, **kwargs)
    for tensor, values in copies.items():
        before = tensor.half_storage.detach().float()
        # A model may clamp its weights in every forward, and change none.
        if torch.equal(values.view(torch.int32), before.view(torch.int32)):
            continue
        if tensor.owner is None:
            raise RuntimeError(
                "an upcast tensor that is not a module's weight cannot be written to"
            )
        parameter = tensor.parameter
        if parameter.dtype != torch.float32:  # half would round what is written
            parameter.data = parameter.data.float()
        tensor.half_storage.detach().copy_(values)
    # an operation returns what it wrote to
    tensors = {id(values): tensor for tensor, values in copies.items()}
    return tree_map_only(Tensor, lambda one: tensors.get(id(one), one), results)


def multiplies_half(left: Tensor, half: Tensor) -> bool:
    """Return whether the device multiplies half tensors into the float32 that it sums in."""
    if not left.is_cuda or left.dtype != half.dtype:
        return False
    return torch.version.hip is None


def _upcast(arguments: Any) -> Any:
    return tree_map_only(
        UpcastTensor, lambda tensor: tensor.half_storage.float(), arguments
    )


def _product(func: Any, args: Sequence[Any], weight: UpcastTensor) -> Tensor:
    """Multiply by an upcast right-hand side, in pieces of whole columns: no sum is split."""
    half = weight.half_storage
    left = args[-1]
    # Only `HeadForward` makes stand-ins without an owner. Where the device multiplies half
    # tensors, its input stays half, and no float32 copy is made.
    is_head = func is aten.mm.default and weight.owner is None
    if is_head and left.dtype == half.dtype:
        return aten.mm.dtype(left, half, torch.float32)  # type: ignore[no-any-return]
    *biases, left = _upcast(list(args))
    num_rows, num_columns = half.shape
    step = num_columns
    if weight._chunk_bytes is not None:
        column_bytes = num_rows * torch.float32.itemsize
        step = max(1, weight._chunk_bytes // column_bytes)
    if step >= num_columns:
        return func(*biases, left, half.float())  # type: ignore[no-any-return]
    output: Tensor = left.new_empty(left.shape[0], num_columns)
    for start in range(0, num_columns, step):
        piece = slice(start, start + step)
        # A bias of one column is broadcast.
        columns = [bias[..., piece] if bias.shape[-1] > 1 else bias for bias in biases]
        output[:, piece] = func(*columns, left, half[:, piece].float())
    return output
