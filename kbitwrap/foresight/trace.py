"""Runs a step of a model without values, and writes down its memory."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..model.tree import ModelTree
from .blocks import Blocks, Part, add_up
from .fakes import FakeModel, HostIntegers
from .ledger import GRADIENTS, INPUTS, OPTIMIZER, OPTIMIZER_STEP, Ledger, Peaks, Run
from .tracker import Watch, held_tensors, hold_all, optimizer_tensors, vocabulary_size


@dataclass(frozen=True)
class Step:
    """A step of the whole model: what is held before it by kind, and its runs."""

    held: Counter[str]
    runs: list[Run]

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
) -> Step:
    """Run a forward, a backward and an optimizer step; ``inputs`` are real integers or fake floats."""
    model = fakes.model

    def forward() -> torch.Tensor:
        context = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
        with context:
            return _loss_of(model(**inputs))

    def run() -> Ledger:
        for parameter in model.parameters():
            parameter.grad = None
        watch = Watch(vocabulary_size(model))
        hold_all(watch, ModelTree(model), None, inputs)
        hooks = blocks.announce(watch)
        watch.follow_phase()
        try:
            with watch:
                forward().backward()
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
        held = add_up(blocks.whole(_held(ModelTree(model), blocks)))
        held[INPUTS] = ledger.held()[INPUTS]
    state, last = _optimizer_step(fakes, _trained(fakes, blocks), optimizer)
    return Step(held + state, [*runs, last])


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError("the model returned no loss for these inputs; give `inputs` with its labels")
    return loss


def _held(tree: ModelTree, blocks: Blocks) -> dict[Part | None, Counter[str]]:
    """What a model holds, by block; what several share belongs to none."""
    watch = Watch()
    owners: dict[int, Part | None] = {}
    for tensor, kind, module in held_tensors(tree):
        owner = blocks.owner(module)
        for number in watch.hold(tensor, kind):
            owners[number] = owner if owners.get(number, owner) == owner else None
    by_part: defaultdict[Part | None, Counter[str]] = defaultdict(Counter)
    for number, owner in owners.items():
        by_part[owner][watch.ledger.kinds[number]] += watch.ledger.sizes[number]
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
    fakes: FakeModel, trained: list[nn.Parameter], optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> tuple[Counter[str], Run]:
    """The state that an optimizer keeps, by kind, and what each step takes beside it.

    Its first step makes the state, and then does what every step does.
    """
    with fakes.mode:
        made = optimizer(trained)
        watch = Watch()
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
            watch.hold(parameter, GRADIENTS)
            watch.hold(parameter.grad, GRADIENTS)
        watch.enter(OPTIMIZER_STEP)
        with watch:
            made.step()
    first = watch.ledger.runs()[0]
    state = Counter({OPTIMIZER: sum(watch.size(tensor) for tensor in optimizer_tensors(made))})
    rise = Counter(first.at_peak)
    rise.subtract(state)
    return state, Run(first.mark, first.net - state, rise)
