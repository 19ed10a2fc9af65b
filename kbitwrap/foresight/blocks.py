"""A model with fewer blocks that tells what all of them do: those of one kind do the same to a device's memory.

A step goes through the blocks of a stack one after the other, forward and backward.
What happens in one is a `Run`: what it leaves, and how far it rises. Of each kind the
first and the last block are kept, and two between them; the runs of the others are
theirs. Nothing is fitted: every level is the sum of the runs before it. That it holds
is tried first, on a model with one block of each kind more, whose every run must come
out to the byte; else all blocks are run.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from .ledger import BACKWARD, PHASES, Ledger, Mark, Run
from .tracker import Watch

Part = tuple[int, int]
"""A block: the number of its stack, and its own in the whole model."""
T = TypeVar("T")

# An attribute that says where a block is: those of two blocks of one kind differ in it.
_PLACE = re.compile(r"(^|_)(idx|index|id|number|layer)$")


class NotRepeatedError(Exception):
    """The blocks of a kind do not all do the same, or not one after the other: all have to be run."""


# blocks of each kind that are kept: the first and the last, and those between
_ENDS, _INNER = 2, 2


@dataclass
class Stack:
    """The blocks that a model runs one after the other, and the kind of each; some are left out."""

    number: int
    blocks: nn.ModuleList
    config: Any  # of the module that holds them
    kinds: list[Hashable]
    kept: list[int]

    @property
    def is_cut(self) -> bool:
        """Whether blocks are left out."""
        return len(self.kept) < len(self.kinds)

    def part(self, index: int) -> Part:
        """The kept block that stands for a block of the whole model: itself, or the second of its kind."""
        return self.number, index if index in self.kept else self._of_kind(
            self.kinds[index]
        )[1]

    def _of_kind(self, kind: Hashable) -> list[int]:
        return [index for index in self.kept if self.kinds[index] == kind]

    def pairs(self, wanted: list[int]) -> list[tuple[Part, Part, int]]:
        """The kept blocks between the ends of each kind, which must do the same, and how many of those wanted do."""
        kinds = [self.kinds[index] for index in wanted]
        found = (
            (self._of_kind(kind), kinds.count(kind) - _ENDS) for kind in set(kinds)
        )
        return [
            ((self.number, same[1]), (self.number, same[2]), count)
            for same, count in found
            if len(same) > 3
        ]

    def fewest(self, num_inner: int) -> list[int]:
        """The first and the last block of each kind, and some between them."""
        by_kind: defaultdict[Hashable, list[int]] = defaultdict(list)
        for index, kind in enumerate(self.kinds):
            by_kind[kind].append(index)
        return sorted(
            {
                index
                for found in by_kind.values()
                for index in (*found[: num_inner + 1], found[-1])
            }
        )

    def keep(self, wanted: list[int]) -> None:
        """Make a smaller model of the wanted blocks: number them from 0, and make the config one of so many."""
        if wanted == self.kept:
            return
        places = [self.kept.index(index) for index in wanted]
        blocks = list(self.blocks)
        self.blocks._modules = {str(new): blocks[old] for new, old in enumerate(places)}
        for new, old in enumerate(places):
            for module in blocks[old].modules():
                for name, value in list(vars(module).items()):
                    if _PLACE.search(name) and type(value) is int and value == old:
                        vars(module)[name] = new
        for name, value in list(
            vars(self.config).items() if hasattr(self.config, "__dict__") else ()
        ):
            if isinstance(value, (list, tuple)) and len(value) == len(blocks):
                vars(self.config)[name] = type(value)(value[i] for i in places)
            elif "layer" in name and type(value) is int and value == len(blocks):
                vars(self.config)[name] = len(places)
        self.kept = wanted


class Blocks:
    """The stacks of a model on the meta device. With ``is_exact`` all blocks are kept."""

    def __init__(self, model: nn.Module, *, is_exact: bool) -> None:
        found = list(_outermost(model, None))
        holders = Counter(
            id(tensor)
            for blocks, _ in found
            for block in blocks
            for tensor in block.parameters()
        )
        self.stacks = [
            _stack(number, *stack, holders) for number, stack in enumerate(found)
        ]
        self._owners = {
            id(module): (stack.number, index)
            for stack in self.stacks
            for index, block in enumerate(stack.blocks)
            for module in block.modules()
        }
        self.is_tried = False
        if not is_exact:
            self.keep(_INNER + 1)

    def keep(self, num_inner: int) -> None:
        """Keep so many blocks of each kind, between the first and the last."""
        for stack in self.stacks:
            stack.keep(stack.fewest(num_inner))

    @property
    def is_cut(self) -> bool:
        """Whether blocks are left out."""
        return any(stack.is_cut for stack in self.stacks)

    @property
    def counts(self) -> tuple[int, int]:
        """The blocks that are kept, and all."""
        return sum(len(stack.kept) for stack in self.stacks), sum(
            len(stack.kinds) for stack in self.stacks
        )

    def owner(self, module: nn.Module) -> Part | None:
        """The block that a module lies in, or ``None`` outside of all."""
        return self._owners.get(id(module))

    def whole(self, by_part: dict[Part | None, T]) -> Iterator[T]:
        """One value for each block of the whole model, from those of the kept blocks; that of ``None`` comes first."""
        if None in by_part:
            yield by_part[None]
        for stack in self.stacks:
            for index in range(len(stack.kinds)):
                if (part := stack.part(index)) in by_part:
                    yield by_part[part]

    def announce(self, watch: Watch) -> list[Any]:
        """Let each block tell a watch when it begins, forward and backward; returns the hooks to remove."""
        hooks: list[Any] = []
        for stack in self.stacks:
            for index, block in zip(stack.kept, stack.blocks, strict=True):
                hooks += _announce(block, watch, (stack.number, index))
        return hooks

    def whole_step(self, ledger: Ledger) -> list[Run]:
        """The runs of the whole model's step, from those of the kept blocks."""
        return self._step_of(
            [list(range(len(stack.kinds))) for stack in self.stacks], ledger
        )

    def expect_repeated(self, with_more: Ledger, run: Callable[[], Ledger]) -> Ledger:
        """Leave out one block of each kind, and return the ledger of a step, which must tell the one with more."""
        wanted = [stack.kept for stack in self.stacks]
        self.keep(_INNER)
        ledger = run()
        found, expected = self._step_of(wanted, ledger), with_more.runs()
        if [_effect(run) for run in found] != [_effect(run) for run in expected]:
            raise NotRepeatedError("one block more does more than its own")
        self.is_tried = True
        return ledger

    def _step_of(self, wanted: list[list[int]], ledger: Ledger) -> list[Run]:
        """The runs of the step of a model with the blocks wanted, by stack."""
        pairs = [
            pair
            for stack in self.stacks
            if stack.is_cut
            for pair in stack.pairs(wanted[stack.number])
        ]
        runs = ledger.runs(_times(ledger, pairs))
        by_mark: dict[Mark, Run] = {}
        for run in runs:
            if by_mark.setdefault(run.mark, run) is not run and run.mark[1] is not None:
                raise NotRepeatedError(f"{run.mark} more than once")
        phases = dict.fromkeys(phase for phase, _ in by_mark)
        for (one, other, _), phase in itertools.product(pairs, phases):
            if _effect(by_mark.get((phase, one))) != _effect(
                by_mark.get((phase, other))
            ):
                raise NotRepeatedError(f"two blocks of one kind differ in {phase}")
        result: list[Run] = []
        seen = set()
        for (phase, number), group in itertools.groupby(
            runs, lambda run: (run.mark[0], self._cut_stack(run))
        ):
            if number is None:
                result += group
                continue
            if (phase, number) in seen:
                raise NotRepeatedError("something else runs between the blocks")
            seen.add((phase, number))
            indices = reversed(wanted[number]) if phase == BACKWARD else wanted[number]
            marks = [(phase, self.stacks[number].part(index)) for index in indices]
            result += [by_mark[mark] for mark in marks if mark in by_mark]
        return result

    def _cut_stack(self, run: Run) -> int | None:
        part = run.mark[1]
        return (
            part[0] if isinstance(part, tuple) and self.stacks[part[0]].is_cut else None
        )


