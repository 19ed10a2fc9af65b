"""Records that find parameters again by owner and name, and by the memory they lie in, without a reference to them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..tensors.bits import dense_parts, is_composed
from .quantization import is_quantized_parameter
from .wrappers import is_sharded_tensor


class MemoryRef(StorageWeakRef):
    """A weak reference to memory; copies are the same object, because each object frees what it refers by.

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


class TensorRef(NamedTuple):
    """The place of a parameter: its owner, weakly, and its name there."""

    owner: weakref.ref[nn.Module]
    name: str

    def __call__(self) -> nn.Parameter | None:
        """The parameter that is there now."""
        module = self.owner()
        return None if module is None else module._parameters.get(self.name)


class ParameterRecord:
    """A parameter as it was at all of its places, and the memory that it was last seen in, whose address is kept."""

    __slots__ = (
        "__weakref__",
        "_memories",
        "dtype",
        "fqn",
        "quant_state",
        "quantized_class",
        "refs",
        "shape",
    )

    def __init__(
        self, fqn: str, places: Iterable[tuple[nn.Module, str]], parameter: nn.Parameter
    ) -> None:
        self.fqn = fqn
        self.refs = tuple(
            [TensorRef(weakref.ref(module), name) for module, name in places]
        )
        self.dtype = parameter.dtype
        self.shape = parameter.shape
        # Sharding makes a quantized parameter a plain one. The ``quant_state`` moves
        # with a 4-bit weight.
        self.quantized_class = (
            type(parameter) if is_quantized_parameter(parameter) else None
        )
        state = getattr(parameter, "quant_state", None)
        self.quant_state: weakref.ref[Any] | None = (
            None if state is None else weakref.ref(state)
        )
        self._memories = _memory_of(parameter)

    def expects(self, data: torch.Tensor) -> None:
        """Note that the parameter is about to get this memory, so that it is found wherever that is interrupted."""
        self._memories.update(_memory_of(data))

    def saw(self, parameter: torch.Tensor) -> None:
        """Note that the parameter lies in this memory now."""
        self._memories = _memory_of(parameter)

    def moved(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        """Note where others put the parameter, beside the places that it had."""
        self.refs += tuple(
            [TensorRef(weakref.ref(module), name) for module, name in places]
        )

    @property
    def memory(self) -> tuple[Any, ...]:
        """The keys of the memory that it was last seen in, or may have got since."""
        return tuple(self._memories)

    def is_seen(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter at one of the places is the one recorded: it has its statistics, or lies where it did."""
        state = None if self.quant_state is None else self.quant_state()
        if state is not None and getattr(parameter, "quant_state", None) is state:
            return True
        return key_of(parameter) in self._memories

    def was_resized(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter of the name has another number of rows, as resized embeddings have; a shard has not."""
        is_other = (
            self.shape != parameter.shape and self.shape[1:] == parameter.shape[1:]
        )
        return is_other and not is_sharded_tensor(parameter)

    def at_places(self) -> list[nn.Parameter]:
        """The parameters at its places now."""
        live = [
            (module, name)
            for owner, name in self.refs
            if (module := owner()) is not None
        ]
        return [
            parameter
            for module, name in live
            if (parameter := module._parameters.get(name)) is not None
        ]

    def live(self) -> nn.Parameter | None:
        """The parameter, if it is still at one of its places."""
        return next(filter(self.is_seen, self.at_places()), None)

    def there(self) -> nn.Parameter | None:
        """The parameter, its shard, or one of its shape at one of its places: others write by replacing them."""
        found = self.at_places()
        if found and self.is_seen(found[0]):
            return found[0]  # nearly always
        kinds = (self.is_seen, lambda p: p.shape == self.shape, is_sharded_tensor)
        return next(
            (parameter for is_it in kinds for parameter in found if is_it(parameter)),
            None,
        )


def _memory_of(tensor: torch.Tensor) -> dict[Any, Any]:
    """The key of the memory that a tensor lies in, with the references by which nothing else gets that key."""
    if is_composed(type(tensor)):
        memory = [MemoryRef(part.untyped_storage()) for part in dense_parts(tensor)]  # type: ignore[no-untyped-call]
        return {tuple([reference.cdata for reference in memory]): memory}
    if tensor.layout is not torch.strided:
        return {(): None}
    reference = MemoryRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    return {reference.cdata: reference}


def key_of(tensor: torch.Tensor) -> Any:
    """The key of the memory that a tensor lies in."""
    if is_composed(type(tensor)):
        return tuple([part.untyped_storage()._cdata for part in dense_parts(tensor)])
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else ()


MARK = "_kbitwrap_mark"


class Mark:
    """What a module that a preparation changed has, and its copies: whose they are, and what its parameters stored."""

    def __init__(self, of: int = 0, records: Records | None = None) -> None:
        self.of = of  # the ``id`` of the module
        self.records = records  # those of the preparation; a pickle is of none
        # of the parameters that are upcast, by name
        self.dtypes: dict[str, torch.dtype] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        return self

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()


class Records:
    """The records of a model's parameters, one for each, by owner and name, and the marks of its modules."""

    def __init__(self) -> None:
        # By name, and the ``id`` of the owner, which is compared with it: a dictionary
        # of weak keys is slower.
        self._by_place: dict[str, dict[int, ParameterRecord]] = {}

    def at(self, module: nn.Module, name: str) -> ParameterRecord | None:
        """The record of the parameter that was at a place."""
        found = self._by_place.get(name, {}).get(id(module))
        return (
            found
            if found is not None and any(owner() is module for owner, _ in found.refs)
            else None
        )

    def mark(self, module: nn.Module) -> Mark:
        """The module's mark, made where it has none."""
        found = self.mark_of(module)
        if found is None:
            found = vars(module)[MARK] = Mark(id(module), self)
        return found

    def mark_of(self, module: nn.Module) -> Mark | None:
        """The mark of a module, or of the one that it is a copy of, if it is of these records."""
        found: Mark | None = vars(module).get(MARK)
        return None if found is None or found.records is not self else found

    def dtype_before(self, module: nn.Module, name: str) -> torch.dtype | None:
        """The dtype that a parameter had before it was upcast, or that the one had of which it is a copy."""
        mark = self.mark_of(module)
        return None if mark is None else mark.dtypes.get(name)

    def add(
        self, record: ParameterRecord, places: Iterable[tuple[nn.Module, str]]
    ) -> None:
        """Keep a record under each of its places."""
        for owner, name in places:
            self._by_place.setdefault(name, {})[id(owner)] = record
