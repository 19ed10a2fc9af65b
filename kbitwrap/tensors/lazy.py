"""A tensor whose values are computed when they are asked for.

A library that lays a checkpoint out takes the whole state dict at once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from .bits import without_storage

# Tags of operations whose result's shape follows from values, or whose result differs
# from call to call.
_NEEDS_VALUES = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
_CPU = torch.device("cpu")
Pieces = Callable[[], Iterator[Tensor]]
# No memory is mapped this high, so that no address given to a lazy tensor is also that
# of a real one.
_addresses = itertools.count(1 << 62, 1 << 40)


class LazyStorage:
    """A stand-in for a lazy tensor's memory.

    It has a size in bytes, and an address that no other tensor has.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._address = next(_addresses)

    def data_ptr(self) -> int:
        """Return the address."""
        return self._address

    def nbytes(self) -> int:
        """Return the size, in bytes."""
        return self._num_bytes


# The settings of ``keeping_last``: the values kept, of one tensor and its sources; ``None``
# keeps none. And the device to put them on; ``None`` leaves them on that of their sources.
_values: ContextVar[dict[LazyTensor, Tensor] | None]
_values = ContextVar("_values", default=None)
_device: ContextVar[torch.device | None] = ContextVar("_device", default=_CPU)


def _kept(only: Sequence[LazyTensor] | None = None) -> dict[LazyTensor, Tensor]:
    """Return the values kept, and drop those of other tensors than these first.

    Values that are added outside of ``keeping_last`` go with the dictionary.
    """
    kept = _values.get()
    if kept is None:
        kept = {}
    if only is not None:
        for tensor in kept.keys() - set(only):
            del kept[tensor]
    return kept


@contextlib.contextmanager
def keeping_last(
    kept: dict[LazyTensor, Tensor] | None = None,
    device: torch.device | None = _CPU,
) -> Iterator[None]:
    """Keep the last values computed, and those they were made from.

    They serve the next piece of the same tensor.

    Args:
        kept: The dictionary to keep them in; ``None`` makes one.
        device: The device that values are put on; ``None`` leaves them on that of their
            sources.

    Yields:
        Nothing.
    """
    outer_values = _values.set({} if kept is None else kept)
    outer_device = _device.set(device)
    try:
        yield
    finally:
        _values.reset(outer_values)
        _device.reset(outer_device)