def _times(
    ledger: Ledger, pairs: list[tuple[Part, Part, int]]
) -> dict[tuple[Mark, Mark | None], int]:
    """How often a run frees what a block made, where it frees that of all blocks of the kind.

    Blocks free what they made themselves, or what the one before them made. A run that
    frees what both blocks of a pair made, and is neither's, frees it for all that they
    stand for.
    """
    return {
        (mark, (phase, one)): count - 1
        for mark, origins in ledger.freed_origins().items()
        for (one, other, count), phase in itertools.product(pairs, PHASES)
        if {(phase, one), (phase, other)} <= origins and mark[1] not in (one, other)
    }


def _effect(run: Run | None) -> Any:
    """The effect of a run on memory: runs that do the same have equal ones."""
    return None if run is None else (run.mark[0], run.net, run.at_peak)


def _outermost(module: nn.Module, config: Any) -> Iterator[tuple[nn.ModuleList, Any]]:
    """The lists of modules that lie in no other, each with the config of the module around it."""
    config = getattr(module, "config", config)
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield child, config
        else:
            yield from _outermost(child, config)


def _stack(
    number: int, blocks: nn.ModuleList, config: Any, holders: Mapping[int, int]
) -> Stack:
    kinds: list[Hashable] = []
    is_trained = False
    numbers: dict[Hashable, int] = {}
    for index, block in enumerate(blocks):
        # Gradients flow no further back than the first parameter that is trained.
        is_trained = is_trained or any(
            parameter.requires_grad for parameter in block.parameters()
        )
        # No other block does what one does that shares parameters: they are held, and
        # get a gradient, once.
        shared = (
            index
            if any(holders[id(parameter)] > 1 for parameter in block.parameters())
            else None
        )
        kinds.append(
            numbers.setdefault((is_trained, shared, _signature(block)), len(numbers))
        )
    return Stack(number, blocks, config, kinds, list(range(len(kinds))))


def _signature(module: nn.Module) -> Hashable:
    """A block's classes, settings, and shapes and dtypes of tensors: alike in blocks that do the same."""
    fields = vars(module)
    settings = tuple(
        (
            name,
            value
            if isinstance(value, (bool, int, float, str, torch.dtype, type(None)))
            else type(value),
        )
        for name, value in fields.items()
        if not name.startswith("_") and not _PLACE.search(name)
    )
    tensors = tuple(
        (name, type(t), tuple(t.shape), t.dtype, t.requires_grad)
        for found in (module._parameters, module._buffers)
        for name, t in found.items()
        if t is not None
    )
    hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
    children = tuple(
        (name, _signature(child))
        for name, child in module._modules.items()
        if child is not None
    )
    return type(module), settings, tensors, hooks, children


def _announce(block: nn.Module, watch: Watch, part: Part) -> Iterable[Any]:
    def begin(*_: Any) -> None:
        watch.enter_part(part)

    def follow(module: nn.Module, args: Any, output: Any) -> None:
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)
                return

    return block.register_forward_pre_hook(begin), block.register_forward_hook(follow)


def add_up(counters: Iterable[Counter[str]]) -> Counter[str]:
    """The sum of counters, those of nothing included."""
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return total
