"""Sharded parameters, gathered one at a time by all ranks.

The engines are FSDP2, FSDP1 and ZeRO-3. Rank 0 writes or digests what is gathered. It
announces the next tensor, and every rank gathers that one: wherever rank 0 fails, no
rank is left waiting.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, distributed, nn

from ..edits.base import OriginalSlot
from ..edits.storage import ParameterStorage
from ..edits.training import RuntimeState
from ..errors import ConfigError, ExportError, KbitWrapError, ManifestError
from ..model.bitsandbytes_layers import lacks_scales
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor, shallow_copy
from ..model.wrappers import (
    class_before_sharding,
    is_flattened,
    is_partition,
    is_sharded_tensor,
    loaded_class,
    unwrap,
    whole_shape,
    wrapped_children,
)
from ..preparation.preparation import Preparation
from ..preparation.state import Original
from ..tensors.lazy import LazyTensor

T = TypeVar("T")


class Shard(NamedTuple):
    """A parameter of which this rank holds a part.

    Attributes:
        fqn: Its name.
        shape: The shape of the whole; ``None``: it is known when it is gathered.
        parameter: The part.
        unit: The wrapper that laid it out flat, of FSDP1.
    """

    fqn: str
    shape: torch.Size | None
    parameter: Any
    unit: nn.Module | None


def drift_message(fqn: str) -> str:
    """Return the message for a frozen parameter that holds other values than were recorded."""
    return (
        f"{fqn} is frozen, but its values have changed since the model was prepared (a "
        "merge that was taken back leaves rounding; PiSSA and OLoRA leave a "
        "residual), so the exact base is gone; export before that, or load the base "
        "again"
    )


class Gathering:
    """The sharded parameters of one export or manifest, if there are any.

    They are the same on every rank, and in the same order.
    """

    def __init__(
        self,
        tree: ModelTree,
        preparation: Preparation | None,
        verb: str,
        error: type[ExportError] | type[ManifestError],
    ) -> None:
        self.is_sharded = preparation is not None and any(
            is_sharded_tensor(tensor.parameter) for tensor in tree.tensors
        )
        self._verb = verb  # what the ranks do together
        self._error = error  # what is raised on the others when one rank fails
        # the trainable ones that held other values than recorded when they were read
        self.trained: list[str] = []
        self._tensors: list[Shard] = []
        # the number in `_tensors` of each sharded adapter parameter, by its ``id``
        self._number_of_adapter: dict[int, int] = {}
        self._shells: dict[int, nn.Module] = {}
        # FSDP1's innermost wrapper around each module, by the module's ``id``
        self._units: dict[int, nn.Module] = {}
        # FSDP1's outermost wrappers that were not made whole yet
        self._outermost: list[nn.Module] = []
        # the FSDP1 wrapper whose parameters are whole now
        self._unit: nn.Module | None = None
        self._whole = contextlib.ExitStack()

    def promise_all(
        self,
        tree: ModelTree,
        original: Original,
        held_of: Callable[..., OriginalSlot | None],
    ) -> dict[int, Tensor]:
        """Promise the originals of parameters that were sharded since.

        Sharded parameters of adapters are only numbered: `shell` promises those.

        Returns:
            The promised tensors, by the ``id`` of the live parameter.
        """
        found: dict[int, Tensor] = {}
        for tensor in tree.base_tensors:
            key, fqn = id(tensor.parameter), tensor.fqn
            if not is_sharded_tensor(tensor.parameter) or key in found:
                continue
            was = original.base.get(fqn)
            if was is None or was in original.sharing_memory:
                raise ExportError(
                    f"{fqn}: it was added after the model was prepared, or shared its "
                    "memory with another parameter, so its original cannot be written "
                    "from shards; export before sharding",
                    fqn=fqn,
                )
            held = held_of(tensor.module, tensor.name, tensor.parameter)
            found[key] = self._lazy_original(tensor, was, held, original)

        for tensor in tree.tensors:
            key = id(tensor.parameter)
            if key not in found and is_sharded_tensor(tensor.parameter):
                self._number_of_adapter[key] = self._add(tensor, None)

        return found

    def shell(self, module: nn.Module) -> nn.Module:
        """Return a copy of one of PEFT's modules, of which sharded parameters are promised.

        Inside `lead` they can be read. The module that it wraps is not copied. Two calls
        with one module return one copy.
        """
        if not self.is_sharded:
            return module

        key = id(module)
        if key in self._shells:
            return self._shells[key]

        shell = self._shells[key] = shallow_copy(module)
        shell.__class__ = class_before_sharding(module)
        vars(shell).pop("_original_parameters", None)  # of DeepSpeed
        wrapped = wrapped_children(module)
        for name, child in module._modules.items():
            if child is not None and name not in wrapped:
                # FSDP1 may have wrapped the child
                shell._modules[name] = self.shell(unwrap(child)[0])

        # FSDP1 registers the parameters of the live module again when it gathers them
        parameters = vars(shell)["_parameters"]
        for name, parameter in [*parameters.items()]:
            index = self._number_of_adapter.get(id(parameter))
            if index is not None:
                # FSDP1 tells the shape when the whole is there
                shape = self._tensors[index].shape or self._read(index).shape
                read = functools.partial(self._read, index)
                parameters[name] = LazyTensor(shape, parameter.dtype, read)

        return shell

    def _read(self, index: int) -> Tensor:
        """Return the whole of a parameter, on rank 0, which lets the others gather it too."""
        with self._together(self._tensors[index].fqn):
            _from_rank_0(index)
            return self._gather(index)  # type: ignore[no-any-return]

    def _add(self, tensor: NamedTensor, shape: torch.Size | None) -> int:
        """Add a parameter to those that can be gathered, and return its number.

        Its shape is the one given where it has none.
        """
        parameter, owner = tensor.parameter, tensor.module
        shape = whole_shape(parameter) or shape
        unit = None
        if is_flattened(parameter):
            if id(owner) not in self._units:  # they are looked up once
                outermost, units = _fsdp1_units(owner)
                self._outermost.append(outermost)
                self._units |= units
            unit = self._units[id(owner)]

        self._tensors.append(Shard(tensor.fqn, shape, parameter, unit))
        return len(self._tensors) - 1

    def _gather(self, index: int) -> Any:
        """Return the whole of a parameter, in memory of its own; all ranks call it."""
        one = self._tensors[index]
        if one.unit is not None:
            self._open(one.unit)
            if one.shape not in (None, one.parameter.shape):
                raise ExportError(
                    f"{one.fqn} was resized since the model was prepared", fqn=one.fqn
                )
            return one.parameter.detach().clone()

        if is_partition(one.parameter):
            zero: Any = sys.modules["deepspeed"].zero
            with zero.GatheredParameters([one.parameter]):
                # DeepSpeed then gives the parameter other memory: this tensor keeps the
                # gathered one
                return one.parameter.detach().as_subclass(Tensor)

        tensor = one.parameter.detach()
        device_type = tensor.device_mesh.device_type
        is_offloaded = tensor.device.type != device_type
        if is_offloaded:  # the ranks communicate on the device
            tensor = tensor.to(device_type)
        return tensor.full_tensor()

    def _open(self, unit: nn.Module | None) -> None:
        """Make a unit of FSDP1 whole, and shard the one that was; all ranks call it."""
        while unit is not None and self._outermost:
            # FSDP1, before it has run, takes the first unit that is made whole for its root
            with _whole_unit(self._outermost.pop()):
                pass

        if unit is self._unit:
            return

        self._whole.close()
        self._unit = unit
        if unit is not None:
            self._whole.enter_context(_whole_unit(unit))

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Raise this operation's error where the ranks do not reach one another."""
        try:
            yield
        except KbitWrapError:
            raise
        except Exception as error:
            raise self._error(
                f"{what} could not be gathered while all ranks {self._verb} together: "
                f"{error}"
            ) from error

    def _lazy_original(
        self,
        tensor: NamedTensor,
        was: ParameterRecord,
        held: OriginalSlot | None,
        original: Original,
    ) -> LazyTensor:
        """Promise a parameter's whole original, to be computed inside `lead`.

        `ExportError` is raised where it is lost.
        """
        parameter = tensor.parameter
        quantized_class = was.quantized_class
        if (
            quantized_class is not None
            and was.quant_state is None
            and lacks_scales(tensor.module, parameter)
        ):
            raise ExportError(
                f"{tensor.fqn}: sharding removed the scales of this "
                f"{quantized_class.__name__}; shard with fully_shard(..., "
                f"ignored_params={{every Int8Params}}), or export before sharding",
                fqn=tensor.fqn,
            )
        cast_slot = None
        if isinstance(held, ParameterStorage) and held.stores_other(parameter):
            cast_slot = held
        shape = held.shape if isinstance(held, RuntimeState) else was.shape
        index = self._add(tensor, shape)

        def read() -> Tensor:
            """Read the whole; a frozen one must hold what was recorded, a trained one is noted."""
            value = self._read(index)
            if cast_slot is not None:
                value = cast_slot.original_of(value)
            if original.differs(was, value):
                if not parameter.requires_grad:
                    raise self._error(drift_message(tensor.fqn), fqn=tensor.fqn)
                self.trained.append(tensor.fqn)
            return value

        dtype = parameter.dtype if cast_slot is None else cast_slot.dtype
        whole = self._tensors[index].shape or shape
        promised = _lazy_class(was.quantized_class)(whole, dtype, read)
        if was.quant_state is not None:
            state = was.quant_state()
            if isinstance(held, RuntimeState):
                state = held.original_quant_state(parameter)
            vars(promised)["quant_state"] = state
        elif was.quantized_class is not None:
            vars(promised)["SCB"] = getattr(parameter, "SCB", None)

        return promised

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Run the body on every rank, and raise on all of them if it fails on one.

        They raise too if they promise different tensors.
        """
        if not self.is_sharded:
            yield
            return

        failure = None
        try:
            yield
        except Exception as error:
            failure = error

        tensors = [
            (one.fqn, one.shape and tuple(one.shape), str(one.parameter.dtype))
            for one in self._tensors
        ]
        found: list[Any] = [None] * distributed.get_world_size()
        message = None if failure is None else str(failure)
        distributed.all_gather_object(found, (message, tensors))
        if failure is not None:
            raise failure

        for rank, (message, others) in enumerate(found):
            if message is not None:
                raise self._error(f"rank {rank} cannot {self._verb}: {message}")
            if others != tensors:
                raise self._error(
                    f"rank {rank} holds different sharded parameters than rank "
                    f"{distributed.get_rank()}: expected the same model on every rank, "
                    "prepared and sharded in the same way"
                )

    # What rank 0 does, and what the others do meanwhile. Rank 0 tells them one thing
    # after the other: the number of a tensor, which all ranks then gather; and at the
    # end ``None``, or the class and the words of the error that ended it.

    def lead(self, read: Callable[[], T]) -> T:
        """Call ``read`` on rank 0 while all other ranks help to gather.

        Every rank returns, or raises, what it did.
        """
        if not self.is_sharded:
            return read()

        def once() -> Iterator[T]:
            yield read()

        # rank 0 has the result; the others have none, and receive it
        results = [*self.lead_each(once())]
        return _from_rank_0(results[0] if results else None)  # type: ignore[no-any-return]

    def lead_each(self, values: Iterator[T]) -> Iterator[T]:
        """Hand out ``values`` on rank 0 while all other ranks help to gather.

        On those nothing is handed out; the iterator ends, or raises, when that of rank 0 does.
        """
        if not self.is_sharded:
            yield from values
            return

        if distributed.get_rank():
            self._follow()
            return

        failure = None
        try:
            yield from values
        except GeneratorExit:  # the caller asks for no more
            raise
        except BaseException as error:
            kind = ConfigError if isinstance(error, ConfigError) else self._error
            failure = kind, str(error) or type(error).__name__
            raise
        finally:
            # After a failure a rank may be gone, and these calls fail too: the first
            # failure is the one that is raised.
            ignored = () if failure is None else (RuntimeError,)
            with contextlib.suppress(*ignored):
                _from_rank_0(failure)
            with contextlib.suppress(*ignored):
                self._open(None)

    def _follow(self) -> None:
        """Gather each tensor whose number rank 0 tells, and raise the error that ended it there."""
        with self._together("what rank 0 announces"):
            told = _from_rank_0(None)
            while isinstance(told, int):
                self._gather(told)
                told = _from_rank_0(None)
            self._open(None)
        if told is not None:
            error, words = told
            raise error(f"rank 0 could not {self._verb}: {words}")


@functools.cache
def _lazy_class(quantized_class: type[Tensor] | None) -> type[LazyTensor]:
    """Lazy tensors that are instances of a quantized class too.

    By that class transformers counts parameters.
    """
    if quantized_class is None:
        return LazyTensor
    return type(f"Lazy{quantized_class.__name__}", (LazyTensor, quantized_class), {})


def _from_rank_0(message: Any) -> Any:
    """Return, on every rank, the message that rank 0 passes.

    What the others pass is ignored.
    """
    messages = [message]
    distributed.broadcast_object_list(messages, src=0)
    return messages[0]


def _whole_unit(unit: Any) -> Any:
    """Return a context in which the parameters of an FSDP1 wrapper are whole.

    Those of wrappers inside stay sharded.
    """
    return type(unit).summon_full_params(unit, recurse=False, writeback=False)


def _fsdp1_units(inside: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Return the outermost FSDP1 wrapper around a module, and the innermost of each module inside.

    The innermost are by the ``id`` of the module that they are around.
    """
    fsdp1: Any = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    around = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), fsdp1) and inside in {*found.modules()}
    ]
    if not around:
        raise ExportError(
            f"the FSDP1 wrapper around {type(inside).__name__} is gone, and with it "
            "what gathers its weights"
        )

    outermost = max(around, key=lambda wrapper: len([*wrapper.modules()]))
    units: dict[int, nn.Module] = {}
    # A wrapper comes before those inside it, so that the innermost one around a module
    # is the last.
    for unit in outermost.modules():
        if isinstance(unit, fsdp1):
            units |= {id(module): unit for module in unit.modules()}

    return outermost, units
