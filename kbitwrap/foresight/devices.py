"""A step on several devices: what DistributedDataParallel and FSDP2 add to each, and what they shard."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..errors import ConfigError
from .cuda import ALLOCATION_BYTES
from .ledger import (
    ADAPTERS,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    WEIGHTS,
    Sizes,
    rounded_up,
)
from .trace import Step
from .unknown import Unknown

DDP, FSDP2 = "ddp", "fsdp2"
_REFUSED = {
    "fsdp1": "its flat parameters are laid out by wrappers that only the script knows; 'fsdp2' shards the same",
    "zero2": "DeepSpeed's buckets and partitions are settings of its own config; 'ddp' holds what is not partitioned",
    "zero3": "DeepSpeed gathers by thresholds of its own config; 'fsdp2' shards the same",
}
_SHARDED = (WEIGHTS, ADAPTERS, OPTIMIZER)


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a step, which all do the same.

    Attributes:
        engine: ``"ddp"`` or ``"fsdp2"``; ``None`` on one device.
        num_devices: How many they are.
    """

    engine: str | None
    num_devices: int

    def __post_init__(self) -> None:
        number = self.num_devices
        if self.engine in _REFUSED:
            raise ConfigError(
                f"engine: {self.engine!r} is not predicted: {_REFUSED[self.engine]}"
            )
        if self.engine not in (None, DDP, FSDP2):
            raise ConfigError(
                f"engine: expected 'ddp' or 'fsdp2', found {self.engine!r}"
            )
        if type(number) is not int or number < 1:
            raise ConfigError(
                f"num_devices: expected a positive number, found {number!r}"
            )
        if (self.engine is None) != (number == 1):
            raise ConfigError(
                f"num_devices: expected 1 without an engine and more with one, found {number} with {self.engine!r}"
            )

    def on_each(self, step: Step) -> Step:
        """Return the step on each device, from that of one device alone.

        Args:
            step: The step on one device.

        Returns:
            The step with what the engine holds, and without what lies on others.
        """
        if self.engine == DDP:
            # in buckets, each with less than 512 bytes more on CUDA
            buckets = Sizes({GRADIENTS: _trained_bytes(step)})
            return _changed(step, lambda level, _: level + buckets)
        if self.engine == FSDP2:
            return _changed(
                step, lambda level, phase: self._sharded(step, level, phase)
            )
        return step

    def unknown(self, step: Step) -> tuple[Unknown, ...]:
        """Return the bytes that a library does not promise of a step on several devices.

        Args:
            step: The step on one device.
        """
        if self.engine == DDP:
            maps = rounded_up(4 * len(step.trained), ALLOCATION_BYTES)
            return (
                Unknown(
                    "DDP's map of unused parameters, with find_unused_parameters",
                    0,
                    maps,
                ),
            )
        if self.engine != FSDP2:
            return ()
        unit = _largest_unit(step)
        gathered = unit[WEIGHTS] + unit[ADAPTERS]
        trained = _trained_bytes(step)
        num_units = max(1, len(step.units))
        return (
            Unknown(
                "the next unit that FSDP2 gathers ahead, and the buffers that both come in",
                0,
                3 * gathered,
            ),
            Unknown(
                "gradients that FSDP2 has reduced to shards before others are made",
                -self._elsewhere(trained),
                0,
            ),
            Unknown(
                "the buffers in which FSDP2 reduces the gradients of two units",
                0,
                4 * -(-trained // num_units),
            ),
        )

    def _elsewhere(self, size: int) -> int:
        """Return the bytes of sharded tensors that lie on other devices."""
        return size - -(-size // self.num_devices)

    def _sharded(self, step: Step, level: Sizes, phase: str | None) -> Sizes:
        """Return a level with shards in place of what is sharded.

        In both passes the root and one unit are gathered; gradients are whole until
        they are reduced.
        """
        sharded = level.copy()
        for kind in _SHARDED:
            sharded[kind] -= self._elsewhere(level[kind])
        if phase is None:
            return sharded
        if phase == OPTIMIZER_STEP:
            sharded[GRADIENTS] -= self._elsewhere(level[GRADIENTS])
            return sharded
        largest = _largest_unit(step)
        for kind in (WEIGHTS, ADAPTERS):
            sharded[kind] += step.root[kind] + largest[kind]
        return sharded


def _changed(step: Step, change: Any) -> Step:
    """Return a step whose levels are changed.

    Args:
        step: The step.
        change: Makes another level of one, and of its phase; that is ``None`` before the
            step.

    Returns:
        The other step.
    """
    levels = {}
    for phase, level in step.levels.items():
        changed = change(Sizes(level), phase)
        levels[phase] = {kind: size for kind, size in changed.items() if size}
    return dataclasses.replace(step, held=change(step.held, None), levels=levels)


def _trained_bytes(step: Step) -> int:
    """Return the bytes of the gradients of a step."""
    sizes = [shape.size.numel() * shape.dtype.itemsize for shape in step.trained]
    return sum(sizes)


def _largest_unit(step: Step) -> Sizes:
    """Return the bytes of the largest block; 0 where all lies in the root."""
    return max(
        step.units, key=lambda unit: unit[WEIGHTS] + unit[ADAPTERS], default=Sizes()
    )
