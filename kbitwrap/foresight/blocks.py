"""A model with fewer blocks that tells what all of them do: those of one kind do the same to a device's memory.

A step goes through the blocks of a stack one after the other, forward and backward.
What happens in one is a `Run`: what it leaves, and how far it rises. Of each kind the
first and the last block are kept, and two between them; the runs of the others are
theirs. Nothing is fitted: every level is the sum of the runs before it. That it holds
is tried first, on a model with one block of each kind more, whose every run must come
out to the byte; else all blocks are run.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .fakes import tensors_in
from .ledger import BACKWARD, Ledger, Mark, Measure, Run, Times, in_bytes
from .tracker import Watch

T = TypeVar("T")

# An attribute that says where a block is: those of two blocks of one kind differ in it.
_PLACE = re.compile(r"(^|_)(idx|index|id|number|layer)$")
# A setting that lists blocks by number: what a model does with them is not in them.
_NUMBERS = re.compile(r"_(indexes|indices)$")
# Values of settings that are compared; of others, the classes are.
_PLAIN = (
    bool,
    int,
    float,
    str,
    torch.dtype,
    type(None),
)


class Part(NamedTuple):
    """A block.

    Attributes:
        stack: The number of its stack.
        number: Its own in the whole model.
    """

    stack: int
    number: int


class NotRepeatedError(Exception):
    """The blocks of a kind do not all do the same, or not one after the other: all have to be run."""


# blocks of each kind that are kept: the first and the last, and those between
_ENDS, _INNER = 2, 2


@dataclass(frozen=True)
class Pair:
    """Two kept blocks of a kind that must do the same.

    Attributes:
        one: The second block of the kind, which stands for those that are left out.
        other: The third.
        count: How many blocks of the whole model the one stands for, itself included.
    """

    one: Part
    other: Part
    count: int


@dataclass
class Stack:
    """The blocks that a model runs one after the other; some are left out.

    Attributes:
        number: Which of the model's stacks it is.
        blocks: The blocks that are left, in their order.
        config: The config of the module that holds them.
        kinds: The kind of each block of the whole model. Those of one kind do the same.
        kept: The numbers in the whole model of the blocks that are left.
    """

    number: int
    blocks: nn.ModuleList
    config: Any
    kinds: list[int]
    kept: list[int]

    @property
    def is_cut(self) -> bool:
        """Whether blocks are left out."""
        return len(self.kept) < len(self.kinds)

    def part(self, index: int) -> Part:
        """The kept block that stands for a block of the whole model.

        Args:
            index: The number of the block in the whole model.

        Returns:
            The block itself, or the second of its kind.
        """
        if index not in self.kept:
            index = self._kept_of(self.kinds[index])[1]
        return Part(self.number, index)

    def _kept_of(self, kind: int) -> list[int]:
        return [index for index in self.kept if self.kinds[index] == kind]

    def pairs(self, wanted: list[int]) -> list[Pair]:
        """The two kept blocks between the ends of each kind.

        Args:
            wanted: The blocks of the model whose step is told.

        Returns:
            A pair for each kind of which blocks may be left out.
        """
        kinds = [self.kinds[index] for index in wanted]
        pairs = []
        for kind in dict.fromkeys(kinds):
            kept = self._kept_of(kind)
            if len(kept) > _ENDS + 1:
                one = Part(self.number, kept[1])
                other = Part(self.number, kept[2])
                pairs.append(Pair(one, other, kinds.count(kind) - _ENDS))
        return pairs

    def fewest(self, num_inner: int) -> list[int]:
        """The numbers of the blocks to keep.

        Args:
            num_inner: How many between the first and the last of each kind are kept.

        Returns:
            The numbers in the whole model, in order.
        """
        by_kind: dict[int, list[int]] = {}
        for index, kind in enumerate(self.kinds):
            by_kind.setdefault(kind, []).append(index)
        found: set[int] = set()
        for indices in by_kind.values():
            found.update(indices[: num_inner + 1], indices[-1:])
        return sorted(found)

    def keep(self, wanted: list[int]) -> None:
        """Make a smaller model of the wanted blocks: number them from 0, and make the config one of so many.

        Args:
            wanted: The numbers in the whole model of blocks that are kept so far.
        """
        if wanted == self.kept:
            return
        places = [self.kept.index(index) for index in wanted]
        blocks = [self.blocks[place] for place in places]
        for number, block in enumerate(blocks):
            _renumber(block, places[number], number)
        # A module without a config has none, and a config may be a plain dict.
        fields = getattr(self.config, "__dict__", {})
        _shorten(fields, len(self.blocks), places)
        self.blocks._modules = {str(n): block for n, block in enumerate(blocks)}
        self.kept = wanted


def _renumber(block: nn.Module, old: int, new: int) -> None:
    """Give a block another place in its stack."""
    for module in block.modules():
        fields = vars(module)
        for name, value in fields.items():
            if _PLACE.search(name) and type(value) is int and value == old:
                fields[name] = new


def _shorten(fields: dict[str, Any], num_blocks: int, places: list[int]) -> None:
    """Make a config that tells of all blocks tell of some of them.

    Args:
        fields: The fields of the config; changed in place.
        num_blocks: How many it tells of.
        places: The places of those that it is to tell of.
    """
    for name, value in fields.items():
        if isinstance(value, (list, tuple)) and len(value) == num_blocks:
            fields[name] = type(value)(value[place] for place in places)
        elif "layer" in name and type(value) is int and value == num_blocks:
            fields[name] = len(places)


class Blocks:
    """The stacks of a model on the meta device.

    Args:
        model: The model, which loses the blocks that are not kept.
        is_exact: Whether to keep all of them.

    Attributes:
        stacks: The stacks, in the model's order.
        is_tried: Whether it was seen that blocks do the same as others of their kind.
    """

    def __init__(self, model: nn.Module, *, is_exact: bool) -> None:
        found = list(_outermost(model, None))
        holders = _holders([blocks for blocks, *_ in found])
        self.stacks = []
        for number, (blocks, config, holder) in enumerate(found):
            kinds = _kinds(blocks, holders)
            if _is_numbered(len(blocks), config, holder):
                kinds = list(range(len(blocks)))
            stack = Stack(
                number,
                blocks,
                config,
                kinds,
                list(range(len(kinds))),
            )
            self.stacks.append(stack)
        self.is_tried = False
        if not is_exact:
            self.keep(_INNER + 1)
        self._owners: dict[int, Part] = {}
        self.own()

    def own(self) -> None:
        """Note the modules in each block that is kept; again after blocks were given more."""
        for stack in self.stacks:
            for index, block in zip(stack.kept, stack.blocks, strict=True):
                for module in block.modules():
                    self._owners[id(module)] = Part(stack.number, index)

    def are_alike(self, model: nn.Module) -> bool:
        """Whether the blocks of each kind are still of one kind, after they were given more.

        Args:
            model: The model with all that it was given.
        """
        lists = [blocks for blocks, *_ in _outermost(model, None)]
        if lists != [stack.blocks for stack in self.stacks]:
            return False
        holders = _holders(lists)
        for stack in self.stacks:
            before = [stack.kinds[index] for index in stack.kept]
            now = zip(before, _kinds(stack.blocks, holders), strict=True)
            if len(set(now)) > len(set(before)):
                return False
        return True

    def keep(self, num_inner: int) -> None:
        """Keep so many blocks of each kind, between the first and the last."""
        for stack in self.stacks:
            stack.keep(stack.fewest(num_inner))

    @property
    def is_cut(self) -> bool:
        """Whether blocks are left out."""
        return any(stack.is_cut for stack in self.stacks)

    @property
    def num_kept(self) -> int:
        """The number of the blocks that are kept."""
        return sum(len(stack.kept) for stack in self.stacks)

    @property
    def num_all(self) -> int:
        """The number of the blocks of the whole model."""
        return sum(len(stack.kinds) for stack in self.stacks)

    def owner(self, module: nn.Module) -> Part | None:
        """The block that a module lies in, or ``None`` outside of all."""
        return self._owners.get(id(module))

    def whole(self, by_part: Mapping[Part | None, T]) -> Iterator[T]:
        """One value for each block of the whole model, from those of the kept blocks.

        Args:
            by_part: The values by block; that of ``None`` is the value of what lies in
                no block.

        Yields:
            The value of ``None`` first, then those of the blocks; of a block that has
            none, nothing.
        """
        if None in by_part:
            yield by_part[None]
        for stack in self.stacks:
            for index in range(len(stack.kinds)):
                part = stack.part(index)
                if part in by_part:
                    yield by_part[part]

    @contextlib.contextmanager
    def announced(self, watch: Watch) -> Iterator[None]:
        """Let each block tell a watch when it begins, forward and backward.

        Args:
            watch: The watch of a step.

        Yields:
            Nothing.
        """
        hooks = []
        for stack in self.stacks:
            for index, block in zip(stack.kept, stack.blocks, strict=True):
                part = Part(stack.number, index)
                is_first = index == stack.kept[0]
                hooks += _announce(block, watch, part, is_first)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def whole_step(self, ledger: Ledger, measure: Measure) -> list[Run]:
        """Tell the step of the whole model.

        Args:
            ledger: What was written down of the step with the kept blocks.
            measure: What is added up.

        Returns:
            The runs of all blocks, in order.
        """
        wanted = [list(range(len(stack.kinds))) for stack in self.stacks]
        return self._step_of(wanted, ledger, measure)

    def expect_repeated(self, with_more: Ledger, run: Callable[[], Ledger]) -> Ledger:
        """Leave out one block of each kind, and see that what is left tells the step with more.

        Args:
            with_more: The ledger of a step with all blocks that are kept so far.
            run: Runs a step, and returns its ledger.

        Returns:
            The ledger of a step with one block of each kind less.

        Raises:
            NotRepeatedError: Something grows with the number of blocks that is in none.
        """
        wanted = [stack.kept for stack in self.stacks]
        self.keep(_INNER)
        ledger = run()
        told = [_effect(run) for run in self._step_of(wanted, ledger, in_bytes)]
        if told != [_effect(run) for run in with_more.runs()]:
            raise NotRepeatedError("one block more does more than its own")
        self.is_tried = True
        return ledger

    def _step_of(
        self, wanted: list[list[int]], ledger: Ledger, measure: Measure
    ) -> list[Run]:
        """The runs of the step of a model with other blocks than those that were run.

        Args:
            wanted: The blocks of each stack, by their numbers in the whole model.
            ledger: What was written down of the step with the kept blocks.
            measure: What is added up.

        Returns:
            The runs, in order.

        Raises:
            NotRepeatedError: The blocks do not run one after the other, once each.
        """
        pairs: list[Pair] = []
        for stack in self.stacks:
            if stack.is_cut:
                pairs += stack.pairs(wanted[stack.number])
        runs = ledger.runs(measure, _times(ledger, pairs))
        by_mark = _once_each(runs, pairs)
        result: list[Run] = []
        seen = set()
        for place, group in itertools.groupby(runs, self._place):
            if not isinstance(place.part, int):
                result += group
                continue
            if place in seen:
                raise NotRepeatedError("something else runs between the blocks")
            seen.add(place)
            stack = self.stacks[place.part]
            parts = [stack.part(index) for index in wanted[stack.number]]
            if place.phase == BACKWARD:
                parts.reverse()
            for part in parts:
                mark = Mark(place.phase, part, place.turn)
                if mark in by_mark:
                    result.append(by_mark[mark])
        return result

    def _place(self, run: Run) -> Mark:
        """The phase of a run, and the number of the stack whose blocks repeat it; ``None`` for what none does."""
        phase, part, turn = run.mark
        if isinstance(part, Part) and self.stacks[part.stack].is_cut:
            return Mark(phase, part.stack, turn)
        return Mark(phase)


def _times(ledger: Ledger, pairs: list[Pair]) -> Times:
    """How often a run frees what a block made, where it frees that of all blocks of the kind.

    Blocks free what they made themselves, or what the one before them made. A run that
    frees what both blocks of a pair made, and is neither's, frees it for all that they
    stand for.
    """
    times: dict[tuple[Mark, Mark], int] = {}
    for span in ledger.spans:
        freed = {storage.origin for storage, is_made in span.events if not is_made}
        for pair in pairs:
            if span.mark.part in (pair.one, pair.other):
                continue
            for origin in freed:
                other = origin._replace(part=pair.other)
                if origin.part == pair.one and other in freed:
                    times[span.mark, origin] = pair.count - 1
    return times


def _once_each(runs: list[Run], pairs: list[Pair]) -> dict[Mark, Run]:
    """Find the runs by their marks.

    Args:
        runs: The runs of the kept blocks.
        pairs: The blocks that must do the same.

    Returns:
        The first run of each mark.

    Raises:
        NotRepeatedError: A block runs more than once, or does not do what the other of its
            pair does.
    """
    by_mark: dict[Mark, Run] = {}
    for run in runs:
        if run.mark in by_mark and run.mark.part is not None:
            raise NotRepeatedError(f"{run.mark} more than once")
        by_mark.setdefault(run.mark, run)
    passes = dict.fromkeys((mark.phase, mark.turn) for mark in by_mark)
    for pair in pairs:
        for phase, turn in passes:
            one = by_mark.get(Mark(phase, pair.one, turn))
            other = by_mark.get(Mark(phase, pair.other, turn))
            if _effect(one) != _effect(other):
                raise NotRepeatedError(f"two blocks of one kind differ in {phase}")
    return by_mark


def _effect(run: Run | None) -> Any:
    """The effect of a run on memory.

    Runs that do the same have equal ones, and those of blocks that do not run.
    """
    return None if run is None else (run.mark.phase, run.net, run.at_peak)


def _outermost(
    module: nn.Module, config: Any
) -> Iterator[tuple[nn.ModuleList, Any, nn.Module]]:
    """The lists of modules that lie in no other, each with the config of the module around it, and that module."""
    config = getattr(module, "config", config)
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield child, config, module
        else:
            yield from _outermost(child, config)


def _is_numbered(num_blocks: int, config: Any, holder: nn.Module) -> bool:
    """Whether a model tells blocks of a stack apart by their numbers, such as those that attend to whole images.

    Args:
        num_blocks: How many blocks the stack has.
        config: The config around it.
        holder: The module that runs it.
    """
    settings = dict(vars(holder))
    for name, value in getattr(config, "__dict__", {}).items():
        if _NUMBERS.search(name):
            settings[name] = value
    return any(_are_numbers(value, num_blocks) for value in settings.values())


def _are_numbers(value: Any, num_blocks: int) -> bool:
    """Whether a setting lists some blocks of a stack by their numbers."""
    if not isinstance(value, (list, tuple)) or not 0 < len(value) < num_blocks:
        return False
    return all(type(one) is int and 0 <= one < num_blocks for one in value)


def _holders(lists: Iterable[nn.ModuleList]) -> Counter[int]:
    """The number of blocks that each parameter lies in, by its id.

    No other block does what one does that shares parameters: they are held, and get a
    gradient, once.
    """
    holders: Counter[int] = Counter()
    for blocks in lists:
        for block in blocks:
            holders.update(map(id, block.parameters()))
    return holders


def _kinds(blocks: nn.ModuleList, holders: Mapping[int, int]) -> list[int]:
    """Sort the blocks of a stack into kinds.

    Args:
        blocks: The blocks.
        holders: The number of blocks that each parameter lies in, by its id.

    Returns:
        The kind of each block, by number.
    """
    kinds: list[int] = []
    numbers: dict[Hashable, int] = {}
    is_trained = False
    for index, block in enumerate(blocks):
        parameters = list(block.parameters())
        # Gradients flow no further back than the first parameter that is trained.
        is_trained = is_trained or any(one.requires_grad for one in parameters)
        is_shared = any(holders[id(one)] > 1 for one in parameters)
        kind = (
            is_trained,
            index if is_shared else None,
            _signature(block),
        )
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return kinds


def _signature(module: nn.Module) -> Hashable:
    """A block's classes, settings, and shapes and dtypes of tensors: alike in blocks that do the same."""
    settings: list[Hashable] = []
    for name, value in vars(module).items():
        if not name.startswith("_") and not _PLACE.search(name):
            is_plain = isinstance(value, _PLAIN)
            settings.append((name, value if is_plain else type(value)))
    stored = {**module._parameters, **module._buffers}
    tensors: list[Hashable] = []
    for name, one in stored.items():
        if one is not None:
            shape = tuple(one.shape)
            tensors.append((name, type(one), shape, one.dtype, one.requires_grad))
    children: list[Hashable] = []
    for name, child in module.named_children():
        children.append((name, _signature(child)))
    return (
        type(module),
        tuple(settings),
        tuple(tensors),
        len(module._forward_hooks),
        len(module._forward_pre_hooks),
        tuple(children),
    )


def _announce(block: nn.Module, watch: Watch, part: Part, is_first: bool) -> list[Any]:
    def begin(*_: Any) -> None:
        watch.enter_part(part, is_first=is_first)

    def follow(module: nn.Module, args: Any, output: Any) -> None:
        for value in tensors_in(output):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)
                return

    return [block.register_forward_pre_hook(begin), block.register_forward_hook(follow)]
