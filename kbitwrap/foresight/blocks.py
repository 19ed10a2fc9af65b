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
from .ledger import BACKWARD, Ledger, Measure, Position, Run, Times, in_bytes
from .tracker import Watch

T = TypeVar("T")

# An attribute that says where a block is: those of two blocks of one kind differ in it.
_PLACE = re.compile(r"(^|_)(idx|index|id|number|layer)$")
# A setting that lists blocks by number: what a model does with them is not in them.
_NUMBERS = re.compile(r"_(indexes|indices)$")
# Values of settings that are compared; of others, the classes are.
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
# blocks of each kind that are kept: the first and the last, and those between
_ENDS, _INNER = 2, 2


class NotRepeatedError(Exception):
    """The blocks of a kind do not all do the same, or not one after the other: all have to be run."""


class Part(NamedTuple):
    """A block.

    Attributes:
        stack: The number of its stack.
        number: Its own in the whole model.
    """

    stack: int
    number: int


class Pair(NamedTuple):
    """Two kept blocks of a kind that must do the same.

    Attributes:
        one: The second block of the kind, which stands for those that are left out.
        other: The third.
        num_blocks: How many blocks of the whole model the one stands for, itself included.
    """

    one: Part
    other: Part
    num_blocks: int


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
        """Return the kept block that stands for one of the whole model: itself, or the second of its kind."""
        if index not in self.kept:
            index = self._kept_of(self.kinds[index])[1]
        return Part(self.number, index)

    def _kept_of(self, kind: int) -> list[int]:
        return [index for index in self.kept if self.kinds[index] == kind]

    def pairs(self, wanted: list[int]) -> Iterator[Pair]:
        """Yield the two kept blocks between the ends of each kind of which blocks may be left out.

        Args:
            wanted: The blocks of the model whose step is told.
        """
        counts = Counter(self.kinds[index] for index in wanted)
        for kind, count in counts.items():
            kept = self._kept_of(kind)
            if len(kept) > _ENDS + 1:
                one, other = (Part(self.number, index) for index in kept[1:3])
                yield Pair(one, other, count - _ENDS)

    def keep(self, num_inner: int) -> None:
        """Leave out blocks: number the others from 0, and make the config one of so many.

        Args:
            num_inner: How many between the first and the last of each kind are kept.
        """
        wanted: set[int] = set()
        for kind in set(self.kinds):
            kept = self._kept_of(kind)
            wanted.update(kept[: num_inner + 1], kept[-1:])
        places = [self.kept.index(index) for index in sorted(wanted)]
        if len(places) == len(self.kept):
            return
        blocks = [self.blocks[place] for place in places]
        for number, block in enumerate(blocks):
            for module in block.modules():
                fields = vars(module)
                for name, value in fields.items():
                    is_place = _PLACE.search(name) and type(value) is int
                    if is_place and value == places[number]:
                        fields[name] = number
        # A module without a config has none, and a config may be a plain dict.
        settings = getattr(self.config, "__dict__", {})
        num_blocks = len(self.blocks)
        for name, value in settings.items():
            if isinstance(value, (list, tuple)) and len(value) == num_blocks:
                settings[name] = type(value)(value[place] for place in places)
            elif "layer" in name and type(value) is int and value == num_blocks:
                settings[name] = len(places)
        self.blocks._modules = {str(n): block for n, block in enumerate(blocks)}
        self.kept = sorted(wanted)


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
        holders = _holders(blocks for blocks, *_ in found)
        self.stacks = []
        for number, (blocks, config, holder) in enumerate(found):
            indices = list(range(len(blocks)))
            kinds = _kinds(blocks, holders)
            if _is_numbered(len(blocks), config, holder):
                kinds = indices
            self.stacks.append(Stack(number, blocks, config, kinds, indices))
        self.is_tried = False
        if not is_exact:
            self._keep(_INNER + 1)

    def _keep(self, num_inner: int) -> None:
        for stack in self.stacks:
            stack.keep(num_inner)

    def are_alike(self, model: nn.Module) -> bool:
        """Return whether the blocks of each kind are still of one kind, after they were given more.

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

    def _parts(self) -> Iterator[tuple[nn.Module, Part]]:
        """Yield the kept blocks."""
        for stack in self.stacks:
            for index, block in zip(stack.kept, stack.blocks, strict=True):
                yield block, Part(stack.number, index)

    def owners(self) -> dict[int, Part]:
        """Return the block that each module in a block lies in, by the id of the module."""
        found: dict[int, Part] = {}
        for block, part in self._parts():
            found |= dict.fromkeys(map(id, block.modules()), part)
        return found

    def whole(self, by_part: Mapping[Part | None, T]) -> Iterator[T]:
        """Yield one value for each block of the whole model, from those of the kept blocks.

        Args:
            by_part: The values by block; that of ``None`` is the value of what lies in
                no block.

        Yields:
            The value of ``None`` first, then those of the blocks; of a block that has
            none, nothing.
        """
        parts: list[Part | None] = [None]
        for stack in self.stacks:
            parts += map(stack.part, range(len(stack.kinds)))
        for part in parts:
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
        with contextlib.ExitStack() as hooks:
            for block, part in self._parts():
                for hook in self._announce(block, watch, part):
                    hooks.callback(hook.remove)
            yield

    def _announce(self, block: nn.Module, watch: Watch, part: Part) -> list[Any]:
        is_first = part.number == self.stacks[part.stack].kept[0]

        def begin(*_: Any) -> None:
            watch.enter_part(part, is_first=is_first)

        def follow(module: nn.Module, args: Any, output: Any) -> None:
            for value in tensors_in(output):
                if value.grad_fn is not None:
                    value.grad_fn.register_prehook(begin)
                    return

        return [
            block.register_forward_pre_hook(begin),
            block.register_forward_hook(follow),
        ]

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
        self._keep(_INNER)
        ledger = run()
        told = [_effect(run) for run in self._step_of(wanted, ledger, in_bytes)]
        if told != [_effect(run) for run in with_more.runs()]:
            raise NotRepeatedError("one block more does more than its own")
        self.is_tried = True
        return ledger

    def _step_of(
        self, wanted: list[list[int]], ledger: Ledger, measure: Measure
    ) -> list[Run]:
        """Tell the runs of the step of a model with other blocks than those that were run.

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
        by_position = _once_each(runs, pairs)
        result: list[Run] = []
        seen = set()
        for pass_, group in itertools.groupby(runs, self._pass_of):
            if pass_ is None:
                result += group
                continue
            if pass_ in seen:
                raise NotRepeatedError("something else runs between the blocks")
            seen.add(pass_)
            phase, number, turn = pass_
            parts = [self.stacks[number].part(index) for index in wanted[number]]
            if phase == BACKWARD:
                parts.reverse()
            for part in parts:
                position = Position(phase, part, turn)
                if position in by_position:
                    result.append(by_position[position])
        return result

    def _pass_of(self, run: Run) -> tuple[str, int, int] | None:
        """Return the pass through a cut stack that a run is in: phase, stack and turn; ``None`` for what is in none."""
        phase, part, turn = run.mark
        if isinstance(part, Part) and self.stacks[part.stack].is_cut:
            return phase, part.stack, turn
        return None


