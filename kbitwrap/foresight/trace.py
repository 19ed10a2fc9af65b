"""Runs a step of a model without values, and writes down its memory."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..model.tree import ModelTree
from . import cuda
from .adapters import with_adapters
from .batch import Inputs, make_batch
from .blocks import BlockId, Blocks
from .fakes import FakeModel
from .ledger import (
    INPUTS,
    Ledger,
    Levels,
    Peaks,
    Sizes,
    Span,
    Storage,
    highest_levels,
    sizes_of,
)
from .optimizers import OptimizerSteps, Shape, Shapes
from .tracker import begin_watch, held_tensors


@dataclass(frozen=True)
class Step(Peaks):
    """A step of the whole model.

    Attributes:
        held: The bytes by kind that are held before it.
        levels: The bytes by kind at the highest level of each phase.
        trained: The parameters that are trained, in the model's order.
        root: The bytes by kind that the model holds outside its blocks before the step.
        units: The bytes by kind that each block holds.
        static: The bytes of each storage that the model holds before it; ``None`` where
            nobody knows the order in which others are made and freed.
        state: Those of the optimizer's state.
        spans: What is made and freed in it.
    """

    held: Sizes
    levels: Levels
    trained: Shapes
    root: Sizes
    units: list[Sizes]
    static: list[int] | None
    state: list[int]
    spans: list[Span]


class StepRecorder(contextlib.ExitStack):
    """Writes down a step's memory, from its first forward pass to where its optimizer begins.

    Left early, it stops counting all the same.

    Args:
        model: The model with the kept blocks.
        blocks: Its stacks of blocks.
        on_cuda: Whether to count as on a CUDA device.

    Attributes:
        ledger: What was written down.
        trained: The shapes of what has got gradients.
    """

    def __init__(self, model: nn.Module, blocks: Blocks, on_cuda: bool) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.trained: Shapes = ()
        self._model = model
        self._blocks = blocks
        self._on_cuda = on_cuda

    def begin(self, inputs: Iterable[Tensor]) -> None:
        """Begin to count, before the first forward pass.

        Args:
            inputs: The tensors of the batches of the step.
        """
        tree, owners = ModelTree(self._model), self._blocks.owners()
        watch = begin_watch(tree, list(inputs), self._on_cuda, owners=owners)
        self.ledger = watch.ledger
        self.callback(watch.close)
        self.enter_context(self._blocks.announced(watch))
        watch.follow_phase()
        self.enter_context(watch)

    def end(self, groups: Mapping[int, int] | None = None) -> None:
        """Stop counting, when gradients are there, and take them away.

        Args:
            groups: The numbers of the optimizer's groups that parameters are in, by
                their ids; all are in one without it.
        """
        self.close()
        owners = self._blocks.owners()
        self.trained = ()
        # by stack, or alone
        found: dict[Any, dict[BlockId | None, list[Shape]]] = {}
        for module in self._model.modules():
            part = owners.get(id(module))
            place = module if part is None else part.stack
            shapes = found.setdefault(place, defaultdict(list))[part]
            for parameter in module._parameters.values():
                if parameter is not None and parameter.grad is not None:
                    parameter.grad = None
                    group = 0 if groups is None else groups[id(parameter)]
                    shapes.append(Shape(parameter.shape, parameter.dtype, group))
        for by_part in found.values():
            self.trained += tuple(chain.from_iterable(self._blocks.whole(by_part)))


class ModelStep:
    """Runs the forward and the backward pass of a model that is called with tensors, and returns a loss.

    Args:
        inputs: What the model is called with, by name; ``None`` for ids and labels.
        optimizer: What runs the optimizer's step.
        autocast: The dtype of autocast in the forward pass, or ``None``.

    Attributes:
        gives_figures: Whether code that reads unknown floats, such as metrics, gets 1.
        notes: What is assumed of the step.
        optimizer: What runs the optimizer's step.
    """

    gives_figures = False
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        inputs: Mapping[str, Tensor] | None,
        optimizer: OptimizerSteps,
        autocast: torch.dtype | None,
    ) -> None:
        self.optimizer = optimizer
        self._inputs = inputs
        self._autocast = autocast

    def source(self, source: Any) -> Any:
        """Return the source of the model that is trained, of the one that was given."""
        return source

    def build(self, model: nn.Module, lora: Any) -> nn.Module:
        """Give a model adapters of a config; ``None`` leaves it as it is."""
        return with_adapters(model, lora)

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Let the process be as the step needs it."""
        return contextlib.nullcontext()

    def run_first(
        self, fakes: FakeModel, batch_size: int, seq_len: int, recorder: StepRecorder
    ) -> None:
        """Run a forward pass without gradients, unrecorded: what modules do once, or keep from then on, is done."""
        with torch.no_grad():
            inputs = make_batch(fakes, batch_size, seq_len, self._inputs)
            self._forward(fakes, inputs)

    def run(
        self, fakes: FakeModel, batch_size: int, seq_len: int, recorder: StepRecorder
    ) -> None:
        """Run both passes, and tell the recorder where they begin and end."""
        inputs = make_batch(fakes, batch_size, seq_len, self._inputs)
        recorder.begin(inputs.values())
        loss = self._forward(fakes, inputs)
        loss.backward()
        del loss  # which nothing holds when the optimizer begins
        recorder.end()

    def _forward(self, fakes: FakeModel, inputs: Inputs) -> Tensor:
        """Return the loss; raises ``ConfigError`` where the model returns none."""
        is_lower = self._autocast is not None
        with torch.autocast("cpu", dtype=self._autocast, enabled=is_lower):
            output = fakes.model(**inputs)
        is_mapping = isinstance(output, Mapping)
        loss = output.get("loss") if is_mapping else getattr(output, "loss", None)
        if not isinstance(loss, Tensor):
            raise ConfigError(
                "the model returned no loss for these inputs; give `inputs` with its labels"
            )
        return loss


