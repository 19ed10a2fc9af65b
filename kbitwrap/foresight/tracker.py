"""Counts the memory that a training step holds, by operation: each storage once, from its making to its end."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedModelError
from ..model.checks import tree_of
from ..model.tree import ModelTree
from ..preparation.preparation import Preparation
from ..tensors.bits import parts_of
from .cuda import ALLOCATION_BYTES, SCRATCH
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
    Peaks,
)
from .quantization import DECOMPOSED, is_managed, statistics_of

_BETWEEN = ""  # after an optimizer's step, where no phase has begun
_OF_WEIGHTS = {WEIGHTS, STATISTICS, ADAPTERS, DEQUANTIZED}


class Watch(TorchDispatchMode):
    """Writes down each storage that an operation makes, and when it is freed; ``rounding`` is an allocator's, in bytes.

    The operations of tensor subclasses are seen as those of the tensors inside them.
    ``scratch`` says, by operation, what it allocates inside itself. Given a ``device``,
    only what lies there is counted.
    """

    def __init__(
        self,
        vocabulary_size: int = 0,
        rounding: int = 1,
        scratch: Mapping[str, Callable[..., list[int]]] | None = None,
        device: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.phase = FORWARD
        self._vocabulary_size = vocabulary_size
        self._rounding = rounding
        self._scratch = scratch or {}
        self._device = device
        self._live: dict[int, tuple[int, Any]] = {}

    def hold(self, tensor: torch.Tensor, kind: str) -> list[int]:
        """Count a tensor that is there before the step; returns the numbers of its storages."""
        found = [
            part
            for part in parts_of(tensor)
            if self._device in (None, part.device.type)
        ]
        return [self._count(part, lambda: kind) for part in found]

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._rounding) * self._rounding

    def _count(self, tensor: torch.Tensor, kind: Callable[[], str]) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            if self.ledger.marks:
                self.follow_phase(is_made=True)
            number = self.ledger.made(self._rounded(storage.nbytes()), kind())
            self._live[key] = (
                number,
                weakref.ref(storage, functools.partial(self._freed, key, number)),
            )
        return self._live[key][0]

    def _freed(self, key: int, number: int, _: Any) -> None:
        del self._live[key]
        self.ledger.freed(number)

    def close(self) -> Ledger:
        """Stop writing down what is freed, and return what was written."""
        self._live.clear()
        return self.ledger

    def size(self, tensor: torch.Tensor) -> int:
        """The bytes counted for the storages of a tensor; 0 where it is not counted."""
        found = [
            self._live.get(part.untyped_storage()._cdata) for part in parts_of(tensor)
        ]
        return sum(self.ledger.sizes[one[0]] for one in found if one is not None)

    def follow_phase(self, *, is_made: bool = False) -> None:
        """Note the phase that the step is in: autograd says when it runs.

        The next forward pass begins when a tensor is made that gradients may flow
        through. Reading a loss, clipping gradients and setting them to zero make none:
        the phase stays the one before.
        """
        if self.phase == OPTIMIZER_STEP:
            return
        if torch._C._current_graph_task_id() != -1:
            phase = BACKWARD
        else:
            phase = FORWARD if is_made and torch.is_grad_enabled() else self.phase
        if phase != self.phase or not self.ledger.marks:
            self.enter(phase)

    def leave_optimizer(self) -> None:
        """End an optimizer's step; the next phase begins with what is made in it."""
        self.phase = _BETWEEN

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.ledger.mark(phase, None)

    def enter_part(self, part: Hashable) -> None:
        """Begin a part of the model, in the phase that the step is in."""
        self.follow_phase()
        self.ledger.mark(self.phase, part)

    def _kind(self, arguments: Any, output: torch.Tensor) -> str:
        """The kind of what an operation made: if it is computed of weights alone, a copy of weights."""
        if self.phase == OPTIMIZER_STEP:
            return OPTIMIZER
        inputs = [
            value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)
        ]
        found = [self._live.get(tensor.untyped_storage()._cdata) for tensor in inputs]
        kinds = {"" if one is None else self.ledger.kinds[one[0]] for one in found}
        if kinds and kinds <= _OF_WEIGHTS:
            return DEQUANTIZED
        if output.ndim > 1 and output.shape[-1] == self._vocabulary_size:
            return LOGITS
        # Autograd computes with gradients switched off; a checkpoint that runs again
        # switches them on.
        return (
            ACTIVATIONS
            if self.phase == FORWARD or torch.is_grad_enabled()
            else GRADIENTS
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one operation, and count what it makes."""
        kwargs = kwargs or {}
        if any(_has_own_operations(cls) for cls in types):
            return NotImplemented
        self.follow_phase()
        if (parts := DECOMPOSED.get(func.name())) is not None:
            with self:
                return parts()(*args, **kwargs)
        output = func(*args, **kwargs)
        made = (output,) if isinstance(output, torch.Tensor) else tree_leaves(output)
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and self._device in (
                None,
                tensor.device.type,
            ):
                self._count(
                    tensor, functools.partial(self._kind, (args, kwargs), tensor)
                )
        if (scratch := self._scratch.get(func.name())) is not None:
            for number in [
                self.ledger.made(self._rounded(size), ACTIVATIONS)
                for size in scratch(*args, **kwargs)
            ]:
                self.ledger.freed(number)
        return output


def watch_for(kernels: str, vocabulary_size: int = 0) -> Watch:
    """A watch that counts as a device's allocator does."""
    return Watch(
        vocabulary_size, *((ALLOCATION_BYTES, SCRATCH) if kernels == "cuda" else ())
    )


@functools.cache
def _has_own_operations(cls: type) -> bool:
    """Whether tensors of a class take operations apart themselves: those of torch and fake ones do not."""
    return not (
        cls in (torch.Tensor, nn.Parameter)
        or any(base.__name__ == "FakeTensor" for base in cls.__mro__)
    ) and (
        cls.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
    )


def held_tensors(tree: ModelTree) -> Iterator[tuple[torch.Tensor, str, nn.Module]]:
    """The tensors that a model holds, each with its kind and the module that it lies in; some more than once."""
    adapters = tree.adapter_ids
    for tensor in tree.all_tensors:
        yield (
            tensor.parameter,
            ADAPTERS if id(tensor.parameter) in adapters else WEIGHTS,
            tensor.module,
        )
    for node in tree.nodes:
        for value in tree_leaves(
            [*node.module._buffers.values(), *vars(node.module).values()]
        ):
            if isinstance(value, torch.Tensor):
                yield value, WEIGHTS, node.module
        for value in statistics_of(node.module):
            yield value, STATISTICS, node.module


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, on_cuda: bool = False
) -> Iterator[torch.Tensor]:
    """The tensors of an optimizer's state on its device; torch counts steps on the host, unless it is fused."""
    for group in optimizer.param_groups:
        on_host = on_cuda and not (group.get("fused") or group.get("capturable"))
        for state in (
            optimizer.state[parameter]
            for parameter in group["params"]
            if parameter in optimizer.state
        ):
            for value in tree_leaves(
                [
                    value
                    for name, value in state.items()
                    if not (on_host and name == "step")
                ]
            ):
                if isinstance(value, torch.Tensor) and not (
                    on_cuda and is_managed(optimizer, value)
                ):
                    yield value


