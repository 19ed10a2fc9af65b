"""A model with fewer blocks that tells what all of them do: those of one kind do the same to a device's memory.

A step goes through the blocks of a stack one after the other, forward and backward.
What happens in one is a `Span`: what it makes and frees. Of each kind the first and the
last block are kept, and two between them; the spans of the others are theirs. Nothing
is fitted: every level is the sum of what happens before it. That it holds is tried
first, on a model with one block of each kind more, whose every span must come out to
the byte; else all blocks are run.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from .fakes import tensors_in
from .ledger import (
    BACKWARD,
    Ledger,
    Position,
    Sizes,
    Span,
    highest_levels,
)
from .tracker import Watch

T = TypeVar("T")

# An attribute that says where a block is: those of two blocks of one kind differ in it.
_PLACE = re.compile(r"(^|_)(idx|index|id|number|layer)$")
# A setting that lists blocks by number: what a model does with them is not in them.
_NUMBERS = re.compile(r"_(indexes|indices)$")
# Values of settings that are compared; of others, the classes are.
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
# of each kind are kept the first and the last block, and so many between
_INNER = 2


class NotRepeatedError(Exception):
    """The blocks of a kind do not all do the same, or not one after the other: all have to be run."""


class BlockId(NamedTuple):
    """A block, by the number of its stack and its own number in the whole model.

    Attributes:
        stack: The number of its stack.
        number: Its own number.
    """

    stack: int
    number: int


class Stack:
    """The blocks that a model runs one after the other; some are left out.

    Args:
        number: Which of the model's stacks it is.
        blocks: The blocks.
        config: The config of the module that holds them.
        kinds: The kind of each block. Those of one kind do the same.

    Attributes:
        blocks: The blocks that are left, in their order.
        kinds: The kind of each block of the whole model.
        kept: The numbers in the whole model of the blocks that are left.
        parts: For each block of the whole model, the one that stands for it: itself, or
            the second of its kind.
        neighbours: For each block that stands for others, the next of its kind, which must
            do the same.
    """

    def __init__(
        self, number: int, blocks: nn.ModuleList, config: Any, kinds: list[int]
    ) -> None:
        self._number = number
        self.blocks = blocks
        self._config = config
        self.kinds = kinds
        self.kept = list(range(len(kinds)))
        self.parts = [BlockId(number, index) for index in self.kept]
        self.neighbours: dict[BlockId, BlockId] = {}

    @property
    def is_cut(self) -> bool:
        """Whether blocks are left out."""
        return len(self.kept) < len(self.kinds)

    def cut(self, num_inner: int) -> None:
        """Leave out blocks: number the others from 0, and make the config one of so many.

        Args:
            num_inner: How many between the first and the last of each kind are kept.
                A second call may keep fewer.
        """
        wanted = list(range(len(self.kinds)))
        for kind in set(self.kinds):
            of_kind = [number for number in wanted if self.kinds[number] == kind]
            left_out = of_kind[num_inner + 1 : -1]
            if left_out:  # the second stands for them, and the third must do the same
                one, other = (BlockId(self._number, number) for number in of_kind[1:3])
                self.neighbours[one] = other
                for number in left_out:
                    wanted.remove(number)
                    self.parts[number] = one
        places = [self.kept.index(number) for number in wanted]
        blocks = [self.blocks[place] for place in places]
        for number, block in enumerate(blocks):
            for module in block.modules():
                fields = vars(module)
                for name, value in fields.items():
                    is_place = _PLACE.search(name) and type(value) is int
                    if is_place and value == places[number]:
                        fields[name] = number
        # A module without a config has none, and a config may be a plain dict.
        settings = getattr(self._config, "__dict__", {})
        num_blocks = len(self.blocks)
        for name, value in settings.items():
            if isinstance(value, (list, tuple)) and len(value) == num_blocks:
                settings[name] = type(value)(value[place] for place in places)
            elif "layer" in name and type(value) is int and value == num_blocks:
                settings[name] = len(places)
        self.blocks._modules = {str(n): block for n, block in enumerate(blocks)}
        self.kept = wanted


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
        seen: set[int] = set()
        for blocks, *_ in found:
            for block in blocks:
                parameters = set(map(id, block.parameters()))
                # Shared parameters are held, and get a gradient, once.
                is_exact = is_exact or not seen.isdisjoint(parameters)
                seen |= parameters
        self.stacks = []
        for number, (blocks, config, holder) in enumerate(found):
            kinds = _kinds(blocks)
            if _is_numbered(len(blocks), config, holder):
                kinds = list(range(len(blocks)))
            self.stacks.append(Stack(number, blocks, config, kinds))
        self.is_tried = False
        if not is_exact:
            for stack in self.stacks:
                stack.cut(_INNER + 1)

    @property
    def is_cut(self) -> bool:
        """Whether blocks are left out."""
        return self.num_kept < self.num_all

    @property
    def num_kept(self) -> int:
        """The number of the blocks that are kept."""
        return sum(len(stack.kept) for stack in self.stacks)

    @property
    def num_all(self) -> int:
        """The number of the blocks of the whole model."""
        return sum(len(stack.kinds) for stack in self.stacks)

    def _parts(self) -> Iterator[tuple[nn.Module, BlockId]]:
        """Yield the kept blocks."""
        for stack in self.stacks:
            for number, block in zip(stack.kept, stack.blocks, strict=True):
                yield block, stack.parts[number]

    def owners(self) -> dict[int, BlockId]:
        """Return the block that each module in a block lies in, by the id of the module."""
        found: dict[int, BlockId] = {}
        for block, part in self._parts():
            found |= dict.fromkeys(map(id, block.modules()), part)
        return found

    def whole(self, by_part: Mapping[BlockId | None, T]) -> Iterator[T]:
        """Yield one value for each block of the whole model, from those of the kept blocks.

        Args:
            by_part: The values by block; that of ``None`` is the value of what lies in
                no block.

        Yields:
            The value of ``None`` first, then one for each block of the whole model; a
            block without a value is skipped.
        """
        parts: list[BlockId | None] = [None]
        for stack in self.stacks:
            parts += stack.parts
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

        def follow(begin: Any, module: nn.Module, args: Any, output: Any) -> None:
            for value in tensors_in(output):
                if value.grad_fn is not None:
                    value.grad_fn.register_prehook(begin)
                    return

        with contextlib.ExitStack() as hooks:
            for block, part in self._parts():
                begin = partial(watch.enter_part, part, part.number == 0)
                before = block.register_forward_pre_hook(begin)
                after = block.register_forward_hook(partial(follow, begin))
                hooks.callback(before.remove)
                hooks.callback(after.remove)
            yield

    def drop_one_and_compare(
        self, with_more: Ledger, run: Callable[[], Ledger]
    ) -> Ledger:
        """Leave out one block of each kind, and see that a step of those left tells that of the model with one more.

        Args:
            with_more: The ledger of a step with all blocks that are kept so far.
            run: Runs a step, and returns its ledger.

        Returns:
            The ledger of a step with one block of each kind less.

        Raises:
            NotRepeatedError: The blocks do not run one after the other, once each, or
                something grows with their number that is in none.
        """
        wanted = []
        for stack in self.stacks:
            before = stack.kept
            stack.cut(_INNER)
            wanted.append([stack.parts[number] for number in before])
        ledger = run()
        told = self.whole_step(ledger, wanted)
        if list(map(_effect, told)) != list(map(_effect, with_more.spans)):
            raise NotRepeatedError("one block more does more than its own")
        self.is_tried = True
        return ledger

    def whole_step(
        self, ledger: Ledger, wanted: list[list[BlockId]] | None = None
    ) -> list[Span]:
        """Tell the spans of the step of a model with other blocks than those that were run.

        Args:
            ledger: What was written down of the step with the kept blocks.
            wanted: For each block of each stack, the kept one that stands for it; by
                default for all blocks of the whole model.

        Returns:
            The spans, in order.

        Raises:
            NotRepeatedError: A block does not do what the next one of its kind does.
        """
        neighbours: dict[Any, BlockId] = {}
        for stack in self.stacks:
            neighbours |= stack.neighbours
        parts = wanted or [stack.parts for stack in self.stacks]
        counts: Counter[Any] = Counter()
        for of_stack in parts:
            counts.update(of_stack)
        spans = []
        for mark, events in ledger.spans:
            freed = {storage.origin for storage, number in events if number < 0}
            # What a span outside of the blocks, as of the loss, frees of the second and
            # just so of the third block of a kind, it frees of each block that the second
            # stands for: it is counted as often. A span of these two blocks is itself
            # repeated, below.
            count_of = {}
            for origin in freed:
                other = neighbours.get(origin.part)
                is_of_all = origin._replace(part=other) in freed
                if other and is_of_all and mark.part not in (origin.part, other):
                    count_of[origin] = counts[origin.part]
            counted = []
            for storage, number in events:
                if number < 0:
                    number *= count_of.get(storage.origin, 1)
                counted.append((storage, number))
            spans.append(Span(mark, counted))
        by_mark = {span.mark: span for span in spans}
        for span in spans:
            other = neighbours.get(span.mark.part)
            same = by_mark.get(span.mark._replace(part=other))
            if other and (same is None or _effect(span) != _effect(same)):
                raise NotRepeatedError(f"two blocks of one kind differ in {span.mark}")
        # In the place of the kept blocks' spans in a pass through a cut stack come those of
        # all of its blocks, in their order, where the first of the kept ones was.
        result = []
        done = set()
        for span in spans:
            phase, part, turn = span.mark
            if not isinstance(part, BlockId) or not self.stacks[part.stack].is_cut:
                result.append(span)
                continue
            one_pass = phase, part.stack, turn
            if one_pass in done:
                continue
            done.add(one_pass)
            order = parts[part.stack]
            for one in reversed(order) if phase == BACKWARD else order:
                mark = Position(phase, one, turn)
                if mark in by_mark:
                    result.append(by_mark[mark])
        return result


def _effect(span: Span) -> Any:
    """Return what a span changes in memory in the end and at most, which is equal for spans that do the same."""
    net = Sizes()
    for storage, number in span.events:
        net[storage.kind] += number * storage.num_bytes
    return net, highest_levels(Sizes(), [span])


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
    """Return whether a model treats blocks of a stack differently by their numbers.

    Vision models list those that attend to the whole image.

    Args:
        num_blocks: How many blocks the stack has.
        config: The config around it.
        holder: The module that runs it.
    """
    lists = list(vars(holder).values())
    for name, value in getattr(config, "__dict__", {}).items():
        if _NUMBERS.search(name):
            lists.append(value)
    for numbers in lists:
        if not isinstance(numbers, (list, tuple)):
            continue
        are_numbers = all(type(n) is int and 0 <= n < num_blocks for n in numbers)
        if are_numbers and 0 < len(numbers) < num_blocks:
            return True
    return False


def _kinds(blocks: nn.ModuleList) -> list[int]:
    """Return the kind of each block of a stack."""
    kinds = []
    numbers: dict[Hashable, int] = {}
    is_trained = False
    for block in blocks:
        # Gradients flow no further back than the first parameter that is trained.
        if any(parameter.requires_grad for parameter in block.parameters()):
            is_trained = True
        kind = is_trained, _signature(block)
        kinds.append(numbers.setdefault(kind, len(numbers)))
    return kinds


def _signature(block: nn.Module) -> Hashable:
    """Return a block's classes, settings, and shapes and dtypes of tensors: alike in blocks that do the same."""
    settings = []
    for path, module in block.named_modules():
        num_hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        settings += [path, type(module), num_hooks]
        for name, value in vars(module).items():
            if not name.startswith("_") and not _PLACE.search(name):
                is_plain = isinstance(value, _PLAIN)
                settings += [name, value if is_plain else type(value)]
        for name, one in {**module._parameters, **module._buffers}.items():
            if one is not None:
                settings += [name, type(one), one.shape, one.dtype, one.requires_grad]
    return tuple(settings)
