"""Sharded parameters (FSDP2), gathered one at a time by all ranks for rank 0 to write or to digest.

Rank 0 leads: it announces the next tensor, and every rank gathers that one. Whatever order rank 0 takes, and where it
fails, no rank is left waiting.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import distributed

from ..edits.base import HeldOriginal
from ..edits.storage import StorageChange
from ..edits.training import RuntimeChange
from ..errors import ConfigError, ExportError, ManifestError
from ..model.records import ParameterRecord
from ..model.tree import ModelTree
from ..model.wrappers import is_sharded_tensor
from ..preparation.original import Original
from ..tensors.lazy import LazyTensor

T = TypeVar("T")


def drift_of(fqn: str) -> str:
    """What is said of a frozen parameter that holds other values than were recorded."""
    return (
        f"{fqn} holds other values than when the model was prepared, although it is frozen (a merge that was taken "
        "back is rounded; PiSSA and OLoRA leave a residual), so the exact base is not there any more; export "
        "before that, or load the base again"
    )


class Gathering:
    """The sharded parameters of one export or manifest, the same on every rank and in the same order.

    Args:
        verb: What the ranks do together.
        error: The class of what is raised on the others when one rank fails.
    """

    def __init__(self, verb: str, error: type[ExportError] | type[ManifestError]) -> None:
        self._verb = verb
        self._error = error
        self.trained: list[str] = []  # the trainable ones that held other values than recorded when they were read
        self._tensors: list[tuple[str, Any]] = []
        self._is_led = False

    @classmethod
    def of(cls, tree: ModelTree, verb: str, error: type[ExportError] | type[ManifestError]) -> Gathering | None:
        """A gathering for a model; ``None`` where nothing is sharded."""
        return cls(verb, error) if any(is_sharded_tensor(tensor.parameter) for tensor in tree.tensors) else None

    def promise(
        self, fqn: str, parameter: torch.Tensor, was: ParameterRecord, held: HeldOriginal | None, original: Original
    ) -> LazyTensor:
        """Promise a parameter's whole original, to be computed inside `lead`; raise `ExportError` where it is lost."""
        if was.quantized_class is not None and was.quant_state is None:
            raise ExportError(
                f"{fqn}: sharding took the scales off this {was.quantized_class.__name__}; shard with "
                "fully_shard(..., ignored_params={every Int8Params}), or export before sharding",
                fqn=fqn,
            )
        index = len(self._tensors)
        self._tensors.append((fqn, parameter))
        stored = held if isinstance(held, StorageChange) and held.converts(parameter) else None

        def compute() -> torch.Tensor:
            if not self._is_led:
                raise RuntimeError(f"{fqn} is sharded: its values are there only while all ranks write together")
            _tell(index)
            gathered = self._gather(index)
            value = gathered if stored is None else stored.original_of(gathered)
            if original.differs(was, value):
                if not parameter.requires_grad:
                    raise self._error(drift_of(fqn), fqn=fqn)
                self.trained.append(fqn)
            return value

        dtype = parameter.dtype if stored is None else stored.dtype
        promised = _lazy_class(was.quantized_class)(parameter.shape, dtype, compute)
        if was.quant_state is not None:
            kept = held.original_quant_state(parameter) if isinstance(held, RuntimeChange) else was.quant_state()
            vars(promised)["quant_state"] = kept
        return promised

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Run the body on every rank; raise on all of them if it fails on one, or ranks promise different tensors."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        tensors = [(fqn, tuple(tensor.shape), str(tensor.dtype)) for fqn, tensor in self._tensors]
        found: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(found, (None if error is None else str(error), tensors))
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame
        for rank, (message, others) in enumerate(found):
            if message is not None:
                raise self._error(f"rank {rank} cannot {self._verb}: {message}")
            if others != tensors:
                raise self._error(
                    f"rank {rank} holds other sharded parameters than rank {distributed.get_rank()}: expected the same "
                    "model on every rank, prepared and sharded in the same way"
                )

    def lead(self, read: Callable[[], T]) -> T:
        """Call ``read`` on rank 0 while all other ranks help to gather; every rank returns, or raises, what it did."""
        if distributed.get_rank() != 0:
            return self._follow()  # type: ignore[no-any-return]
        self._is_led = True
        try:
            result = read()
        except BaseException as error:
            _tell((ConfigError if isinstance(error, ConfigError) else self._error, str(error) or type(error).__name__))
            raise
        finally:
            self._is_led = False
        _tell((None, result))
        return result

    def _follow(self) -> Any:
        while isinstance(message := _tell(None), int):
            self._gather(message)
        error, result = message
        if error is not None:
            raise error(f"rank 0 could not {self._verb}: {result}")
        return result

    def _gather(self, index: int) -> torch.Tensor:
        tensor = self._tensors[index][1].detach()
        if tensor.device.type != tensor.device_mesh.device_type:  # offloaded: gathered where the ranks communicate
            tensor = tensor.to(tensor.device_mesh.device_type)
        gathered: torch.Tensor = tensor.full_tensor()
        return gathered


@functools.cache
def _lazy_class(quantized_class: type[torch.Tensor] | None) -> type[LazyTensor]:
    """Lazy tensors that are instances of a quantized class too, by which transformers counts parameters."""
    if quantized_class is None:
        return LazyTensor
    return type(f"Lazy{quantized_class.__name__}", (LazyTensor, quantized_class), {})


def _tell(message: Any) -> Any:
    """Send a message from rank 0 to all ranks, and return it there; what the others pass is ignored."""
    messages = [message]
    distributed.broadcast_object_list(messages, src=0)
    return messages[0]
