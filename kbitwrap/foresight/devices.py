"""A step on several devices: what DistributedDataParallel and FSDP2 add to each, and what they shard."""

from __future__ import annotations

import dataclasses

from ..errors import ConfigError
from .ledger import (
    ADAPTERS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    WEIGHTS,
    Sizes,
)
from .trace import Step
from .unknown import Unknown

DDP, FSDP2 = "ddp", "fsdp2"
_REFUSED = {
    "fsdp1": "its flat parameters are laid out by wrappers that only the script knows; 'fsdp2' shards the same",
    "zero2": "DeepSpeed's buckets and partitions are settings of its own config; 'ddp' holds what is not partitioned",
    "zero3": "DeepSpeed gathers by thresholds of its own config; 'fsdp2' shards the same",
}


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
        if self.engine is None:
            return step
        static = None  # nobody knows in which order shards are gathered and freed
        if self.engine == DDP and step.static is not None:
            static = [*step.static, _trained_bytes(step)]
        levels = {}
        for phase, level in step.levels.items():
            changed = self._level(step, Sizes(level), phase)
            levels[phase] = {kind: size for kind, size in changed.items() if size}
        held = self._level(step, step.held, None)
        return dataclasses.replace(step, held=held, levels=levels, static=static)

    def _level(self, step: Step, level: Sizes, phase: str | None) -> Sizes:
        """Return what each device holds where one alone holds a level, in a phase or before the step (``None``)."""
        if self.engine == DDP:
            # in buckets, each with less than 512 bytes more on CUDA
            return level + Sizes({GRADIENTS: _trained_bytes(step)})
        kinds = [WEIGHTS, ADAPTERS, OPTIMIZER]
        if phase == OPTIMIZER_STEP:
            kinds.append(GRADIENTS)
        sharded = level.copy()
        for kind in kinds:
            sharded[kind] -= self._elsewhere(level[kind])
        # In both passes the root and one unit are gathered, and gradients are whole.
        if phase in (FORWARD, BACKWARD):
            largest = _largest_unit(step)
            for kind in (WEIGHTS, ADAPTERS):
                sharded[kind] += step.root[kind] + largest[kind]
        return sharded

    def unknown(self, step: Step) -> tuple[Unknown, ...]:
        """Return the bytes that a library does not promise of a step on several devices.

        Args:
            step: The step on one device.
        """
        if self.engine != FSDP2:
            return ()
        unit = _largest_unit(step)
        gathered = unit[WEIGHTS] + unit[ADAPTERS]
        trained = _trained_bytes(step)
        reduced = -(-trained // max(1, len(step.units)))
        what = (
            "the next unit that FSDP2 gathers ahead, and the buffers of units that are gathered or reduced; "
            "less the gradients that are reduced before others are made"
        )
        most = 3 * gathered + 4 * reduced
        return (Unknown(what, -self._elsewhere(trained), most),)

    def _elsewhere(self, size: int) -> int:
        """Return the bytes of sharded tensors that lie on other devices."""
        return size - -(-size // self.num_devices)


def _trained_bytes(step: Step) -> int:
    """Return the bytes of the gradients of a step."""
    sizes = [shape.size.numel() * shape.dtype.itemsize for shape in step.trained]
    return sum(sizes)


def _largest_unit(step: Step) -> Sizes:
    """Return the bytes of the largest block; 0 where all lies in the root."""
    return max(
        step.units, key=lambda unit: unit[WEIGHTS] + unit[ADAPTERS], default=Sizes()
    )
