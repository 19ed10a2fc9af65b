"""Counts the memory that a training step holds, by operation: each storage once, from its making to its end."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..model.checks import tree_of
from ..model.tree import ModelTree
from ..preparation.preparation import Preparation
from ..tensors.allocator import ALLOCATION_BYTES
from ..tensors.bits import parts_of
from .cuda import SCRATCH
from .fakes import asks_for_device, tensors_in
from .ledger import (
    ACTIVATIONS,
    ADAPTERS,
    BACKWARD,
    DEQUANTIZED,
    FORWARD,
    GRADIENTS,
    INPUTS,
    LOGITS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    STATISTICS,
    WEIGHTS,
    Ledger,
    Levels,
    Peaks,
    Storage,
    highest_levels,
)
from .quantization import DECOMPOSED, statistics_of

_BETWEEN = ""  # after an optimizer's step, where no phase has begun
_OF_WEIGHTS = {WEIGHTS, STATISTICS, ADAPTERS, DEQUANTIZED}


class Watch(TorchDispatchMode):
    """Writes down each storage that an operation makes, and when it is freed.

    The operations of tensor subclasses are seen as those of the tensors inside them.

    Args:
        vocabulary_size: The width of the model's logits.
        on_cuda: Count as the allocator of a CUDA device does, with what operations
            allocate inside themselves.
        device: The type of device whose tensors are counted; ``None`` for all of them.
    """

    def __init__(
        self,
        vocabulary_size: int = 0,
        on_cuda: bool = False,
        device: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger(ALLOCATION_BYTES if on_cuda else 1)
        self.phase = FORWARD
        self._turn = 0
        self._vocabulary_size = vocabulary_size
        self._scratch = SCRATCH if on_cuda else {}
        self._device = device
        self._live: dict[int, tuple[Storage, Any]] = {}

    def hold(self, tensor: Tensor, kind: str, part: Hashable = None) -> None:
        """Count a tensor that is there before the step.

        Args:
            tensor: The tensor; one of a subclass is counted by the tensors inside it.
            kind: One of ``KINDS``, where it was not counted before.
            part: The part of the model that holds it, if one does.
        """
        for plain in parts_of(tensor):
            if self._device in (None, plain.device.type):
                storage = self._known(plain) or self._add(plain, kind)
                self.ledger.hold(storage, part)

    def _known(self, tensor: Tensor) -> Storage | None:
        found = self._live.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[0]

    def _add(self, tensor: Tensor, kind: str) -> Storage:
        memory = tensor.untyped_storage()
        key = memory._cdata
        storage = self.ledger.made(memory.nbytes(), kind)

        def free(_: Any) -> None:
            del self._live[key]
            self.ledger.freed(storage)

        self._live[key] = storage, weakref.ref(memory, free)
        return storage

    def close(self) -> Ledger:
        """Stop writing down what is freed, and return what was written."""
        self._live.clear()
        return self.ledger

    def follow_phase(self, *, is_made: bool = False) -> None:
        """Note the phase that the step is in: autograd says when it runs.

        The next forward pass begins when a tensor is made that gradients may flow
        through. Reading a loss, clipping gradients and setting them to zero make none:
        the phase stays the one before.
        """
        if self.phase == OPTIMIZER_STEP:
            return
        phase = self.phase
        if torch._C._current_graph_task_id() != -1:
            phase = BACKWARD
        elif is_made and torch.is_grad_enabled():
            phase = FORWARD
        if phase != self.phase or not self.ledger.spans:
            self.enter(phase)

    def enter(self, phase: str, part: Hashable = None) -> None:
        """Begin a phase, or a part of the model in it."""
        self.phase = phase
        self.ledger.mark(phase, part, self._turn)

    def enter_part(self, part: Hashable, is_first: bool, *_: Any) -> None:
        """Begin a part of the model, in the phase that the step is in.

        Args:
            part: The part.
            is_first: Whether a pass through a stack of parts begins with it.
        """
        self.follow_phase()
        if is_first and self.phase == FORWARD:
            self._turn += 1
        self.enter(self.phase, part)

    def _kind(self, arguments: Any, output: Tensor) -> str:
        """Return the kind of what an operation made; what weights alone give is a dequantized weight."""
        if self.phase == OPTIMIZER_STEP:
            return OPTIMIZER
        inputs = [self._known(tensor) for tensor in tensors_in(arguments)]
        kinds = {None if storage is None else storage.kind for storage in inputs}
        if kinds and kinds <= _OF_WEIGHTS:
            return DEQUANTIZED
        if output.ndim > 1 and output.shape[-1] == self._vocabulary_size:
            return LOGITS
        # Autograd computes with gradients switched off; a checkpoint that runs again
        # switches them on.
        if self.phase == FORWARD or torch.is_grad_enabled():
            return ACTIVATIONS
        return GRADIENTS

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, and count what it makes."""
        if asks_for_device(func, args):
            return args[0].device
        if any(map(_has_own_operations, types)):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.name()
        # the function modes ran before this dispatch mode
        with torch._C.DisableTorchFunction():
            self.follow_phase()
            if name in DECOMPOSED:
                with self:
                    return DECOMPOSED[name](*args, **kwargs)
            output = func(*args, **kwargs)
            made = tensors_in(output)
            if name.startswith("bitsandbytes::quantize"):
                made.reverse()  # it makes the statistics first
            for tensor in made:
                is_counted = self._device in (None, tensor.device.type)
                if is_counted and self._known(tensor) is None:
                    self.follow_phase(is_made=True)
                    self._add(tensor, self._kind((args, kwargs), tensor))
            if name in self._scratch:
                sizes = self._scratch[name](*args, **kwargs)
                scratch = [self.ledger.made(size, ACTIVATIONS) for size in sizes]
                for storage in scratch:
                    self.ledger.freed(storage)
            return output


