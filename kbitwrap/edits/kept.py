"""The record of what a forward leaves on the modules of the base.

Forwards leave caches, repacked codes, and flags that say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..model.bitsandbytes_layers import REPACKS
from ..model.quantization import KERNEL, transposed_codes
from ..model.tree import ModelTree, Node, join
from .base import Fields, write_attribute
from .journal import MISSING

# The types of the plain attributes that a module computes with, and may replace when it
# runs; and those told by value.
_COMPARED = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size}
_PLAIN = _COMPARED | {torch.Tensor, tuple}
_CACHES = (list, dict)
# What every module has, its train mode among them, and what says whether a layer
# repacks its weight, which depends on whether that is sharded.
_OWN = frozenset(vars(nn.Module())) | {REPACKS}
# stands for a value that is not plain: whatever is there in the end stays
_OTHER = object()


@dataclass
class _Cache:
    """A list or dict of plain values, with a copy of it."""

    value: Any
    contents: Any

    def refilled(self) -> Any:
        """The list or dict itself, with what it held."""
        self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(self.contents)
        else:
            self.value.extend(self.contents)

        return self.value


@dataclass
class _Kept:
    """A module as it was.

    Attributes:
        values: Its attributes, buffers and children, each by name.
        unsaved: The names of the buffers that no checkpoint holds.
        sizes: The numbers of elements of its parameters.
    """

    values: list[Fields]
    unsaved: set[str]
    sizes: dict[str, int]


@dataclass
class _Difference:
    """A value that is to be put back: an attribute, a buffer or a child.

    Attributes:
        place: The dictionary that the module has it in.
        name: Its name there.
        found: The value that was found.
        was: The record of the value that was there before.
    """

    place: Fields
    name: str
    found: Any
    was: Any

    def has_tensors(self) -> bool:
        """Whether the value holds tensors, or held some."""
        return bool(_tensors(self.found) or _tensors(self.was))

    def was_moved(self) -> bool:
        """Whether it is a tensor that was moved to another device, and no more."""
        if not _are_alike(self.found, self.was):
            return False
        return bool(self.found.device != self.was.device)


class KeptChange:
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
        self._records = tree.base_records
        # by the numbers of the modules
        self._kept: dict[int | None, _Kept] = {}
        for node in tree.plain_base:
            self._kept[self._index.number(node.module)] = _read(node.module)

        # the names of what the last undo put back
        self.put_back: tuple[str, ...] = ()

    def undo(self, tree: ModelTree) -> None:
        """Put back what changed, on substitutes too.

        Values of other types that others put there stay.
        """
        # Resizing sets plain values on the modules around, as the vocabulary's size:
        # these stay.
        resized = [tensor.path for _, tensor in tree.resized(self._records)]
        around = {id(node.module) for node in tree.nodes if _holds_any(node, resized)}
        # the names of what was put back, by module
        found: dict[nn.Module, list[str]] = {}
        for number, module in self._index.live() + self._index.substitutes(tree):
            kept = self._kept.get(number)
            if kept is None:
                continue
            is_substitute = self._index.number(module) is None
            found[module] = _put_back(
                module,
                kept,
                only_tensors=is_substitute or id(module) in around,
                is_shared=is_substitute,
            )

        put_back = []
        for node in tree.modules:
            names = found.get(node.module, [])
            # A preparation sets the kernel itself.
            put_back += [join(node.fqn, name) for name in names if name != KERNEL]

        self.put_back = tuple(put_back)

    def now(self, tree: ModelTree) -> KeptChange:
        """Record what modules keep now."""
        return KeptChange(tree)

    def undo_on(self, shell: nn.Module, module: nn.Module) -> None:
        """Put back on a module's shell what undoing would put back on the module."""
        kept = self._kept.get(self._index.number(module))
        if kept is not None:
            _put_back(shell, kept, is_shared=True)


def lay_as_stored(tree: ModelTree) -> None:
    """Lay codes as a checkpoint has them that layers of aqlm transposed.

    A layer transposes them again when it next runs.
    """
    for node in tree.modules:
        codes = transposed_codes(node.module)
        if codes is not None:
            vars(node.module)["gemv_op"] = None
            codes.data = codes.data.transpose(0, 1).contiguous()


def _holds_any(node: Node, paths: Iterable[str]) -> bool:
    """Whether a module holds any of the tensors at these paths."""
    return any(path.startswith(join(node.path, "")) for path in paths)


def _places(module: nn.Module) -> tuple[Fields, ...]:
    """The dictionaries that a module has its attributes, buffers and children in."""
    return vars(module), module._buffers, module._modules


def _read(module: nn.Module) -> _Kept:
    """Record a module as it is."""
    values: list[Fields] = []
    for place in _places(module):
        names = sorted(place.keys() - _OWN)
        values.append({name: _to_keep(place[name]) for name in names})

    return _Kept(values, set(module._non_persistent_buffers_set), _sizes(module))


