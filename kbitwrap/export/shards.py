"""Parameters of which each rank holds a part, and how all ranks make one of them whole.

The engines are FSDP2, FSDP1 and ZeRO-3. Whatever reads a sharded parameter reads it
here.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..model.tree import NamedTensor
from ..model.wrappers import is_flattened, is_partition, loaded_class, whole_shape


@dataclass(frozen=True)
class Shard:
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
    unit: nn.Module | None = None


class Shards:
    """The shards of one operation, made whole one at a time.

    What FSDP1 wraps together is whole until another unit is, or until ``close``.
    """

    def __init__(self) -> None:
        self._units: dict[int, nn.Module] = {}  # of FSDP1
        self._outermost: list[nn.Module] = []
        self._unit: nn.Module | None = None  # the one that is whole
        self._whole = contextlib.ExitStack()

    def of(self, tensor: NamedTensor, shape: torch.Size | None = None) -> Shard:
        """The shard of a parameter, whose shape is the one given where it has none.

        The units of FSDP1 around it are looked up once.
        """
        parameter, owner = tensor.parameter, tensor.module
        shape = whole_shape(parameter) or shape
        if not is_flattened(parameter):
            return Shard(tensor.fqn, shape, parameter)

        if id(owner) not in self._units:
            outermost, units = _fsdp1_units(owner)
            self._outermost.append(outermost)
            self._units |= units

        return Shard(tensor.fqn, shape, parameter, self._units[id(owner)])

    def gather(self, shard: Shard) -> Tensor:
        """The whole of a parameter, in memory of its own; all ranks call it."""
        if shard.unit is not None:
            return self._flattened(shard)

        if is_partition(shard.parameter):
            return _partitioned(shard.parameter)

        tensor = shard.parameter.detach()
        # offloaded: gathered where the ranks communicate
        if tensor.device.type != tensor.device_mesh.device_type:
            tensor = tensor.to(tensor.device_mesh.device_type)

        gathered: Tensor = tensor.full_tensor()
        return gathered

    def close(self) -> None:
        """Shard again what is whole; all ranks call it."""
        self._open(None)

    def _flattened(self, shard: Shard) -> Tensor:
        """A parameter that FSDP1 laid out flat."""
        self._open(shard.unit)
        parameter = shard.parameter
        if shard.shape not in (None, parameter.shape):
            raise ExportError(
                f"{shard.fqn} was resized since the model was prepared", fqn=shard.fqn
            )
        return parameter.detach().clone()  # type: ignore[no-any-return]

    def _open(self, unit: nn.Module | None) -> None:
        """Make a unit of FSDP1 whole, and shard the one that was whole."""
        while unit is not None and self._outermost:
            # before it has run, FSDP1 takes what is whole first for the root
            with _whole_unit(self._outermost.pop()):
                pass

        if unit is self._unit:
            return

        self._whole.close()
        self._unit = unit
        if unit is not None:
            self._whole.enter_context(_whole_unit(unit))


def _partitioned(parameter: Any) -> Tensor:
    """A parameter that ZeRO-3 partitioned."""
    zero: Any = sys.modules["deepspeed"].zero
    with zero.GatheredParameters([parameter]):
        # the partition gets other memory, and leaves this to whoever holds it
        gathered: Tensor = parameter.detach().as_subclass(torch.Tensor)

    return gathered


def _whole_unit(unit: Any) -> Any:
    """A context in which the parameters of an FSDP1 wrapper are whole.

    Those of wrappers inside stay sharded.
    """
    return type(unit).summon_full_params(unit, recurse=False, writeback=False)


def _fsdp1_units(inside: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """FSDP1's outermost wrapper around a module, and the innermost of each in it.

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
