"""The edit, and the slots that others are made of.

Records hold modules weakly and parameters not at all: what others replace, such as a
weight that a merge requantizes, is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..model.records import ParameterRecord, TensorRef
from ..model.roles import Role
from ..model.tree import ModelTree
from ..reports import first_of
from ..tensors.bits import differ
from .journal import MISSING, Journal, Slot, Undoing

Fields = dict[str, Any]
"""Attributes of an object by their names, ``MISSING`` where there was none."""
Apply = Callable[[Journal, ModelTree], None]
"""Makes an edit, after it has saved in the journal what it writes."""


@dataclass(frozen=True)
class Edit:
    """One reversible edit of a model, as a plan shows it.

    Attributes:
        action: "hold", "record", "freeze", "store", "upcast", "cast", "compute",
            "checkpoint" or "warn".
        fqns: The names of what is edited; ``""`` is the model.
        apply: Makes the edit.
        role: The role of all that is edited.
        added_bytes: The bytes added until the edit is undone.
        transient_bytes: The peak while the edit is made, above what was live before.
        reason: The reason why it is not done in the precision's leaner way.
        refs: The places of the parameters that get another dtype, or are recorded.
        dtype: The dtype that is stored; ``None`` where none is changed.
        record_bytes: The bytes of originals that are held beside what is cast.
        held_bytes: The part of these that stays on its device.
        digest_bytes: The most bytes that the digests of the originals hold.
    """

    action: str
    fqns: tuple[str, ...]
    apply: Apply = field(repr=False)
    role: Role | None = None
    added_bytes: int = 0
    transient_bytes: int = 0
    reason: str = ""
    refs: tuple[TensorRef, ...] = field(default=(), repr=False)
    dtype: torch.dtype | None = None
    record_bytes: int = 0
    held_bytes: int = 0
    digest_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return what a plan shows, as plain values."""
        sizes = ("added_bytes", "transient_bytes")
        names = ("action", "fqns", "role", *sizes, "reason")
        shown = {name: getattr(self, name) for name in names}
        shown["fqns"] = list(self.fqns)
        shown["role"] = None if self.role is None else self.role.value
        return shown

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""
        return f"{self.action} {first_of([name or 'the model' for name in self.fqns])}"


class OriginalSlot(Slot):
    """A slot that holds the original of one parameter.

    The parameter stores something else meanwhile: its cast, or what a library wrote.
    """

    record: ParameterRecord
    dtype: torch.dtype  # of the original

    def original(self, parameter: Tensor) -> Tensor:
        """Return the value that ``restore(trained="keep")`` would put back.

        It is to be read only: it may be the parameter itself.
        """
        raise NotImplementedError

    def trained_error(self) -> RuntimeError:
        """Return the error of a value that is not to have changed."""
        fqn = self.record.fqn
        return RuntimeError(f"{fqn} was trained while it was stored in {torch.float32}")

    def give(self, parameter: Tensor, data: Tensor) -> None:
        """Give the parameter other memory.

        It stays the same object, so that ties and optimizers hold.
        """
        self.record.expects(data)
        parameter.data = data
        self.record.saw(parameter)

    def give_again(self, parameter: Tensor, saved: Tensor, left: Tensor) -> None:
        """Give the parameter the value from before a suspension, which ``left`` another.

        Where others wrote to any element meanwhile, the whole value is theirs, and is
        upcast: nothing tells which of its elements they meant to keep.

        It does not wait for the device.
        """
        theirs = parameter.data.to(saved.dtype)
        if theirs.shape != saved.shape:
            self.give(parameter, theirs)
            return

        saved = saved.to(theirs.device)
        saved.copy_(torch.where(differ(parameter.data, left), theirs, saved))
        self.give(parameter, saved)


class Attributes(Slot):
    """Instance attributes of objects, which are held."""

    def __init__(self, names: Collection[str], holders: Collection[Any]) -> None:
        self._names, self._holders = names, holders
        self.before = self.read()

    def read(self, tree: Any = None) -> list[Fields]:
        """Return the attributes of each object."""
        return [read_attributes(holder, self._names) for holder in self._holders]

    def resume(self, tree: Any, value: list[Fields]) -> None:
        """Write the attributes back, and remove what was absent."""
        for holder, fields in zip(self._holders, value, strict=True):
            write_attributes(holder, fields)


class ModuleAttributes(Slot):
    """Instance attributes of a model's modules, which are held weakly."""

    def __init__(self, names: Collection[str], tree: ModelTree) -> None:
        self._names, self._index = names, tree.index
        self.before = [read_attributes(node.module, names) for node in tree.modules]

    def read(self, tree: ModelTree) -> Attributes:
        """Return the slot of the same attributes, of modules that others added too."""
        return Attributes(self._names, self._index.live_and_of(tree))

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Write the attributes back, on the tree's substitutes too."""
        for number, module in self._index.find(tree):
            write_attributes(module, self.before[number])

    def resume(self, tree: ModelTree, value: Attributes) -> None:
        """Write the attributes back to the very modules that they were read of."""
        value.undo(tree, Undoing())


class Anchor:
    """Keeps a wrapper alive with its model; an empty one is on a model's copies."""

    def __init__(self, wrapper: object = None) -> None:
        self.wrapper = wrapper

    def __reduce__(self) -> tuple[type[Anchor], tuple[()]]:
        return Anchor, ()


ANCHOR_ATTRIBUTE = "_kbitwrap_prepared"


def read_attributes(holder: Any, names: Collection[str]) -> Fields:
    """Read instance attributes of an object; ``MISSING`` where one is absent."""
    fields = vars(holder)
    return {name: fields.get(name, MISSING) for name in names}


def write_attributes(holder: Any, values: Fields) -> None:
    """Set instance attributes of an object, or remove those that were ``MISSING``."""
    fields = vars(holder)
    for name, value in values.items():
        write_attribute(fields, name, value)


def write_attribute(fields: Fields, name: str, value: Any) -> None:
    """Set an instance attribute, or remove it where it was ``MISSING``."""
    if value is MISSING:
        fields.pop(name, None)
    else:
        fields[name] = value
