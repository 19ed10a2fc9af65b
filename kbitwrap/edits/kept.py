"""The record of what a forward leaves on the modules of the base: caches, repacked codes, and their flags."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn

from ..model.quantization import KERNEL, transposed_codes
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, join, only_reading
from .base import ChangeBase, write_attribute
from .journal import MISSING

# The types of the plain attributes that a module computes with, and may replace when it
# runs; and those told by value.
_COMPARED = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size}
)
_PLAIN = _COMPARED | {torch.Tensor, tuple}
_OTHER = object()
# one for all: hundreds would be work for the garbage collector
_EMPTY: dict[str, Any] = {}
_OWN = frozenset(vars(nn.Module()))  # what every module has, its train mode among them
_CACHES = (list, dict)


class _Classes(dict[type, bool]):
    """Whether values of a class are plain, looked up faster than computed."""

    def __missing__(self, cls: type) -> bool:
        self[cls] = found = cls in _PLAIN or issubclass(cls, Enum)
        return found


_is_plain = _Classes()


def _members(cache: Any) -> Iterable[Any]:
    return cache.values() if isinstance(cache, dict) else cache or ()


def _tensors(cache: Any) -> list[torch.Tensor]:
    """The tensors in a list or dict, and in the tuples and lists in it."""
    flat = [
        one
        for value in _members(cache)
        for one in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    return [one for one in flat if isinstance(one, torch.Tensor)]


class _Kept(NamedTuple):
    """A module's fields, buffers and children's names: ``fields`` with a placeholder for what is not plain."""

    fields: dict[str, Any]
    # lists and dicts of plain values, each with a copy of it
    caches: dict[str, tuple[Any, Any]]
    buffers: dict[str, torch.Tensor | None]
    unsaved: tuple[str, ...]  # the names of buffers that no checkpoint holds
    children: tuple[str, ...]
    sizes: int  # a hash of the names of its parameters and their numbers of elements


class KeptChange(ChangeBase):
    """The plain values, plain tensors, caches and buffers of the base's modules, as they were.

    Values that differ in the end are put back. A new plain value is removed only where
    a new tensor is removed too: alone, it may belong to a hook that stays. A new child
    without parameters that holds tensors is a cache; without tensors it is a kernel,
    and is removed with a buffer. A buffer of the checkpoint with its dtype and shape
    was trained or moved, and stays, as does all of a module whose parameters others
    replaced.
    """

    def __init__(
        self, tree: ModelTree, records: Collection[ParameterRecord] = ()
    ) -> None:
        self._index, self._records = tree.index, records
        base = {id(node.module) for node in tree.plain_base}
        with only_reading():
            self._kept = [
                self._read(node.module) if id(node.module) in base else None
                for node in tree.modules
            ]
        self.put_back: tuple[str, ...] = ()  # the names of what the last undo put back

    @staticmethod
    def _read(module: nn.Module) -> _Kept:
        found, caches = module.__dict__, _EMPTY
        fields: dict[str, Any] = {}
        for name, value in found.items():
            if name not in _OWN:
                is_plain = _is_plain[type(value)]
                fields[name] = value if is_plain else _OTHER
                if (
                    not is_plain
                    and type(value) in _CACHES
                    and all(_is_plain[type(one)] for one in _members(value))
                ):
                    caches = {**caches, name: (value, value.copy())}
        children, sizes = tuple(found["_modules"]), _sizes(found["_parameters"])
        # nearly always; and then nothing else is kept
        if not (caches or found["_buffers"]):
            # twice as fast
            return tuple.__new__(_Kept, (fields, _EMPTY, _EMPTY, (), children, sizes))
        unsaved = tuple(module._non_persistent_buffers_set)
        return _Kept(fields, caches, dict(module._buffers), unsaved, children, sizes)

    def undo(self, tree: ModelTree) -> None:
        """Put back what changed, on substitutes too; values of other types that others put there stay."""
        with only_reading():
            resized = [tensor.path for _, tensor in tree.resized(self._records)]
        # Resizing sets plain values on the modules around, as the vocabulary's size:
        # these stay.
        around = set()
        for node in tree.nodes if resized else ():
            prefix = join(node.path, "")
            if any(name.startswith(prefix) for name in resized):
                around.add(id(node.module))
        found = {}
        for reached, is_substitute in (
            (self._index.live(), False),
            (self._index.substitutes(tree), True),
        ):
            for number, module in reached:
                kept = self._kept[number]
                if kept is not None:
                    only_tensors = is_substitute or id(module) in around
                    found[id(module)] = self._write(
                        module, kept, only_tensors=only_tensors, is_shared=is_substitute
                    )
        named = [
            (node.fqn, name)
            for node in tree.modules
            for name in found.get(id(node.module), ())
        ]
        # which a preparation sets
        self.put_back = tuple(
            [join(fqn, name) for fqn, name in named if name != KERNEL]
        )

    def now(self, tree: ModelTree) -> KeptChange:
        """Record what modules keep now."""
        return KeptChange(tree)

    def undo_on(self, shell: nn.Module, module: nn.Module) -> None:
        """Put back on a module's shell what undoing would put back on the module."""
        number = self._index.number(module)
        kept = None if number is None else self._kept[number]
        if kept is not None:
            self._write(shell, kept, only_tensors=False, is_shared=True)

    @staticmethod
    def _write(
        module: nn.Module, kept: _Kept, *, only_tensors: bool, is_shared: bool
    ) -> list[str]:
        """Put back what differs, and return the names of it but for what was moved to another device."""
        fields, buffers, unsaved = (
            module.__dict__,
            module._buffers,
            module._non_persistent_buffers_set,
        )
        before = kept.fields
        changed, cached = {}, {}
        for name, found in fields.items():
            if name in _OWN or (was := before.get(name, MISSING)) is found:
                continue  # nearly always
            if type(found) in _CACHES:
                was, contents = kept.caches.get(name, (was, None))
                if was is not _OTHER and any(
                    a is not b
                    for a, b in zip_longest(_tensors(found), _tensors(contents))
                ):
                    cached[name] = contents
                    changed[name] = (
                        was if contents is None or not is_shared else contents.copy()
                    )
            elif was is not _OTHER and _is_plain[type(found)]:
                is_equal = (
                    type(found) is type(was)
                    and type(found) in _COMPARED
                    and found == was
                )
                changed |= {} if is_equal else {name: was}
        if not before.keys() <= fields.keys():
            changed |= {
                name: was
                for name, was in before.items()
                if name not in fields and was is not _OTHER
            }
        replaced = {
            name: was
            for name in ({**buffers, **kept.buffers} if buffers or kept.buffers else ())
            if (was := kept.buffers.get(name, MISSING))
            is not (found := buffers.get(name, MISSING))
            and (
                name in unsaved
                or was is MISSING
                or found is MISSING
                or not _is_alike(was, found)
            )
        }
        added = (
            module._modules.keys() - kept.children
            if len(module._modules) > len(kept.children)
            else ()
        )
        new = [name for name in added if _is_cache(module._modules[name])]
        if not (changed or replaced or new) or _sizes(module._parameters) != kept.sizes:
            return []
        tensors = [
            was
            for n, was in changed.items()
            if torch.Tensor in (type(was), type(fields.get(n)))
        ]
        tensors += [
            *(changed[name] for name in cached),
            *replaced.values(),
            *[MISSING for _ in new],
        ]
        if only_tensors and not tensors:
            return []
        if not any(was is MISSING for was in tensors):
            changed = {name: was for name, was in changed.items() if was is not MISSING}
        moved = set()
        for name, was in changed.items():
            write_attribute(fields, name, was)
            contents = cached.get(name)
            if contents is not None and not is_shared:
                was.clear()
                was.update(contents) if isinstance(was, dict) else was.extend(contents)
        for name, was in replaced.items():
            found = buffers.get(name)
            (unsaved.add if name in kept.unsaved else unsaved.discard)(name)
            if (
                was is not MISSING
                and was is not None
                and found is not None
                and was.device != found.device
            ):
                # Moving a model replaces its buffers, and they stay on the device that
                # they were moved to.
                was = was.to(found.device)
                moved |= {name} if _is_alike(was, found) else set()
            write_attribute(buffers, name, was)
        for name in added if replaced.keys() - moved else new:
            if (child := module._modules[name]) is not None and not list(
                child.parameters()
            ):
                del module._modules[name]
        return [name for name in (*changed, *replaced, *new) if name not in moved]


def lay_as_stored(tree: ModelTree) -> None:
    """Lay codes as a checkpoint has them that layers of aqlm transposed; a layer does it again when it next runs."""
    for node in tree.modules:
        codes = transposed_codes(node.module)
        if codes is not None:
            vars(node.module)["gemv_op"] = None
            codes.data = codes.data.transpose(0, 1).contiguous()


def _is_cache(child: nn.Module | None) -> bool:
    """Whether a child holds tensors, and no parameter."""
    modules = [] if child is None else list(child.modules())
    tensors = [
        one
        for m in modules
        for one in (*m._buffers.values(), *vars(m).values())
        if type(one) is torch.Tensor
    ]
    return bool(tensors) and not any(module._parameters for module in modules)


def _sizes(parameters: Mapping[str, torch.Tensor | None]) -> int:
    return (
        hash(
            tuple(
                [
                    (name, 0 if p is None else p.numel())
                    for name, p in parameters.items()
                ]
            )
        )
        if parameters
        else 0
    )


def _is_alike(value: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return (
        value is not None
        and other is not None
        and (value.dtype, value.shape) == (other.dtype, other.shape)
    )
