"""The journal: the slots that were changed, and what they held.

A slot is a place that can be read and written. Its value is recorded before it is
written, so that an edit that fails half-way is undone too. This file does not use
torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..errors import EditError, KbitWrapError

T = TypeVar("T")
TrainedPolicy = Literal["keep", "discard", "error"]
"""The treatment of a value that changed while it was stored upcast."""


class Missing:
    """The type of ``MISSING``, which stands for "there was nothing here".

    It has one instance, which survives copying and pickling.
    """

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


@dataclass
class Undoing:
    """The policy of one restore, and what was found by it and by those that failed."""

    policy: TrainedPolicy = "keep"
    # the names of parameters of the base whose value changed before it
    changed: set[str] = field(default_factory=set)
    # what a suspension read of the slot that it undoes
    now: Any = None
    # the names of parameters that were trained while they were stored upcast, and of
    # frozen ones that got another value than the original
    trained: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    # the names of what forwards had left and was put back
    put_back: list[str] = field(default_factory=list)
    # the records of adapters that stay in the dtype of their training
    kept_dtype: list[Any] = field(default_factory=list)
    # the places of base parameters that are made trainable
    turned_on: list[Any] = field(default_factory=list)


class Slot:
    """A place that can be read and written, with what it held when it was recorded."""

    is_lasting = False  # whether suspensions leave it alone
    before: Any = None  # what it held when it was recorded, where that was read

    def read(self, tree: Any) -> Any:
        """Read what the slot holds now; changes nothing."""

    def undo(self, tree: Any, undoing: Undoing) -> None:
        """Write what the slot held, however far the edit got.

        A second call changes nothing.
        """
        self.resume(tree, self.before)

    def resume(self, tree: Any, value: Any) -> None:
        """Write what a suspension read.

        Slots of parameters, flags, hooks and stand-ins leave what others wrote meanwhile.
        Slots of plain attributes, such as the train mode, ``use_cache``, checkpointing
        and caches, are put back whatever is there.
        """


@dataclass(eq=False)
class Suspended(Slot):
    """A slot on the way back from a suspension, and what it held before that."""

    slot: Slot
    value: Any

    def undo(self, tree: Any, undoing: Undoing) -> None:
        """Write what the suspension read."""
        self.slot.resume(tree, self.value)


@dataclass(eq=False)
class Call(Slot):
    """A call that is made on the way back."""

    call: Callable[[], object]

    def undo(self, tree: Any, undoing: Undoing) -> None:
        """Make the call."""
        self.call()


def finish(call: Callable[..., T], *args: Any) -> T:
    """Make a call again until it ends; the call must allow that.

    It is made again after an interrupt, eight times at most, and after an error that is
    not kbitwrap's if nothing failed before. If there was an interrupt, it is raised in the
    end. So a Ctrl-C in ``restore`` leaves a restored model.
    """
    most_interrupts = 8  # a call that is interrupted each time is given up
    failures: list[BaseException] = []
    try:
        while True:
            try:
                return call(*args)
            except BaseException as error:
                most = 1 if isinstance(error, Exception) else most_interrupts
                if isinstance(error, KbitWrapError) or len(failures) >= most:
                    raise
                failures.append(error)
    finally:
        # An interrupt is raised in place of the result, or of the last error.
        for failure in failures:
            if not isinstance(failure, Exception):
                raise failure


class Journal:
    """The slots that were written, oldest first."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []

    def save(self, *slots: Slot) -> None:
        """Record slots before they are written; the last is undone first."""
        self.slots += slots

    def of(self, kind: type[T]) -> list[T]:
        """Return the slots of one kind, newest first.

        Where two slots recorded the same place, the older one comes last: it has what was
        there first.
        """
        return [slot for slot in reversed(self.slots) if isinstance(slot, kind)]

    def apply(
        self,
        edits: Iterable[Any],
        tree: Any,
        doing: str = "prepare",
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Apply every edit and make a last call, all or nothing.

        Where one fails, all are undone, and ``EditError`` or the interrupt is raised.
        """
        start = len(self.slots)
        edit = None
        try:
            for edit in edits:
                edit.apply(self, tree)
            edit = None
            then()
        except BaseException as error:
            try:
                # Edits replace modules and parameters: the model is walked again.
                undo = functools.partial(self.undo, tree.again(), since=start)
                failures = [failure for _, failure in finish(undo)]
            finally:
                del self.slots[start:]
            if not isinstance(error, Exception):
                raise

            outcome = "the model is as it was"
            if failures:
                told = "; ".join(map(str, failures))
                outcome += f", except that undoing failed: {told}"
            doing = edit.describe() if edit else doing
            message = f"could not {doing}: {error}; {outcome}"
            raise EditError(message, edit=edit) from error

    def undo(
        self,
        tree: Any,
        undoing: Undoing | None = None,
        *,
        since: int = 0,
        show: Callable[[Sequence[Slot]], Iterable[Slot]] = iter,
    ) -> list[tuple[Slot, Exception]]:
        """Undo all but the ``since`` oldest slots, and return the failures.

        The newest is undone first, and each even when another fails or is interrupted.

        One that fails stays in the journal, and so do older ones: another call undoes
        them after it, and one of them may write what it writes. The first interrupt is
        raised in place of the failures.
        """
        failures = []
        interrupt = None
        for slot in show(self.slots[since:][::-1]):
            try:
                slot.undo(tree, undoing or Undoing())
                # A newer slot that failed stays, and so does every older one.
                if self.slots and self.slots[-1] is slot:
                    self.slots.pop()
            except Exception as error:
                failures.append((slot, error))
            except BaseException as error:
                interrupt = interrupt or error

        if interrupt is not None:
            raise interrupt
        return failures

    def suspend(self, tree: Any, way_back: Journal, also: Iterable[Slot] = ()) -> None:
        """Undo all slots and those in ``also``, but for what is lasting, for a while.

        At every moment ``way_back`` leads back to what was there.
        """
        for slot in reversed([*self.slots, *also]):
            if not slot.is_lasting:
                now = slot.read(tree)
                way_back.save(Suspended(slot, now))
                slot.undo(tree, Undoing(now=now))

    def undo_or_raise(self, tree: Any) -> None:
        """Undo everything, and raise the first failure.

        Slots that failed stay, and another call undoes them.
        """
        failures = self.undo(tree)
        if failures:
            raise failures[0][1]
