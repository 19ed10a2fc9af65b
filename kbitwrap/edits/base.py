"""What every edit can say of itself, and records of modules that find them again.

Records hold modules weakly and parameters not at all: what others replace, such as a weight that a merge requantizes,
is freed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import nn

from ..model.records import ParameterRecord
from ..model.roles import Role
from ..model.tree import ModelTree
from .journal import MISSING, Call, Change, WayBack

T = TypeVar("T")
TrainedPolicy = Literal["keep", "discard", "error"]
"""What becomes of a value that changed while it was stored upcast."""


@dataclass(frozen=True)
class EditBase:
    """What every edit can say of itself.

    Attributes:
        action: What is done: ``"hold"``, ``"record"``, ``"freeze"``, ``"store"``, ``"upcast"``, ``"compute"`` or
            ``"checkpoint"``.
        fqns: The fully qualified names of what it is done to.
        role: The part that these play, where they all play the same.
        added_bytes: Bytes that the edit adds and that stay until it is undone.
        transient_bytes: The most bytes that are live while the edit is made, above those before it.
        reason: Why it is done so and not in the precision's leaner way, where there is one.
    """

    action: str
    fqns: tuple[str, ...]
    role: Role | None = None
    added_bytes: int = 0
    transient_bytes: int = 0
    reason: str = ""

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""
        shown = ", ".join(name or "the model" for name in self.fqns[:3])
        more = f" and {len(self.fqns) - 3} more" if len(self.fqns) > 3 else ""
        return f"{self.action} {shown}{more}"


class ChangeBase:
    """A change that holds no original tensors."""

    def originals(self) -> tuple[HeldOriginal, ...]:
        """None."""
        return ()


class HeldOriginal(Protocol):
    """The original of one parameter, as a change holds it while the parameter stores something else.

    Attributes:
        record: Which parameter.
        dtype: The original's dtype.
        was_trained: Whether the last undo found that its value had changed while it was stored upcast.
    """

    was_trained: bool

    record: ParameterRecord
    dtype: torch.dtype

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """What stands for the original of the live parameter, to be read only; the parameter where it is the original.

        It is what ``restore(trained="keep")`` would put back.
        """

    def decide(self, policy: TrainedPolicy) -> None:
        """Say what ``undo`` does with a value that changed while it was stored upcast."""


class AttributesNow(ChangeBase):
    """Instance attributes of modules and configs as they are now, to be written back to these very objects.

    Args:
        holders: The objects; they are held.
        names: The attributes.
    """

    def __init__(self, holders: Collection[Any], names: Collection[str]) -> None:
        self._holders, self._names = holders, names
        self._values = [(holder, name, vars(holder).get(name, MISSING)) for holder in holders for name in names]

    def undo(self, tree: ModelTree) -> None:
        """Write the recorded values."""
        for holder, name, value in self._values:
            write_attribute(vars(holder), name, value)

    def now(self, tree: ModelTree) -> AttributesNow:
        """Record the values of now."""
        return AttributesNow(self._holders, self._names)


class Together(ChangeBase):
    """Changes that are undone as one, in their order."""

    def __init__(self, *changes: Change) -> None:
        self._changes = changes

    def undo(self, tree: ModelTree) -> None:
        """Undo each of them."""
        for change in self._changes:
            change.undo(tree)

    def now(self, tree: ModelTree) -> WayBack:
        """Record what there is now of each."""
        return all_of([change.now(tree) for change in self._changes], tree)

    def originals(self) -> tuple[HeldOriginal, ...]:
        """What each of them holds."""
        return tuple(held for change in self._changes for held in change.originals())


def all_of(ways: Sequence[WayBack], tree: ModelTree) -> WayBack:
    """The way back that takes all of these, in their order."""

    def undo() -> None:
        for way in ways:
            way.undo(tree)

    return Call(undo)


class ModuleRecord(Generic[T]):
    """A value for each module of a model, found again through wrappers, copies and merges.

    Args:
        tree: The model.
        read: What to record of a module.
    """

    def __init__(self, tree: ModelTree, read: Callable[[nn.Module], T]) -> None:
        self._index = tree.index
        self._values = [read(module) for _, module in self._index.live()]

    def recorded(self) -> list[tuple[nn.Module, T]]:
        """The modules recorded that are still alive, each with its value."""
        return [(module, self._values[number]) for number, module in self._index.live()]

    def get(self, module: nn.Module) -> T | None:
        """The value of a recorded module, or ``None``."""
        number = self._index.number(module)
        return None if number is None else self._values[number]

    def substitutes(self, tree: ModelTree) -> Iterator[tuple[nn.Module, T]]:
        """Modules that are not recorded and are, by name and class, where a recorded one was.

        These are the copies that PEFT makes for ``modules_to_save``: beside the original or in its place.
        """
        for node in tree.modules:
            if self._index.number(node.module) is None:
                cls, number = self._index.by_fqn.get(node.fqn, (None, 0))
                if cls is type(node.module):
                    yield node.module, self._values[number]

    def affected(self, tree: ModelTree) -> list[tuple[nn.Module, T]]:
        """Everything that an undo reaches: what was recorded, and what has taken its place."""
        return [*self.recorded(), *self.substitutes(tree)]


def write_attribute(fields: dict[str, Any], name: str, value: Any) -> None:
    """Set an instance attribute, or remove it where it was ``MISSING``."""
    if value is MISSING:
        fields.pop(name, None)
    else:
        fields[name] = value


class AttributesChange(ChangeBase):
    """Instance attributes as they were: restored by value, and absent again where they were absent."""

    def __init__(self, tree: ModelTree, names: tuple[str, ...]) -> None:
        self.names = names
        self.record = ModuleRecord(tree, self._read)

    def _read(self, module: nn.Module) -> tuple[Any, ...]:
        fields = vars(module)
        return tuple([fields.get(name, MISSING) for name in self.names])

    def undo(self, tree: ModelTree) -> None:
        """Write the recorded values, on substitutes too."""
        self.undo_of(self.names, tree)

    def undo_of(self, names: Collection[str], tree: ModelTree) -> None:
        """Write the recorded values of some of the attributes, on substitutes too."""
        slots = [(slot, name) for slot, name in enumerate(self.names) if name in names]
        for module, values in self.record.affected(tree):
            fields = vars(module)
            for slot, name in slots:
                if fields.get(name, MISSING) is not values[slot]:
                    write_attribute(fields, name, values[slot])

    def now(self, tree: ModelTree) -> AttributesNow:
        """Record the values of now."""
        return AttributesNow([module for module, _ in self.record.affected(tree)], self.names)
