"""The steps of optimizers, run on what a model trains."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

from .fakes import KnownValues
from .ledger import BACKWARD, GRADIENTS, OPTIMIZER, OPTIMIZER_STEP, Ledger, Run
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
        optimizer: One of the names, a function of the parameters, or ``None`` for no
            step and no state.
        on_cuda: Whether the step is one on a CUDA device.
    """

    def __init__(self, optimizer: Any, on_cuda: bool) -> None:
        self._optimizer = optimizer
        self._on_cuda = on_cuda
        self._known: dict[Shapes, tuple[Ledger, list[Run]]] = {}

    def __call__(self, fakes: Any, shapes: Shapes) -> tuple[Ledger, list[Run]]:
        """Run a step of the optimizer, unless it is known.

        Args:
            fakes: The mode of fake tensors.
            shapes: The shapes and dtypes of what is trained.

        Returns:
            The state that is kept on the device, and the runs of a step that has it.

        Raises:
            ConfigError: There is no optimizer of the name.
        """
        if self._optimizer is None:
            return Ledger(), []
        if shapes not in self._known:
            self._known[shapes] = self._run(fakes, shapes)
        return self._known[shapes]

    def _run(self, fakes: Any, shapes: Shapes) -> tuple[Ledger, list[Run]]:
        """Run two steps: the first one makes the state, and the second has it."""
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
        return kept.close(), watch.ledger.runs()

    def _make(self, trained: list[nn.Parameter], shapes: Shapes) -> Any:
        """Make the optimizer of parameters of these shapes."""
        if callable(self._optimizer):
            return self._optimizer(trained)
        return named_optimizer(self._optimizer, trained, self._on_cuda)

    def _clip(self, trained: list[nn.Parameter]) -> Any:
        """Clip the gradients, where the step does; what is returned is held until its end."""


@functools.cache
def named_steps(name: str, on_cuda: bool) -> OptimizerSteps:
    """Return the steps of a named optimizer, for every model of a process.

    They depend on shapes alone, and one of a 7B's 448 adapters takes as long as the
    model's passes.
    """
    return OptimizerSteps(name, on_cuda)


def _hold(watch: Watch, optimizer: Any, on_cuda: bool = False) -> None:
    """Count an optimizer's state; no name is left that would keep a tensor which the step replaces."""
    for tensor in optimizer_tensors(optimizer, on_cuda):
        watch.hold(tensor, OPTIMIZER)
