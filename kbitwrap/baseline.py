"""What a preparation found and left, beside what its journal says; for the record that is made later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .checkpointing import input_gradient_hooks
from .digest import content_digest, is_dense
from .edits import FlagsChange
from .journal import Change, Journal
from .topology import named_modules, named_tensors, only_reading, owners
from .twin import Origin, peel, peeled_modules
from .verification import PreparedState


@dataclass(frozen=True)
class Moment:
    """Hooks, flags, modes and memory of a model at one moment, read as fast as a preparation can afford.

    Attributes:
        state: As ``StateRecord``.
        memory: As ``MemoryRecord``.
    """

    state: dict[str, Any]
    memory: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module) -> Moment:
        """Read a model as it is now.

        Args:
            model: The model.

        Returns:
            Its state and memory.
        """
        with only_reading():
            return cls(cls._state(model), cls._memory(model))

    @staticmethod
    def _state(model: nn.Module) -> dict[str, Any]:
        modules: dict[nn.Module, str] = {}
        for fqn, module in peeled_modules(model):
            modules.setdefault(module, fqn)
        hooked = [(fqn, module) for module, fqn in modules.items() if module._forward_hooks]
        use_cache = getattr(getattr(model, "config", None), "use_cache", None)
        return {
            "input_gradient_hooks": {fqn: len(keys) for fqn, m in hooked if (keys := input_gradient_hooks(m))},
            "checkpointing": [fqn for m, fqn in modules.items() if vars(m).get("gradient_checkpointing") is True],
            "use_cache": use_cache if isinstance(use_cache, bool) else None,
            "num_modules": len(modules),
            "num_training": sum([module.training for module in modules]),
        }

    @staticmethod
    def _memory(model: nn.Module) -> dict[str, Any]:
        parameters = [tensor.parameter for tensor in named_tensors(model)]
        storages = [parameter.untyped_storage() for parameter in parameters]
        devices = {parameter.device for parameter in parameters if parameter.is_cuda}
        return {
            "parameter_bytes": sum({storage._cdata: storage.nbytes() for storage in storages}.values()),
            "allocated_bytes": sum(map(torch.cuda.memory_allocated, devices)) if devices else None,
            "reserved_bytes": sum(map(torch.cuda.memory_reserved, devices)) if devices else None,
        }


Buffer = tuple[torch.dtype, torch.Size, int]
"""Dtype, shape and digest."""


def _nothing() -> None:
    return None


class Baseline:
    """What a preparation found and left, as far as the journal does not say it; found again by the model.

    One without a preparation says of everything that it is as it was.

    Attributes:
        before: The model at the start of the preparation; ``None`` without one.
        after: The model at its end.
        origin: What was recorded of the base's configs and of its tensors' places.
    """

    def __init__(self) -> None:
        self.before: Moment | None = None
        self.after: Moment | None = None
        self.origin: Origin | None = None
        self._model: Callable[[], nn.Module | None] = _nothing
        self._journal: Callable[[], Journal | None] = _nothing
        self._prepared: PreparedState | None = None
        self._buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, Buffer]] = weakref.WeakKeyDictionary()

    @classmethod
    def of(cls, model: nn.Module, journal: Journal) -> Baseline:
        """Begin the record of a preparation.

        Args:
            model: The model, before anything is changed.
            journal: The journal, which will say the rest.

        Returns:
            The baseline; ``settle`` completes it.
        """
        baseline = cls()
        baseline._model, baseline._journal = weakref.ref(model), weakref.ref(journal)
        baseline.before = Moment.of(model)
        # Training writes buffers, such as the statistics of a batch norm, and no record of the base is to change with
        # them. They are small.
        for _, module in named_modules(model):
            if module._buffers:
                baseline._buffers[module] = {
                    name: (buffer.dtype, buffer.shape, content_digest(buffer))
                    for name, buffer in module._buffers.items()
                    if buffer is not None and name not in module._non_persistent_buffers_set and is_dense(buffer)
                }
        return baseline

    def settle(self, model: nn.Module, origin: Origin | None, prepared: PreparedState) -> None:
        """Record what preparation left, and be found from here on.

        Args:
            model: The prepared model.
            origin: What was recorded of its configs and its tensors' places.
            prepared: The state of its parameters.
        """
        self.origin = origin
        self.after = Moment.of(model)
        self._prepared = prepared
        _baselines.add(self)

    def origin_of(self, model: nn.Module) -> Origin | None:
        """The origin where a model is the one prepared, with adapters or without; ``None`` of a part or a container."""
        prepared = self._model()
        return self.origin if prepared is not None and peel(prepared)[0] is peel(model)[0] else None

    def changes(self) -> Sequence[Change]:
        """What the journal holds, oldest first; nothing once all is undone."""
        journal = self._journal()
        return () if journal is None else tuple(journal.changes)

    def prepared(self, parameter: torch.Tensor) -> tuple[torch.dtype, bool] | None:
        """The dtype and ``requires_grad`` that preparation left a parameter with; ``None`` where it did not see it."""
        found = None if self._prepared is None else self._prepared.of(parameter)
        return None if found is None else (found["dtype"], found["requires_grad"])

    def buffer(self, module: nn.Module, name: str) -> Buffer | None:
        """What a persistent buffer was at the start: dtype, shape and digest; ``None`` where it was not there."""
        return self._buffers.get(module, {}).get(name)

    def original_flags(self) -> dict[int, bool]:
        """``requires_grad`` before preparation, by the ``id`` of the parameter."""
        flags: dict[int, bool] = {}
        for change in self.changes():
            if isinstance(change, FlagsChange):
                for reference, flag in change.flags:
                    flags.setdefault(id(reference()), flag)
        return flags

    @staticmethod
    def find(model: nn.Module) -> Baseline | None:
        """Find the preparation that holds a model or a part of it.

        Args:
            model: The model, whatever was wrapped around it since.

        Returns:
            Its baseline, or ``None``.
        """
        live = [baseline for baseline in _baselines if baseline.changes()]
        modules = owners(model) if live else set()
        for baseline in live:
            prepared = baseline._model()
            if prepared is not None and not modules.isdisjoint(owners(prepared)):
                return baseline
        return None


_baselines: weakref.WeakSet[Baseline] = weakref.WeakSet()