@functools.cache
def _has_own_operations(cls: Any) -> bool:
    """Return whether tensors of a class take operations apart themselves: those of torch and fake ones do not."""
    plain = Tensor.__torch_dispatch__
    return cls.__torch_dispatch__ is not plain and not issubclass(cls, FakeTensor)


def held_tensors(tree: ModelTree) -> Iterator[tuple[Tensor, str, nn.Module]]:
    """Yield the tensors that a model holds.

    Args:
        tree: The model.

    Yields:
        Each tensor with its kind and the module that it lies in; some more than once.
    """
    adapters = tree.adapter_ids
    for tensor in tree.all_tensors:
        is_adapter = id(tensor.parameter) in adapters
        yield tensor.parameter, ADAPTERS if is_adapter else WEIGHTS, tensor.module
    for node in tree.nodes:
        module = node.module
        for value in tensors_in(vars(module)):
            yield value, WEIGHTS, module
        for value in statistics_of(module):
            yield value, STATISTICS, module


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, on_cuda: bool = False
) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state on its device.

    Args:
        optimizer: The optimizer.
        on_cuda: Whether that is a CUDA device. Then torch counts steps on the host,
            unless the optimizer is fused, and some states lie in managed memory.

    Yields:
        The tensors.
    """
    is_paged = getattr(optimizer, "is_paged", False)
    for group in optimizer.param_groups:
        on_host = on_cuda and not (group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            if on_host:
                state.pop("step", None)
            # from so many elements on: get_state_buffer of bitsandbytes/optim/optimizer.py
            if on_cuda and is_paged and parameter.numel() >= 1e5:
                state.pop("state1", None)
                state.pop("state2", None)
            yield from tensors_in(state)


def begin_watch(
    tree: ModelTree,
    inputs: Any,
    on_cuda: bool,
    *,
    owners: Mapping[int, Hashable] | None = None,
    device: str | None = None,
) -> Watch:
    """Make a watch that counts what a model and its inputs hold.

    Args:
        tree: The model.
        inputs: The inputs, in a mapping or a sequence.
        on_cuda: As for ``Watch``, as is ``device``.
        owners: The parts of the model that modules lie in, by the ids of these.
        device: The type of device whose tensors are counted.

    Returns:
        The watch.
    """
    weight: Any = None
    model: Any = tree.model
    with contextlib.suppress(AttributeError, NotImplementedError):
        weight = model.get_output_embeddings().weight
    is_matrix = isinstance(weight, Tensor) and weight.ndim == 2
    watch = Watch(weight.shape[0] if is_matrix else 0, on_cuda, device)
    owners = owners or {}
    for tensor, kind, module in held_tensors(tree):
        watch.hold(tensor, kind, owners.get(id(module)))
    for tensor in tensors_in(inputs):
        watch.hold(tensor, INPUTS)
    return watch


class StepTracker(Peaks):
    """Counts the bytes that tensors hold during a real training step, on a CPU or on CUDA.

    Each storage counts once, from when an operation made it until it is freed;
    parameters, buffers, quantization statistics, the optimizer's state and the inputs
    count from the start. What an operation allocates inside itself and frees before it
    returns is not seen, with one exception: the weight that a 4-bit layer dequantizes,
    also where the layer's forward is one operation. On CUDA only what lies there
    counts, rounded up to the allocator's 512 bytes, with what attention's operations
    are known to make inside. ``kbitwrap.predict_step`` predicts the same figures; a
    step after the first one is what it predicts.

    Args:
        model: The model, prepared or not, with adapters or without.
        optimizer: The optimizer, whose ``step`` is the third phase.
        inputs: The tensors of the batch: a mapping or a sequence.

    Attributes:
        peak_bytes: The most bytes held at any moment.
        phases: The most bytes held in each phase: ``{"forward": ..., "backward": ...,
            "optimizer": ...}``, without those that did not run.
        by_kind: The bytes held at the peak, by kind.
        reserved_bytes: On CUDA the most bytes that torch's allocator had reserved by
            the end, whoever asked for them; else ``None``.
        static_bytes: The bytes held at the start.
        sample_bytes: The bytes of the samples that a preparation of the model keeps
            beside all of these.

    Raises:
        UnsupportedModelError: ``model`` is not a ``torch.nn.Module``.

    Example:
        >>> import torch
        >>> from kbitwrap import StepTracker
        >>> model, inputs = torch.nn.Linear(64, 64), torch.zeros(2, 64)
        >>> with StepTracker(model, inputs=[inputs]) as tracker:
        ...     model(inputs).sum().backward()
        >>> tracker.static_bytes == (64 * 64 + 64 + 2 * 64) * 4
        True
        >>> tracker.phases["backward"] > tracker.static_bytes
        True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        inputs: Any = None,
    ) -> None:
        tree_of(model)
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        self._levels: Levels | None = None
        self.static_bytes = 0
        self.sample_bytes = 0
        self.reserved_bytes: int | None = None

    def __enter__(self) -> StepTracker:
        on_cuda = any(parameter.is_cuda for parameter in self._model.parameters())
        device = "cuda" if on_cuda else None
        tree = tree_of(self._model)
        watch = begin_watch(tree, self._inputs, on_cuda, device=device)
        optimizer = self._optimizer
        self._stack = contextlib.ExitStack()
        if optimizer is not None:
            for tensor in optimizer_tensors(optimizer, on_cuda):
                watch.hold(tensor, OPTIMIZER)

            def begin(*_: Any) -> None:
                watch.enter(OPTIMIZER_STEP)

            def end(*_: Any) -> None:
                watch.phase = _BETWEEN

            self._stack.callback(optimizer.register_step_pre_hook(begin).remove)
            self._stack.callback(optimizer.register_step_post_hook(end).remove)
        self.static_bytes = watch.ledger.held().total()
        preparation = Preparation.find(tree)
        if preparation is not None:
            self.sample_bytes = preparation.plan.sample_bytes
        watch.follow_phase()
        self._ledger = watch.ledger
        self._stack.enter_context(watch)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()
        if self._ledger.rounding > 1:  # on CUDA
            self.reserved_bytes = torch.cuda.max_memory_reserved()
        self._levels = highest_levels(self._ledger.held(), self._ledger.spans)

    @property
    def levels(self) -> Levels:  # type: ignore[override]
        """The bytes by kind at the highest level of each phase."""
        if self._levels is None:
            raise RuntimeError(
                "nothing was tracked yet: run a step inside `with StepTracker(...) as tracker:` first"
            )
        return self._levels