class LazyTensor(Tensor):
    """A dense CPU tensor without values, and how to compute them.

    Operations are lazy; those that write to it raise.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        compute: Returns the values, of that shape and dtype, on any device. It is
            called each time they are asked for.
        pieces: Gives the same values as consecutive flat tensors, on any device;
            ``None`` where they come in one piece.
        is_own: Whether ``compute`` makes new memory each time.
    """

    _meta: Tensor  # the same shape and strides, without values
    _storage: LazyStorage
    _compute: Callable[[], Tensor]
    _view_of: LazyTensor | None  # the tensor that a view is taken of
    # the lazy tensor that this one is made from, if there is only one
    _parent: LazyTensor | None
    _pieces: Pieces | None = None
    is_own = False

    # Without `__torch_function__`, methods and functions go straight to
    # `__torch_dispatch__`.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[], Tensor],
        pieces: Pieces | None = None,
        *,
        is_own: bool = False,
    ) -> LazyTensor:
        """Make a contiguous tensor without storage."""
        made = cls._make(torch.empty(tuple(shape), dtype=dtype, device="meta"), compute)
        made._pieces = pieces
        made.is_own = is_own
        return made

    @classmethod
    def _make(
        cls,
        meta: Tensor,
        compute: Callable[[], Tensor],
        base: LazyTensor | None = None,
        parent: LazyTensor | None = None,
    ) -> LazyTensor:
        made: LazyTensor = without_storage(cls, meta, meta.dtype, _CPU)
        made._meta = meta
        if base is not None:
            made._storage = base._storage
        else:
            made._storage = LazyStorage(meta.untyped_storage().nbytes())
        made._compute = compute
        made._view_of = base
        made._parent = parent
        return made

    @property
    def lineage(self) -> tuple[LazyTensor, ...]:
        """The lazy tensors with storages of their own that its values are made from.

        The last has its storage.
        """
        if self._view_of is not None:
            return self._view_of.lineage
        if self._parent is not None:
            return (*self._parent.lineage, self)
        return (self,)

    def values(self) -> Tensor:
        """Compute the values, in any layout, or take those that are kept.

        They are not to be written to.
        """
        kept = _kept()
        if self in kept:
            return kept[self]
        is_whole = self._view_of is None
        if is_whole:
            _kept(self.lineage)  # before more is computed
        computed = self.compute()
        device = _device.get()
        if device is not None:
            computed = computed.to(device)
        if computed.shape != self.shape or computed.dtype != self.dtype:
            raise RuntimeError(
                f"a lazy tensor of shape {tuple(self.shape)} and dtype {self.dtype} was computed with shape "
                f"{tuple(computed.shape)} and dtype {computed.dtype}"
            )
        if is_whole:
            kept[self] = computed
        return computed

    def compute(self) -> Tensor:
        """Compute the values on the device of their sources, and keep none.

        They are not to be written to.
        """
        return self._compute().detach()

    def own(self) -> Tensor:
        """Compute the values, contiguous, in memory that nothing else refers to."""
        if not self.is_own:
            return self.values().clone(memory_format=torch.contiguous_format)
        _kept(self.lineage)
        return self.lineage[-1].compute().contiguous()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation on shapes, and keep how to compute its values."""
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise TypeError(
                f"{func} writes to a lazy tensor, whose values are not computed yet; materialize it first"
            )

        def run() -> Any:
            values, options = tree_map_only(
                LazyTensor, LazyTensor.values, (args, kwargs)
            )
            return func(*values, **options)

        # Where the result cannot be described without its values, it is computed.
        gives_tensors = all("Tensor" in str(one.type) for one in func._schema.returns)
        is_on_cpu = torch.device(kwargs.get("device") or _CPU).type == "cpu"
        if not (gives_tensors and is_on_cpu and _NEEDS_VALUES.isdisjoint(func.tags)):
            return run()

        metas, options = tree_map_only(Tensor, _meta_of, (args, kwargs))
        if "device" in options:
            options["device"] = "meta"
        results, structure = tree_flatten(func(*metas, **options))

        # the lazy tensors with storages of their own that the arguments are made of
        leaves = [
            one for one in tree_leaves((args, kwargs)) if isinstance(one, LazyTensor)
        ]
        sources = [leaf.lineage[-1] for leaf in leaves]
        by_storage = {_storage_key(source._meta): source for source in sources}
        parent = sources[0] if len(sources) == 1 else None

        def result(index: int) -> Tensor:
            return tree_leaves(run())[index]  # type: ignore[no-any-return]

        made = []
        for index, meta in enumerate(results):
            compute = functools.partial(result, index)
            base = by_storage.get(_storage_key(meta))
            made.append(cls._make(meta, compute, base, parent))
        if func is torch.ops.aten.detach.default:
            detached = args[0]
            made[0]._pieces = detached._pieces
            made[0].is_own = detached.is_own
        return tree_unflatten(made, structure)

    def data_ptr(self) -> int:
        """Return an address that only tensors of the same lazy storage can have."""
        offset = int(self.storage_offset()) * self.element_size()
        return self._storage.data_ptr() + offset

    def untyped_storage(self) -> Any:
        """Return the storage, as far as others need it to tell which tensors share it."""
        return self._storage

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        return self  # it cannot be written to

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise pickle.PicklingError(
            "a lazy tensor has no values to pickle; materialize it first"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the values of any dense tensor, as consecutive contiguous CPU tensors.

    They are computed as few at a time as can be.
    """
    is_lazy = isinstance(tensor, LazyTensor) and tensor not in _kept()
    in_pieces = tensor._pieces if is_lazy else None  # type: ignore[attr-defined]
    if in_pieces is None:
        yield materialize(tensor)
        return
    for piece in in_pieces():
        yield piece.detach().to(_CPU)


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of any dense tensor on the device of its sources, in any layout.

    They are not to be written to.
    """
    if isinstance(tensor, LazyTensor):
        return tensor.compute()
    return tensor.detach()


def materialize(tensor: Tensor) -> Tensor:
    """Return the values of any dense tensor, contiguous, on the CPU, without gradient.

    They may be a view, and are not to be written to.
    """
    values = tensor.values() if isinstance(tensor, LazyTensor) else tensor.detach()
    return values.to(_CPU).contiguous()


def _meta_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, LazyTensor):
        return tensor._meta
    return tensor.to("meta")


def _storage_key(meta: Tensor) -> Any:
    """Return the key that tensors on the meta device share when they are views of one another."""
    return meta.untyped_storage()._cdata