def _times(ledger: Ledger, pairs: list[Pair]) -> Times:
    """Count how often a run frees what a block made, where it frees that of all blocks of the kind.

    Blocks free what they made themselves, or what the one before them made. A run that
    is in neither block of a pair, and frees what both made, frees as much for each block
    that they stand for.
    """
    times: dict[tuple[Position, Position], int] = {}
    for span in ledger.spans:
        freed = {storage.origin for storage, is_made in span.events if not is_made}
        for pair in pairs:
            if span.mark.part in (pair.one, pair.other):
                continue
            for origin in freed:
                other = origin._replace(part=pair.other)
                if origin.part == pair.one and other in freed:
                    times[span.mark, origin] = pair.num_blocks - 1
    return times


def _once_each(runs: list[Run], pairs: list[Pair]) -> dict[Position, Run]:
    """Find the runs by their positions.

    Args:
        runs: The runs of the kept blocks.
        pairs: The blocks that must do the same.

    Returns:
        The first run of each position.

    Raises:
        NotRepeatedError: A block runs more than once, or does not do what the other of its
            pair does.
    """
    by_position: dict[Position, Run] = {}
    for run in runs:
        if run.mark in by_position and run.mark.part is not None:
            raise NotRepeatedError(f"{run.mark} more than once")
        by_position.setdefault(run.mark, run)
    passes = dict.fromkeys(position._replace(part=None) for position in by_position)
    for pair in pairs:
        for one_pass in passes:
            one = by_position.get(one_pass._replace(part=pair.one))
            other = by_position.get(one_pass._replace(part=pair.other))
            if _effect(one) != _effect(other):
                raise NotRepeatedError(
                    f"two blocks of one kind differ in {one_pass.phase}"
                )
    return by_position


def _effect(run: Run | None) -> Any:
    """Return the effect of a run on memory, which is equal for runs that do the same."""
    return None if run is None else (run.mark.phase, run.net, run.at_peak)


def _outermost(
    module: nn.Module, config: Any
) -> Iterator[tuple[nn.ModuleList, Any, nn.Module]]:
    """Yield the lists of modules that lie in no other, each with the config around it, and the module that holds it."""
    config = getattr(module, "config", config)
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield child, config, module
        else:
            yield from _outermost(child, config)


def _is_numbered(num_blocks: int, config: Any, holder: nn.Module) -> bool:
    """Return whether a model tells blocks of a stack apart by their numbers, such as those that attend to whole images.

    Args:
        num_blocks: How many blocks the stack has.
        config: The config around it.
        holder: The module that runs it.
    """
    values = list(vars(holder).values())
    for name, value in getattr(config, "__dict__", {}).items():
        if _NUMBERS.search(name):
            values.append(value)
    lists = [value for value in values if isinstance(value, (list, tuple))]
    for numbers in lists:
        are_numbers = all(type(n) is int and 0 <= n < num_blocks for n in numbers)
        if are_numbers and 0 < len(numbers) < num_blocks:
            return True
    return False


def _holders(lists: Iterable[nn.ModuleList]) -> Counter[int]:
    """Count the blocks that each parameter lies in, by its id.

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
        kind = is_trained, index if is_shared else None, _signature(block)
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return kinds


def _signature(module: nn.Module) -> Hashable:
    """Return a block's classes, settings, and shapes and dtypes of tensors: alike in blocks that do the same."""
    settings: list[Any] = [
        type(module),
        len(module._forward_hooks),
        len(module._forward_pre_hooks),
    ]
    for name, value in vars(module).items():
        if not name.startswith("_") and not _PLACE.search(name):
            is_plain = isinstance(value, _PLAIN)
            settings.append((name, value if is_plain else type(value)))
    for name, one in {**module._parameters, **module._buffers}.items():
        if one is not None:
            kind = type(one), one.shape, one.dtype, one.requires_grad
            settings.append((name, kind))
    for name, child in module.named_children():
        settings.append((name, _signature(child)))
    return tuple(settings)