def _to_keep(value: Any) -> Any:
    """The record of an attribute's value."""
    if type(value) in _PLAIN or isinstance(value, Enum):
        return value

    if type(value) in _CACHES and all(map(_is_plain, _members(value))):
        return _Cache(value, value.copy())

    return _OTHER


def _is_plain(value: Any) -> bool:
    """Whether a value is of a kind that a module computes with, and may replace."""
    return type(value) in _PLAIN or isinstance(value, Enum)


def _members(cache: Any) -> Iterable[Any]:
    """The values in a list or dict."""
    return cache.values() if isinstance(cache, dict) else cache


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a value is made of.

    They are in a list or dict, or in the tuples and lists in it, or in a child module.
    """
    if isinstance(value, _Cache):
        value = value.contents

    found: list[Any] = []
    if isinstance(value, nn.Module):
        for module in value.modules():
            found += [*module._buffers.values(), *vars(module).values()]
    elif type(value) in _CACHES:
        for member in _members(value):
            found += member if isinstance(member, (tuple, list)) else [member]
    else:
        found.append(value)

    return [one for one in found if isinstance(one, torch.Tensor)]


def _sizes(module: nn.Module) -> dict[str, int]:
    """The numbers of elements of a module's parameters; 0 where there is none."""
    sizes = {}
    for name, parameter in module._parameters.items():
        sizes[name] = 0 if parameter is None else parameter.numel()

    return sizes


def _put_back(
    module: nn.Module,
    kept: _Kept,
    *,
    only_tensors: bool = False,
    is_shared: bool = False,
) -> list[str]:
    """Put back what differs.

    Args:
        module: The module, or what stands for it.
        kept: The record of the module.
        only_tensors: Whether plain values stay where no tensor differs.
        is_shared: Whether its lists and dicts are another module's, too.

    Returns:
        The names of what was put back, but for what was only moved to another device.
    """
    differences = _differences(module, kept)
    if not differences or _sizes(module) != kept.sizes:
        return []

    with_tensors = [one for one in differences if one.has_tensors()]
    if only_tensors and not with_tensors:
        return []

    # New plain values are a forward's where it left a new tensor too.
    if not any(one.was is MISSING for one in with_tensors):
        differences = [one for one in differences if one.was is not MISSING]

    names = []
    for one in differences:
        value = one.was
        if isinstance(value, _Cache):
            value = value.contents.copy() if is_shared else value.refilled()
        is_buffer = one.place is module._buffers
        if is_buffer and _are_tensors(value, one.found):
            # Buffers stay on the device that the model was moved to.
            value = value.to(one.found.device)
        write_attribute(one.place, one.name, value)
        if is_buffer and one.was_moved():
            continue
        names.append(one.name)
        if is_buffer:
            _remove_kernels(module, kept)

    module._non_persistent_buffers_set = set(kept.unsaved)
    return names


def _differences(module: nn.Module, kept: _Kept) -> list[_Difference]:
    """The values that are to be put back."""
    found = []
    for place, before in zip(_places(module), kept.values, strict=True):
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
    """Whether another value than there was is to stay."""
    if was is _OTHER:
        return True

    if isinstance(was, _Cache):
        return type(found) not in _CACHES or _are_same(found, was)

    if type(found) is type(was) and type(found) in _COMPARED:
        return bool(found == was)

    return not _is_of_forwards(found)


def _is_of_forwards(value: Any) -> bool:
    """Whether a forward may have left a value, or removed one."""
    if value is MISSING or _is_plain(value):
        return True

    if isinstance(value, nn.Module):
        return bool(_tensors(value)) and not _has_parameters(value)

    return type(value) in _CACHES and bool(_tensors(value))


def _are_same(cache: Any, other: Any) -> bool:
    """Whether two lists or dicts hold the same tensors."""
    return [id(one) for one in _tensors(cache)] == [id(one) for one in _tensors(other)]


def _are_tensors(value: Any, other: Any) -> bool:
    """Whether two values are tensors."""
    return isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)


def _are_alike(value: Any, other: Any) -> bool:
    """Whether two buffers are tensors of one dtype and shape."""
    if not _are_tensors(value, other):
        return False
    return (value.dtype, value.shape) == (other.dtype, other.shape)


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module, or one in it, has a parameter."""
    return next(module.parameters(), None) is not None


def _remove_kernels(module: nn.Module, kept: _Kept) -> None:
    """Remove the new children without parameters.

    They are kernels, made for the buffer that is put back.
    """
    for name in module._modules.keys() - kept.values[-1].keys():
        child = module._modules[name]
        if child is not None and not _has_parameters(child):
            del module._modules[name]
