"""Runs a step of a model without values, and writes down its memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..model.tree import ModelTree
from . import cuda
from .blocks import Blocks, Part
from .fakes import FakeModel
from .ledger import (
    INPUTS,
    Ledger,
    Levels,
    Measure,
    Peaks,
    Run,
    Sizes,
    Storage,
    highest_levels,
    in_bytes,
)
from .optimizers import OptimizerSteps, Shape, Shapes
from .tracker import Watch, held_tensors, vocabulary_size


@dataclass(frozen=True)
class Trace:
    """A step that was run with the kept blocks, and what it says of the whole model's.

    Attributes:
        ledger: The storages of the step that was run.
        blocks: The model's blocks.
        trained: The parameters that are trained.
        state: The optimizer's state.
        last: The runs of the optimizer's step.
    """

    ledger: Ledger
    blocks: Blocks
    trained: Shapes
    state: Ledger
    last: list[Run]

    def held_by_each(self, measure: Measure = in_bytes) -> list[Sizes]:
        """The memory that each part of the model holds before the step, by kind: the root first, then the blocks."""
        by_part: dict[Part | None, Sizes] = {None: Sizes()}
        for storage, part in self.ledger.holders.items():
            sizes = by_part.setdefault(part, Sizes())
            sizes[storage.kind] += measure(storage)
        return list(self.blocks.whole(by_part))

    def held(self, measure: Measure = in_bytes) -> Sizes:
        """The memory that the whole model holds before the step, by kind."""
        total = Sizes()
        for sizes in self.held_by_each(measure):
            total.update(sizes)
        return total

    def static(self, measure: Measure = in_bytes) -> Sizes:
        """All that is held before the step, by kind."""
        return self.held(measure) + self.state.held(measure)

    def levels(self, measure: Measure = in_bytes) -> Levels:
        """The highest levels of the whole model's step, with its optimizer's.

        Args:
            measure: What is added up of the storages of the model's passes.

        Returns:
            The levels, in bytes by kind.

        Raises:
            NotRepeatedError: The blocks that are left out cannot be told from the
                others.
        """
        held = self.held(measure) + self.state.held()
        runs = self.blocks.whole_step(self.ledger, measure)
        return highest_levels(held, [*runs, *self.last])

    @functools.cached_property
    def step(self) -> Step:
        """The step of the whole model; raises as `levels` does."""
        held = self.static(_in_large_blocks)
        runs = self.blocks.whole_step(self.ledger, _in_large_blocks)
        counted = highest_levels(held, runs)
        root, *units = self.held_by_each()
        return Step(
            held=self.static(),
            levels=self.levels(),
            most_blocks=max(sum(level.values()) for level in counted.values()),
            trained=self.trained,
            units=units,
            root=root,
        )


@dataclass(frozen=True)
class Step(Peaks):
    """A step of the whole model.

    Attributes:
        held: The bytes by kind that are held before it.
        levels: The bytes by kind at the highest level of each phase.
        most_blocks: The most storages of an allocator's large blocks at a time.
        trained: The parameters that are trained, in the model's order.
        units: What each block holds before it, by kind.
        root: What the rest of the model holds.
    """

    held: Sizes
    levels: Levels
    most_blocks: int
    trained: Shapes
    units: list[Sizes]
    root: Sizes


def trace(
    fakes: FakeModel,
    blocks: Blocks,
    optimizer: OptimizerSteps,
    inputs: Mapping[str, Tensor],
    autocast: torch.dtype | None,
    on_cuda: bool,
) -> Trace:
    """Run a forward, a backward and an optimizer step without values, and write down their memory.

    Args:
        fakes: The model.
        blocks: Its stacks of blocks, of which some may be left out.
        optimizer: What makes the optimizer's step.
        inputs: What the model is called with, by name: real integers or fake floats.
        autocast: The dtype of autocast in the forward pass, or ``None``.
        on_cuda: Whether the operations of a CUDA device are followed.

    Returns:
        The step that was run.

    Raises:
        ConfigError: The model returns no loss.
        NotRepeatedError: The blocks that are left out cannot be told from the others.
    """
    model = fakes.model
    functions = cuda.CudaFunctions() if on_cuda else contextlib.nullcontext()

    def forward() -> Tensor:
        is_lower = autocast is not None
        with functions, torch.autocast("cpu", dtype=autocast, enabled=is_lower):
            return _loss_of(model(**inputs))

    def run() -> Ledger:
        model.zero_grad(set_to_none=True)
        watch = watch_of(model, blocks, on_cuda)
        for tensor in inputs.values():
            watch.hold(tensor, INPUTS)
        with blocks.announced(watch):
            watch.follow_phase()
            with watch:
                _backward(forward(), functions)
        return watch.close()

    with fakes.running():
        # what a first forward leaves on its modules is there in later steps
        if not fakes.was_run:
            with torch.no_grad():
                forward()
            fakes.was_run = True
        held = held_bytes(model)
        ledger = run()
        if held != held_bytes(model):
            ledger = run()  # a longer sequence may leave more
        if blocks.is_cut and not blocks.is_tried:
            ledger = blocks.expect_repeated(ledger, run)
    shapes = trained_shapes(model, blocks)
    state, last = optimizer(fakes.mode, shapes)
    return Trace(ledger, blocks, shapes, state, last)


def held_bytes(model: nn.Module) -> list[int]:
    """The bytes of each tensor that a model holds."""
    tensors = held_tensors(ModelTree(model))
    return [tensor.untyped_storage().nbytes() for tensor, _, _ in tensors]


def watch_of(model: nn.Module, blocks: Blocks, on_cuda: bool) -> Watch:
    """A watch that counts all that a model holds."""
    watch = Watch(vocabulary_size(model), on_cuda)
    for tensor, kind, module in held_tensors(ModelTree(model)):
        watch.hold(tensor, kind, blocks.owner(module))
    return watch


def _in_large_blocks(storage: Storage) -> int:
    """The measure of large blocks: one for each, and nothing for others."""
    return int(storage.num_bytes >= cuda.LARGE_BYTES)


def _backward(loss: Tensor, functions: Any) -> None:
    """Run a backward pass under a mode of functions, which `Tensor.backward` would turn off."""
    engine: Any = torch.autograd.Variable._execution_engine
    gradient = torch.ones_like(loss)
    with functions:
        engine.run_backward(
            (loss,),
            (gradient,),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def _loss_of(output: Any) -> Tensor:
    is_mapping = isinstance(output, Mapping)
    loss = output.get("loss") if is_mapping else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(
            "the model returned no loss for these inputs; give `inputs` with its labels"
        )
    return loss


def trained_shapes(
    model: nn.Module, blocks: Blocks, groups: Mapping[int, int] | None = None
) -> Shapes:
    """The shapes and dtypes of the whole model's parameters that have got gradients, in its order.

    The gradients are gone then.

    Args:
        model: The model with the kept blocks.
        blocks: The stacks of blocks.
        groups: The numbers of the optimizer's groups that parameters are in, by their
            ids; all are in one without it.

    Returns:
        A shape for each parameter.
    """
    # by stack, or alone
    found: dict[Any, dict[Part | None, list[Shape]]] = {}
    for module in model.modules():
        part = blocks.owner(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.grad is not None:
                parameter.grad = None
                place = parameter if part is None else part.stack
                shapes = found.setdefault(place, {}).setdefault(part, [])
                group = 0 if groups is None else groups[id(parameter)]
                shapes.append(Shape(parameter.shape, parameter.dtype, group))
    result: list[Shape] = []
    for by_part in found.values():
        for shapes in blocks.whole(by_part):
            result += shapes
    return tuple(result)
