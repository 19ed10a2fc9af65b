"""Runs a step of a model without values, and writes down its memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..model.tree import ModelTree
from . import cuda
from .blocks import Blocks, Part, add_up
from .fakes import FakeModel, HostIntegers
from .ledger import GRADIENTS, INPUTS, OPTIMIZER, OPTIMIZER_STEP, Ledger, Peaks, Run
from .tracker import Watch, held_tensors, hold_all, optimizer_tensors, vocabulary_size


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
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    inputs: Mapping[str, torch.Tensor],
    autocast: torch.dtype | None,
    kernels: str = "cpu",
) -> Step:
    """Run a forward, a backward and an optimizer step; ``inputs`` are real integers or fake floats."""
    model = fakes.model
    on_cuda = kernels == "cuda"
    functions = cuda.CudaFunctions() if on_cuda else contextlib.nullcontext()

    def forward() -> torch.Tensor:
        context = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
        with functions, context:
            return _loss_of(model(**inputs))

    def run() -> Ledger:
        for parameter in model.parameters():
            parameter.grad = None
        watch = _watch(on_cuda, vocabulary_size(model))
        hold_all(watch, ModelTree(model), None, inputs)
        hooks = blocks.announce(watch)
        watch.follow_phase()
        try:
            with watch:
                _backward(forward(), functions)
        finally:
            for hook in hooks:
                hook.remove()
        return watch.close()

    with fakes.mode, HostIntegers(fakes.mode):
        with torch.no_grad():
            forward()  # what a first forward leaves on its modules is there in later steps
        ledger = run()
        if blocks.is_cut and not blocks.is_tried:
            ledger = blocks.expect_repeated(ledger, run)
        runs = blocks.whole_step(ledger)
        watch = _watch(on_cuda)
        numbers = _held(ModelTree(model), blocks, watch)
        held, num_held = (
            add_up(blocks.whole(_by_kind(numbers, one))) for one in (watch.ledger, _counted(watch.ledger))
        )
        held[INPUTS] = ledger.held()[INPUTS]
        during = Peaks.of(num_held, blocks.whole_step(_counted(ledger))).peak_bytes
    state, last = _optimizer_step(fakes, _trained(fakes, blocks), optimizer, on_cuda)
    return Step(held + state.held(), [*runs, last], during + _counted(state).held().total())


def _watch(on_cuda: bool, vocabulary_size: int = 0) -> Watch:
    return Watch(vocabulary_size, cuda.ALLOCATION_BYTES, cuda.SCRATCH) if on_cuda else Watch(vocabulary_size)


def _counted(ledger: Ledger) -> Ledger:
    """The same storages, each large one counting as one and others as nothing."""
    return dataclasses.replace(ledger, sizes=[int(size >= cuda.LARGE_BYTES) for size in ledger.sizes])


def _backward(loss: torch.Tensor, functions: Any) -> None:
    """Run a backward pass under a mode of functions, which `Tensor.backward` would turn off."""
    engine: Any = torch.autograd.Variable._execution_engine
    gradient = torch.ones_like(loss)
    with functions:
        engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError("the model returned no loss for these inputs; give `inputs` with its labels")
    return loss


def _held(tree: ModelTree, blocks: Blocks, watch: Watch) -> dict[int, Part | None]:
    """The blocks whose storages a model holds, by their numbers; what several share belongs to none."""
    owners: dict[int, Part | None] = {}
    for tensor, kind, module in held_tensors(tree):
        owner = blocks.owner(module)
        for number in watch.hold(tensor, kind):
            owners[number] = owner if owners.get(number, owner) == owner else None
    return owners


def _by_kind(owners: Mapping[int, Part | None], ledger: Ledger) -> dict[Part | None, Counter[str]]:
    by_part: defaultdict[Part | None, Counter[str]] = defaultdict(Counter)
    for number, owner in owners.items():
        by_part[owner][ledger.kinds[number]] += ledger.sizes[number]
    return dict(by_part)


def _trained(fakes: FakeModel, blocks: Blocks) -> list[nn.Parameter]:
    """Parameters like those of the whole model that have got gradients, which the model's own then lose."""
    by_part: defaultdict[Part | None, list[nn.Parameter]] = defaultdict(list)
    seen: set[int] = set()
    for module in fakes.model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                by_part[blocks.owner(module)].append(parameter)
    with fakes.mode:
        made = [nn.Parameter(torch.empty_like(p)) for found in blocks.whole(dict(by_part)) for p in found]
    for parameter in fakes.model.parameters():
        parameter.grad = None
    return made


def _optimizer_step(
    fakes: FakeModel,
    trained: list[nn.Parameter],
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    on_cuda: bool,
) -> tuple[Ledger, Run]:
    """The state that an optimizer keeps on the device, and what each step takes beside it.

    Its first step makes the state, and then does what every step does.
    """
    with fakes.mode:
        made = optimizer(trained)
        watch, kept = _watch(on_cuda), _watch(on_cuda)
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            watch.hold(parameter, GRADIENTS)
            watch.hold(parameter.grad, GRADIENTS)
        watch.enter(OPTIMIZER_STEP)
        with watch:
            made.step()
    first = watch.ledger.runs()[0]
    for tensor in optimizer_tensors(made, on_cuda):
        kept.hold(tensor, OPTIMIZER)
    state = Counter({OPTIMIZER: sum(watch.size(tensor) for tensor in optimizer_tensors(made))})
    rise = Counter(first.at_peak)
    rise.subtract(state)
    return kept.close(), Run(first.mark, first.net - state, rise)
