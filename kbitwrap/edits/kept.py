"""The record of what a forward leaves on the modules of the base.

Forwards leave caches, repacked codes, and flags that say so.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..model.bitsandbytes_layers import REPACKS
from ..model.quantization import KERNEL, transposed_codes
from ..model.tree import ModelTree, join
from .base import Fields, write_attribute
from .journal import MISSING, Slot, Undoing

# The types of the plain attributes that a module computes with, and may replace when it
# runs; and those told by value.
_COMPARED = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size}
_PLAIN = _COMPARED | {Tensor, tuple}
_CACHES = (list, dict)
# What every module has, its train mode among them, and what says whether a layer
# repacks its weight, which depends on whether that is sharded.
_OWN = frozenset(vars(nn.Module())) | {REPACKS}
# stands for a value that is not plain: whatever is there in the end stays
_OTHER = object()


class _Cache(NamedTuple):
    """A list or dict of plain values, with a copy of it."""

    value: Any
    contents: Any


class _Contents(NamedTuple):
    """The contents of a module."""

    # its attributes, buffers and children, each by name
    values: list[Fields]
    # the names of the buffers that no checkpoint holds
    unsaved: set[str]
    # the numbers of elements of its parameters
    sizes: dict[str, int]


class _Difference(NamedTuple):
    """A value that is to be put back: an attribute, a buffer or a child."""

    place: Fields  # the dictionary that the module has it in
    name: str
    found: Any
    was: Any  # the record of the value that was there before


class ForwardState(Slot):
    """The plain values, tensors, caches and buffers of the base's modules.

    Values that differ in the end are put back. A new plain value is removed only where
    a new tensor is removed too: alone, it may belong to a hook that stays. A new child
    without parameters that holds tensors is a cache; without tensors it is a kernel,
    and is removed with a buffer. A buffer of the checkpoint with its dtype and shape
    was trained or moved, and stays, as does all of a module whose parameters others
    replaced.
    """

    def __init__(self, tree: ModelTree) -> None:
        self._index = tree.index
        self._records = [tree.record(tensor) for tensor in tree.base_tensors]
        self._contents: dict[int | None, _Contents] = {}  # by the modules' numbers
        for node in tree.plain_base:
            module, values = node.module, []
            for place in _places(module):
                names = sorted(place.keys() - _OWN)
                values.append({name: _to_keep(place[name]) for name in names})
            unsaved = set(module._non_persistent_buffers_set)
            contents = _Contents(values, unsaved, _sizes(module))
            self._contents[self._index.numbers[module]] = contents

    def read(self, tree: ModelTree) -> ForwardState:
        """Return the slot of what modules hold now."""
        return ForwardState(tree)

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Put back what changed, on substitutes too.

        Values of other types that others put there stay.
        """
        # Resizing sets plain values on the modules around, as the vocabulary's size:
        # these stay.
        around = set()
        for _, tensor in tree.resized(self._records):
            for node in tree.nodes:
                if tensor.path.startswith(join(node.path, "")):
                    around.add(id(node.module))
        # the names of what was put back, by module
        names = {}
        for number, module in self._index.find(tree):
            is_substitute = module not in self._index.numbers
            if number in self._contents:
                names[module] = _put_back(
                    module,
                    self._contents[number],
                    only_tensors=is_substitute or id(module) in around,
                    is_shared=is_substitute,
                )

        for node in tree.modules:
            for name in names.get(node.module, []):
                if name != KERNEL:  # which a preparation sets itself
                    undoing.put_back.append(join(node.fqn, name))

    def resume(self, tree: ModelTree, value: ForwardState) -> None:
        """Put back what modules held."""
        value.undo(tree, Undoing())

    def undo_on(self, shell: nn.Module, module: nn.Module) -> None:
        """Put back on a module's shell what undoing would put back on the module."""
        contents = self._contents.get(self._index.numbers.get(module))
        if contents is not None:
            _put_back(shell, contents, is_shared=True)


def lay_as_stored(tree: ModelTree) -> None:
    """Lay codes as a checkpoint has them that layers of aqlm transposed.

    A layer transposes them again when it next runs.
    """
    for node in tree.modules:
        codes = transposed_codes(node.module)
        if codes is not None:
            vars(node.module)["gemv_op"] = None
            codes.data = codes.data.transpose(0, 1).contiguous()


def _places(module: nn.Module) -> tuple[Fields, ...]:
    """Return the dictionaries that a module has its attributes, buffers and children in."""
    return vars(module), module._buffers, module._modules


