"""Runs a step of a model without values, and writes down its memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..model.tree import ModelTree
from . import cuda
from .blocks import Blocks, Part, add_up
from .fakes import FakeModel
from .ledger import INPUTS, Ledger, Peaks, Run
from .optimizers import OptimizerSteps, Shapes
from .tracker import Watch, held_tensors, vocabulary_size, watch_for


@dataclass(frozen=True)
class Step:
    """A step of the whole model: what is held before it by kind, and its runs; and the most large blocks at a time."""

    held: Counter[str]
    runs: list[Run]
    most_blocks: int

    @property
    def peaks(self) -> Peaks:
        """The levels that it reaches."""
        return Peaks.of(self.held, self.runs)


def trace(
    fakes: FakeModel,
    blocks: Blocks,
    optimizer: OptimizerSteps,
    inputs: Mapping[str, torch.Tensor],
    autocast: torch.dtype | None,
    kernels: str,
) -> Step:
    """Run a forward, a backward and an optimizer step; ``inputs`` are real integers or fake floats."""
    model = fakes.model
    functions = cuda.CudaFunctions() if kernels == "cuda" else contextlib.nullcontext()
    # of what the model holds in the last run, by the numbers of the storages
    owners: dict[int, Part | None] = {}

    def forward() -> torch.Tensor:
        context = (
            contextlib.nullcontext()
            if autocast is None
            else torch.autocast("cpu", dtype=autocast)
        )
        with functions, context:
            return _loss_of(model(**inputs))

    def run() -> Ledger:
        for parameter in model.parameters():
            parameter.grad = None
        watch = watch_for(kernels, vocabulary_size(model))
        owners.clear()
        owners.update(_held(ModelTree(model), blocks, watch))
        for tensor in inputs.values():
            watch.hold(tensor, INPUTS)
        hooks = blocks.announce(watch)
        watch.follow_phase()
        try:
            with watch:
                _backward(forward(), functions)
        finally:
            for hook in hooks:
                hook.remove()
        return watch.close()

    with fakes.running():
        with torch.no_grad():
            # what a first forward leaves on its modules is there in later steps
            forward()
        ledger = run()
        if blocks.is_cut and not blocks.is_tried:
            ledger = blocks.expect_repeated(ledger, run)
        runs = blocks.whole_step(ledger)
        held, num_held = (
            add_up(blocks.whole(_by_kind(owners, one)))
            for one in (ledger, _counted(ledger))
        )
        held[INPUTS] = ledger.held()[INPUTS]
        during = Peaks.of(num_held, blocks.whole_step(_counted(ledger))).peak_bytes
    state, last = optimizer(fakes.mode, _trained(fakes, blocks))
    return Step(
        held + state.held(), [*runs, *last], during + _counted(state).held().total()
    )


def _counted(ledger: Ledger) -> Ledger:
    """The same storages, each large one counting as one and others as nothing."""
    return dataclasses.replace(
        ledger, sizes=[int(size >= cuda.LARGE_BYTES) for size in ledger.sizes]
    )


def _backward(loss: torch.Tensor, functions: Any) -> None:
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


def _loss_of(output: Any) -> torch.Tensor:
    loss = (
        output.get("loss")
        if isinstance(output, Mapping)
        else getattr(output, "loss", None)
    )
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            "the model returned no loss for these inputs; give `inputs` with its labels"
        )
    return loss


def _held(tree: ModelTree, blocks: Blocks, watch: Watch) -> dict[int, Part | None]:
    """The blocks whose storages a model holds, by their numbers; what several share belongs to none."""
    owners: dict[int, Part | None] = {}
    for tensor, kind, module in held_tensors(tree):
        owner = blocks.owner(module)
        for number in watch.hold(tensor, kind):
            owners[number] = owner if owners.get(number, owner) == owner else None
    return owners


def _by_kind(
    owners: Mapping[int, Part | None], ledger: Ledger
) -> dict[Part | None, Counter[str]]:
    by_part: defaultdict[Part | None, Counter[str]] = defaultdict(Counter)
    for number, owner in owners.items():
        by_part[owner][ledger.kinds[number]] += ledger.sizes[number]
    return dict(by_part)


def _trained(fakes: FakeModel, blocks: Blocks) -> Shapes:
    """The shapes and dtypes of the whole model's parameters that have got gradients, in its order.

    The gradients are gone then.
    """
    # by stack, or alone
    found: dict[
        Any, defaultdict[Part | None, list[tuple[torch.Size, torch.dtype]]]
    ] = {}
    for module in fakes.model.modules():
        part = blocks.owner(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.grad is not None:
                parameter.grad = None
                place = parameter if part is None else part[0]
                found.setdefault(place, defaultdict(list))[part].append(
                    (parameter.shape, parameter.dtype)
                )
    return tuple(
        shape
        for by_part in found.values()
        for one in blocks.whole(by_part)
        for shape in one
    )
