"""The bases of edits and changes, and records of modules that find them again.

Records hold modules weakly and parameters not at all: what others replace, such as a
weight that a merge requantizes, is freed at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

from ..model.records import ParameterRecord
from ..model.roles import Role
from ..model.tree import ModelTree
from ..reports import first_of
from ..tensors.bits import differ
from .journal import MISSING

Fields = dict[str, Any]
"""Attributes of an object by their names, ``MISSING`` where there was none."""

TrainedPolicy = Literal["keep", "discard", "error"]
"""The treatment of a value that changed while it was stored upcast."""


@dataclass(frozen=True)
class EditBase:
    """The part of an edit that a plan shows."""

    # "hold", "record", "freeze", "store", "upcast", "cast", "compute" or "checkpoint"
    action: str
    fqns: tuple[str, ...]
    role: Role | None = None  # of all of these
    added_bytes: int = 0  # until the edit is undone
    # the peak while the edit is made, above what was live before
    transient_bytes: int = 0
    reason: str = ""  # why it is not done in the precision's leaner way
    digest_bytes = 0  # held while a digest is made of what it changes, before it does

    @property
    def held_bytes(self) -> int:
        """The bytes of originals that stay on their device beside what was made."""
        return 0

    def to_dict(self) -> dict[str, Any]:
        """The fields that a plan shows, as plain values.

        A kind of edit adds fields of its own, which are not shown.
        """
        shown = {field.name: getattr(self, field.name) for field in fields(EditBase)}
        return {
            **shown,
            "fqns": list(self.fqns),
            "role": None if self.role is None else self.role.value,
        }

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""
        return f"{self.action} {first_of([name or 'the model' for name in self.fqns])}"


class HeldOriginal:
    """A change that holds the original of one parameter.

    The parameter stores something else meanwhile: its cast, or what a library wrote.
    """

    record: ParameterRecord
    dtype: torch.dtype  # of the original
    # what ``undo`` does with a value that changed, where it has a choice
    policy: TrainedPolicy = "keep"
    # whether the last undo put back another value than the original
    was_altered = False
    # whether the last undo found that the value had changed while it was stored upcast
    was_trained = False

    @property
    def fqn(self) -> str:
        """The name of the parameter."""
        return self.record.fqn

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The value that ``restore(trained="keep")`` would put back.

        It is to be read only: it may be the parameter itself.
        """
        raise NotImplementedError

    def write(self, parameter: torch.Tensor, data: torch.Tensor) -> None:
        """Give the parameter other memory.

        It stays the same object, so that ties and optimizers hold.
        """
        self.record.expects(data)
        parameter.data = data
        self.record.saw(parameter)

    def resume(
        self, parameter: torch.Tensor, saved: torch.Tensor, left: torch.Tensor
    ) -> None:
        """Write the value from before a suspension, which ``left`` another.

        Where others wrote to any element meanwhile, the whole value is theirs, and is
        upcast: nothing tells which of its elements they meant to keep.

        It does not wait for the device.
        """
        theirs = parameter.data.to(saved.dtype)
        if theirs.shape != saved.shape:
            self.write(parameter, theirs)
            return

        saved = saved.to(theirs.device)
        is_theirs = differ(parameter.data, left)
        saved.copy_(torch.where(is_theirs, theirs, saved))
        self.write(parameter, saved)


class AttributesNow:
    """Instance attributes of objects, as they are now.

    They are written back to these very objects, which are held.
    """

    def __init__(self, holders: Collection[Any], names: Collection[str]) -> None:
        self.holders, self._names = holders, names
        self._values = [read_attributes(holder, names) for holder in holders]

    def undo(self, tree: ModelTree) -> None:
        """Write the recorded values back."""
        for holder, values in zip(self.holders, self._values, strict=True):
            write_attributes(holder, values)

    def now(self, tree: ModelTree) -> AttributesNow:
        """Record the current values."""
        return AttributesNow(self.holders, self._names)


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


class AttributesChange:
    """Instance attributes of a model's modules, as they were.

    The modules are held weakly. Each value is put back, and what was absent is removed.
    """

    def __init__(self, tree: ModelTree, names: tuple[str, ...]) -> None:
        self.index, self._names = tree.index, names
        self._values = [read_attributes(node.module, names) for node in tree.modules]

    def undo(self, tree: ModelTree) -> None:
        """Write the recorded values back, on the tree's substitutes too."""
        for number, module in self.index.live() + self.index.substitutes(tree):
            write_attributes(module, self._values[number])

    def now(self, tree: ModelTree) -> AttributesNow:
        """Record the current values, of modules that others added too."""
        return AttributesNow(self.index.live_and_of(tree), self._names)
