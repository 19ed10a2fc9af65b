"""Records that find parameters again, without a reference to them.

They find them by owner and name, and by the memory they lie in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.bits import dense_parts, is_composed
from .quantization import is_quantized_parameter
from .wrappers import is_sharded_tensor


class MemoryRef(StorageWeakRef):
    """A weak reference to memory.

    Copying returns the same object: each object releases its weak reference once.

    It has no ``__init__`` of its own: an interrupt in one would leave an object that
    cannot be freed.
    """

    __slots__ = ()

    def __copy__(self) -> MemoryRef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryRef:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle a weak reference to memory")


Place = tuple[nn.Module, str]
"""A module, and a name of a parameter in it."""


class TensorRef(NamedTuple):
    """The place of a parameter: its owner, weakly, and its name there."""

    owner: weakref.ref[nn.Module]
    name: str

    def __call__(self) -> nn.Parameter | None:
        """Return the parameter that is there now."""
        module = self.owner()
        return None if module is None else module._parameters.get(self.name)


class ParameterRecord:
    """A parameter as it was at all of its places.

    As long as the record lives, no other memory gets the address where the parameter was
    last seen.
    """

    def __init__(
        self, fqn: str, places: Iterable[Place], parameter: nn.Parameter
    ) -> None:
        self.fqn = fqn
        self.refs: tuple[TensorRef, ...] = ()
        self.moved(places)
        self.dtype = parameter.dtype
        self.shape = parameter.shape
        # Sharding makes a quantized parameter a plain one. The ``quant_state`` moves
        # with a 4-bit weight.
        is_quantized = is_quantized_parameter(parameter)
        self.quantized_class = type(parameter) if is_quantized else None
        state = getattr(parameter, "quant_state", None)
        self.quant_state = None if state is None else weakref.ref(state)
        self.saw(parameter)

    def expects(self, data: Tensor) -> None:
        """Note that the parameter is about to get this memory.

        The parameter is found wherever the change is interrupted.
        """
        self._memories.update(_memory_of(data))

    def saw(self, parameter: Tensor) -> None:
        """Note that the parameter lies in this memory now."""
        self._memories = _memory_of(parameter)

    def moved(self, places: Iterable[Place]) -> None:
        """Note where others put the parameter, beside the places that it had."""
        for module, name in places:
            self.refs += (TensorRef(weakref.ref(module), name),)

    @property
    def memory(self) -> tuple[Any, ...]:
        """The keys of the memory that it was last seen in, or may have got since."""
        return tuple(self._memories)

    def is_seen(self, parameter: Tensor) -> bool:
        """Return whether a parameter at one of the places is the one recorded.

        It has its statistics, or lies where it did.
        """
        state = None if self.quant_state is None else self.quant_state()
        if state is not None and getattr(parameter, "quant_state", None) is state:
            return True

        return key_of(parameter) in self._memories

    def was_resized(self, parameter: Tensor) -> bool:
        """Return whether a parameter of the name has another number of rows.

        Resized embeddings have; a shard is not taken for one.
        """
        is_other = (
            self.shape != parameter.shape and self.shape[1:] == parameter.shape[1:]
        )
        return is_other and not is_sharded_tensor(parameter)

    def at_places(self) -> list[nn.Parameter]:
        """Return the parameters at its places now."""
        found = [ref() for ref in self.refs]
        return [parameter for parameter in found if parameter is not None]

    def live(self) -> nn.Parameter | None:
        """Return the parameter, if it is still at one of its places."""
        return next(filter(self.is_seen, self.at_places()), None)

    def there(self) -> nn.Parameter | None:
        """Return the parameter, one of its shape, or its shard, at one of its places.

        Others write to a parameter by replacing it.
        """
        found = self.at_places()
        alike = [one for one in found if one.shape == self.shape]
        shards = [one for one in found if is_sharded_tensor(one)]
        seen = [one for one in found if self.is_seen(one)]
        return next(iter([*seen, *alike, *shards]), None)


def _memory_of(tensor: Tensor) -> dict[Any, Any]:
    """Return the key of the memory that a tensor lies in, with weak references to it.

    As long as these are held, no other memory gets that key.
    """
    parts = dense_parts(tensor)
    memory = [MemoryRef(part.untyped_storage()) for part in parts]  # type: ignore[no-untyped-call]
    return {key_of(tensor): memory}


def key_of(tensor: Tensor) -> Any:
    """Return the key of the memory that a tensor lies in.

    Tensors that share memory have the same, on the meta device too.
    """
    if is_composed(type(tensor)):
        storages = [part.untyped_storage() for part in dense_parts(tensor)]
        return tuple([storage._cdata for storage in storages])

    if tensor.layout is not torch.strided:
        return ()

    return tensor.untyped_storage()._cdata


MARK = "_kbitwrap_mark"


class Mark:
    """The mark on a module that a preparation changed, and on its copies.

    It says whose they are, and what their parameters stored.
    """

    def __init__(self, of: int = 0, records: Records | None = None) -> None:
        # the ``id`` of the module, which copies of it outlive
        self.of = of
        self.records = records  # the preparation's; a pickle has none
        # of the parameters that are upcast, by name
        self.dtypes: dict[str, torch.dtype] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()


class Records:
    """The records of a model's parameters, and the marks of its modules.

    There is one record of each parameter, under each of its places.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[nn.Module, dict[str, ParameterRecord]] = (
            weakref.WeakKeyDictionary()
        )

    def at(self, module: nn.Module, name: str) -> ParameterRecord | None:
        """Return the record of the parameter that was at a place."""
        return self._of.get(module, {}).get(name)

    def add(self, record: ParameterRecord, places: Iterable[Place]) -> None:
        """Keep a record under each of its places."""
        for owner, name in places:
            self._of.setdefault(owner, {})[name] = record

    def mark(self, module: nn.Module) -> Mark:
        """Return the module's mark, made where it has none."""
        found = self.mark_of(module)
        if found is None:
            found = vars(module)[MARK] = Mark(id(module), self)

        return found

    def mark_of(self, module: nn.Module) -> Mark | None:
        """Return the mark of a module, or of its original, if it is of these records."""
        found = vars(module).get(MARK)
        return None if found is None or found.records is not self else found

    def dtype_before(self, module: nn.Module, name: str) -> torch.dtype | None:
        """Return the dtype that a parameter had before it was upcast.

        For a copy, it is the dtype that the original had.
        """
        mark = self.mark_of(module)
        return None if mark is None else mark.dtypes.get(name)