class StepTracker:
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
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UnsupportedModelError(
                f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}"
            )
        self._model, self._optimizer, self._inputs = model, optimizer, inputs
        self._watch: Watch | None = None
        self._peaks: Peaks | None = None
        self.static_bytes = 0
        self.sample_bytes = 0

    def __enter__(self) -> StepTracker:
        on_cuda = any(parameter.is_cuda for parameter in self._model.parameters())
        device = (ALLOCATION_BYTES, SCRATCH, "cuda") if on_cuda else ()
        watch = self._watch = Watch(vocabulary_size(self._model), *device)
        tree = tree_of(self._model)
        preparation = Preparation.find(tree)
        if preparation is not None:
            self.sample_bytes = preparation.plan.sample_bytes
        hold_all(watch, tree, self._optimizer, self._inputs, on_cuda)
        self.static_bytes = watch.ledger.held().total()
        self._hooks = []
        if self._optimizer is not None:
            begin = self._optimizer.register_step_pre_hook(
                lambda *_: watch.enter(OPTIMIZER_STEP)
            )
            end = self._optimizer.register_step_post_hook(
                lambda *_: watch.leave_optimizer()
            )
            self._hooks = [begin, end]
        watch.follow_phase()
        watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        assert self._watch is not None
        self._watch.__exit__(*exc)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._peaks = Peaks.of(self._watch.ledger.held(), self._watch.ledger.runs())
        self._watch = None

    def _found(self) -> Peaks:
        if self._peaks is None:
            raise RuntimeError(
                "nothing was tracked yet: run a step inside `with StepTracker(...) as tracker:` first"
            )
        return self._peaks

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment."""
        return self._found().peak_bytes

    @property
    def phases(self) -> dict[str, int]:
        """The most bytes held in each phase."""
        return self._found().phases

    @property
    def by_kind(self) -> dict[str, int]:
        """The bytes held at the peak, by kind."""
        return dict(self._found().by_kind)


def hold_all(
    watch: Watch,
    tree: ModelTree,
    optimizer: torch.optim.Optimizer | None,
    inputs: Any,
    on_cuda: bool = False,
) -> None:
    """Count what is there before a step."""
    for tensor, kind, _ in held_tensors(tree):
        watch.hold(tensor, kind)
    for tensor in () if optimizer is None else optimizer_tensors(optimizer, on_cuda):
        watch.hold(tensor, OPTIMIZER)
    for tensor in tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs):
        if isinstance(tensor, torch.Tensor):
            watch.hold(tensor, INPUTS)


def vocabulary_size(model: nn.Module) -> int:
    """The width of a model's logits, if it says where they are made; else 0."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        head = None if find is None else find()
    except (AttributeError, NotImplementedError):
        head = None
    weight = getattr(head, "weight", None)
    return (
        int(weight.shape[0])
        if isinstance(weight, torch.Tensor) and weight.ndim == 2
        else 0
    )