def _sizes(module: nn.Module) -> dict[str, int]:
    """Return the numbers of elements of a module's parameters; 0 where there is none."""
    sizes = {}
    for name, parameter in module._parameters.items():
        sizes[name] = 0 if parameter is None else parameter.numel()
    return sizes


def _is_plain(value: Any) -> bool:
    """Whether a value is of a kind that a module computes with, and may replace."""
    return type(value) in _PLAIN or isinstance(value, Enum)


def _to_keep(value: Any) -> Any:
    """Return the record of an attribute's value."""
    if _is_plain(value):
        return value
    if type(value) in _CACHES:
        members = value.values() if isinstance(value, dict) else value
        if all(map(_is_plain, members)):
            return _Cache(value, value.copy())
    return _OTHER


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, a list, a dict, or a module without parameters."""
    if isinstance(value, _Cache):
        value = value.contents
    if isinstance(value, nn.Module):
        value = [dict(vars(module)) for module in value.modules()]
    return [one for one in tree_leaves(value) if isinstance(one, Tensor)]


def _put_back(
    module: nn.Module,
    before: _Contents,
    *,
    only_tensors: bool = False,
    is_shared: bool = False,
) -> list[str]:
    """Put back what differs.

    Args:
        module: The module, or what stands for it.
        before: Its contents before.
        only_tensors: Whether plain values stay where no tensor differs.
        is_shared: Whether its lists and dicts are another module's, too.

    Returns:
        The names of what was put back, but for what was only moved to another device.
    """
    differences = _differences(module, before)
    if not differences or _sizes(module) != before.sizes:
        return []

    with_tensors = [d for d in differences if _tensors(d.found) or _tensors(d.was)]
    if only_tensors and not with_tensors:
        return []

    # New plain values are a forward's where it left a new tensor too.
    if not any(one.was is MISSING for one in with_tensors):
        differences = [one for one in differences if one.was is not MISSING]

    names = []
    for place, name, found, was in differences:
        value, is_moved = was, False
        if isinstance(was, _Cache):
            value = was.contents.copy()
            if not is_shared:
                was.value.clear()
                fill = was.value.update if isinstance(value, dict) else was.value.extend
                fill(value)
                value = was.value
        is_buffer = place is module._buffers
        if is_buffer and _are_alike(found, was):
            is_moved = found.device != was.device
        if is_buffer and isinstance(was, Tensor) and torch.is_tensor(found):
            # Buffers stay on the device that the model was moved to.
            value = was.to(found.device)
        write_attribute(place, name, value)
        if not is_moved:
            names.append(name)
        if is_buffer and not is_moved:
            # New children without parameters are kernels, made for the buffer.
            for kernel in module._modules.keys() - before.values[-1].keys():
                child = module._modules[kernel]
                if child is not None and next(child.parameters(), None) is None:
                    del module._modules[kernel]

    module._non_persistent_buffers_set = set(before.unsaved)
    return names


def _differences(module: nn.Module, contents: _Contents) -> list[_Difference]:
    """Return the values that are to be put back."""
    found = []
    for place, before in zip(_places(module), contents.values, strict=True):
        added = place.keys() - before.keys() - _OWN
        for name in (*before, *sorted(added)):
            there, was = place.get(name, MISSING), before.get(name, MISSING)
            if there is was or _is_to_stay(there, was):
                continue
            is_saved = name not in module._non_persistent_buffers_set
            if place is module._buffers and is_saved and _are_alike(there, was):
                continue  # it was trained or moved
            found.append(_Difference(place, name, there, was))

    return found


def _is_to_stay(found: Any, was: Any) -> bool:
    """Whether another value than there was is to stay: no forward left it."""
    if was is _OTHER:
        return True
    if isinstance(was, _Cache):
        if type(found) not in _CACHES:
            return True
        return [*map(id, _tensors(found))] == [*map(id, _tensors(was))]
    if type(found) is type(was) and type(found) in _COMPARED:
        return bool(found == was)
    if found is MISSING or _is_plain(found):
        return False
    if isinstance(found, nn.Module) and next(found.parameters(), None) is not None:
        return True
    is_cache = isinstance(found, nn.Module) or type(found) in _CACHES
    return not (is_cache and _tensors(found))


def _are_alike(value: Any, other: Any) -> bool:
    """Whether two buffers are tensors of one dtype and shape."""
    are_tensors = isinstance(value, Tensor) and isinstance(other, Tensor)
    return are_tensors and (value.dtype, value.shape) == (other.dtype, other.shape)
