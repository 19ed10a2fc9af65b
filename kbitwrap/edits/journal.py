"""The journal: a list of reversible edits.

They are applied all or nothing, suspended, and undone in reverse.

This file does not use torch. An edit describes itself, captures what it is about to
change as a ``Change``, and applies itself; the journal records the change before it
applies the edit, so that an edit that fails half-way is undone too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ..errors import EditError, KbitWrapError

T = TypeVar("T")


class Missing:
    """The type of ``MISSING``, which stands for "there was nothing here".

    It has one instance, which survives copying and pickling.
    """

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


class WayBack(Protocol):
    """A recorded state that can be put back."""

    def undo(self, view: Any) -> None:
        """Put the state back, however far the edit got.

        A second call changes nothing.
        """


class Call:
    """A way back that is a call without arguments."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def undo(self, view: Any) -> None:
        """Make the call."""
        self._call()


@runtime_checkable
class Change(WayBack, Protocol):
    """The state from before one edit, which can be suspended."""

    def now(self, view: Any) -> WayBack:
        """Record the current state of all that ``undo`` changes; changes nothing."""


class Lasting:
    """The base of changes that last through suspensions, which leave them alone."""


@runtime_checkable
class Edit(Protocol):
    """One reversible edit of a model."""

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""

    def capture(self, view: Any) -> Sequence[Any]:
        """Read what the edit is about to change, and change nothing.

        Returns:
            The changes, in the order in which they are undone.
        """

    def apply(self, changes: Any, view: Any) -> None:
        """Make the edit; ``changes`` are what ``capture`` returned."""


Failures = list[tuple[WayBack, BaseException]]
_MOST_INTERRUPTS = 8  # in one undo: what raises one each time is not tried for ever


def finish(call: Callable[..., T], *args: Any) -> T:
    """Make a call to its end.

    It is made again after an interrupt, which is raised in the end, and once after an
    error that is not ours.
    """
    stops: list[BaseException] = []
    try:
        while True:
            try:
                return call(*args)
            except BaseException as error:
                most = 1 if isinstance(error, Exception) else _MOST_INTERRUPTS
                if isinstance(error, KbitWrapError) or len(stops) >= most:
                    raise
                stops.append(error)
    finally:
        # An interrupt is raised in place of the result, or of the last error.
        for stop in stops:
            if not isinstance(stop, Exception):
                raise stop


class Journal:
    """The changes made to a model, oldest first.

    Whatever ``apply`` changed is recorded here, or was put back.
    """

    def __init__(self) -> None:
        self.changes: list[Any] = []

    def apply(self, edits: Iterable[Edit], view: Any) -> None:
        """Apply every edit, or none.

        Where one fails, all are undone, and ``EditError`` or the interrupt is raised.
        """
        start = len(self.changes)
        edit: Edit | None = None
        try:
            for edit in edits:
                changes = edit.capture(view)
                self.changes += reversed(changes)
                edit.apply(changes, view)
        except BaseException as error:
            outcome = self.roll_back(start, view, error)
            if not isinstance(error, Exception):
                raise
            failed = f"could not {edit.describe() if edit else 'plan'}: {error}"
            raise EditError(f"{failed}; {outcome}", edit=edit) from error

    def roll_back(self, start: int, view: Any, error: BaseException) -> str:
        """Undo what was recorded after the ``start`` oldest changes, and forget it.

        Returns:
            What an error says of the model then: an undo may have failed too. An
            interrupt that came meanwhile is raised, unless the error is one.
        """
        failures = [failure for _, failure in self.undo(view.again(), since=start)]
        del self.changes[start:]
        if isinstance(error, Exception):
            for failure in failures:
                if not isinstance(failure, Exception):
                    raise failure from error

        if not failures:
            return "the model is as it was"

        told = "; ".join(map(str, failures))
        return f"the model is as it was, except that undoing failed: {told}"

    def record(self, *changes: Any) -> None:
        """Add changes that were captured elsewhere.

        They are added before what they take back is done.
        """
        self.changes += changes

    def undo(
        self,
        view: Any,
        *,
        since: int = 0,
        show: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    ) -> Failures:
        """Undo all but the ``since`` oldest changes, and return the failures.

        The newest is undone first, and each even when another fails.

        One that fails stays in the journal, and so do older ones: the next call undoes
        them after it, and one of them may write what it writes. One that is interrupted
        is undone again, and the interrupt returned.
        """
        failures: Failures = []
        newest_first = self.changes[since:][::-1]
        for change in show(newest_first):
            for _ in ("at first", "after an interrupt"):
                try:
                    change.undo(view)
                    # It is not the newest where one that is newer failed, and stayed.
                    if self.changes[-1:] == [change]:
                        self.changes.pop()
                    break
                except BaseException as error:
                    failures.append((change, error))
                    if isinstance(error, Exception):
                        break

        return failures

    def suspend(self, view: Any, way_back: Journal, also: Sequence[Any] = ()) -> None:
        """Put back the state from before all changes and those in ``also``.

        What is lasting stays. At every moment ``way_back`` leads back to what was there.
        """
        try:
            for change in reversed([*self.changes, *also]):
                if isinstance(change, Lasting):
                    continue
                way_back.changes.append(change.now(view))
                change.undo(view)
        except BaseException:
            way_back.resume(view)
            raise

    def resume(self, view: Any) -> None:
        """Undo everything, and raise the first failure.

        What failed stays, and this may be called again.
        """
        failures = self.undo(view)
        if failures:
            raise failures[0][1]

    def parts(self, kind: type[T]) -> list[T]:
        """The changes of one kind, newest first.

        Where two recorded the same, the last has what was there first.
        """
        return [change for change in reversed(self.changes) if isinstance(change, kind)]
