"""The steps of optimizers, run on what a model trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from .fakes import KnownValues
from .ledger import BACKWARD, GRADIENTS, OPTIMIZER, OPTIMIZER_STEP, Ledger, Span
from .optimizer_names import named_optimizer
from .tracker import Watch, optimizer_tensors


class Shape(NamedTuple):
    """A parameter that is trained.

    Attributes:
        size: Its shape.
        dtype: Its dtype.
        group: The number of the optimizer's group that it is in.
    """

    size: torch.Size
    dtype: torch.dtype
    group: int = 0


Shapes = tuple[Shape, ...]
"""The parameters that are trained, in order."""


class OptimizerSteps:
    """The steps of an optimizer, by what it trains. What was run once is known.

    Args:
        make: Makes the optimizer of parameters of these shapes; ``None`` for no step and
            no state.
        on_cuda: Whether the step is one on a CUDA device.
        clip: Clips the gradients of parameters, where the step does; what it returns is
            held until the step's end.
    """

    def __init__(
        self,
        make: Callable[[list[nn.Parameter], Shapes], Any] | None,
        on_cuda: bool,
        clip: Callable[[list[nn.Parameter]], Any] = lambda trained: None,
    ) -> None:
        self._make = make
        self._on_cuda = on_cuda
        self._clip = clip
        self._known: dict[Shapes, tuple[Ledger, list[Span]]] = {}

    def __call__(self, fakes: Any, shapes: Shapes) -> tuple[Ledger, list[Span]]:
        """Run a step of the optimizer on fake tensors, unless it is known.

        Returns:
            The state that is kept on the device, and the spans of a step that has it.

        Raises:
            ConfigError: There is no optimizer of the name.
        """
        if self._make is None:
            return Ledger(), []
        if shapes in self._known:
            return self._known[shapes]
        # of two steps, the first one makes the state, and the second has it
        watch = Watch(on_cuda=self._on_cuda)
        kept = Watch(on_cuda=self._on_cuda)
        with fakes:
            trained = []
            for size, dtype, _group in shapes:
                parameter = nn.Parameter(torch.empty(size, dtype=dtype, device="cpu"))
                parameter.grad = torch.empty_like(parameter)
                trained.append(parameter)
                watch.hold(parameter, GRADIENTS)
                watch.hold(parameter.grad, GRADIENTS)
            with KnownValues():
                made = self._make(trained, shapes)
                made.step()
                _hold(watch, made)
                with watch:
                    watch.enter(BACKWARD)
                    held = self._clip(trained)
                    watch.enter(OPTIMIZER_STEP)
                    made.step()
        _hold(kept, made, self._on_cuda)
        del held
        self._known[shapes] = kept.close(), watch.ledger.spans
        return self._known[shapes]


@functools.cache
def named_steps(name: Any, on_cuda: bool) -> OptimizerSteps:
    """Return the steps of a named optimizer, for every model of a process.

    They depend on shapes alone, and one of a 7B's 448 adapters takes as long as the
    model's passes.
    """
    return OptimizerSteps(
        lambda trained, _: named_optimizer(name, trained, on_cuda), on_cuda
    )


def _hold(watch: Watch, optimizer: Any, on_cuda: bool = False) -> None:
    """Count an optimizer's state; no name is left that would keep a tensor which the step replaces."""
    for tensor in optimizer_tensors(optimizer, on_cuda):
        watch.hold(tensor, OPTIMIZER)