def trace(
    runner: ModelStep,
    fakes: FakeModel,
    blocks: Blocks,
    batch_size: int,
    seq_len: int,
    on_cuda: bool,
) -> Step:
    """Run a forward, a backward and an optimizer step without values, and tell the whole model's from it.

    Raises:
        ConfigError: The model returns no loss.
        NotRepeatedError: The blocks that are left out cannot be told from the others.
    """
    recorder = StepRecorder(fakes.model, blocks, on_cuda)

    def run(step: Any = runner.run) -> Ledger:
        with recorder:
            step(fakes, batch_size, seq_len, recorder)
        return recorder.ledger

    def held_bytes() -> list[int]:
        held = held_tensors(ModelTree(fakes.model))
        return [tensor.untyped_storage().nbytes() for tensor, _, _ in held]

    functions = cuda.CudaFunctions() if on_cuda else contextlib.nullcontext()
    with runner.in_force():
        with fakes.running(gives_figures=runner.gives_figures), functions:
            # what a first step leaves on its modules is there in later ones
            if not fakes.was_run:
                run(runner.run_first)
                fakes.was_run = True
            before = held_bytes()
            ledger = run()
            if before != held_bytes():
                # a longer sequence left more on the modules: run again from there
                ledger = run()
            if blocks.is_cut and not blocks.is_tried:
                ledger = blocks.drop_one_and_compare(ledger, run)
        state, last = runner.optimizer(fakes.mode, recorder.trained)

    by_part = defaultdict[BlockId | None, list[Storage]](list, {None: []})
    inputs: list[Storage] = []
    for storage, part in ledger.holders.items():
        if storage.kind == INPUTS:
            inputs.append(storage)
        else:
            by_part[part].append(storage)
    storages = list(blocks.whole(by_part))
    root, *units = map(sizes_of, storages)
    held = sizes_of([*inputs, *state.holders])
    for sizes in (root, *units):
        held.update(sizes)
    spans = [*blocks.whole_step(ledger), *last]
    return Step(
        held=held,
        levels=highest_levels(held, spans),
        trained=recorder.trained,
        root=root,
        units=units,
        static=[one.num_bytes for one in chain.from_iterable(storages)],
        state=[one.num_bytes for one in state.holders],
        spans=[Span(spans[0].mark, [(one, 1) for one in inputs]), *spans],
    )
