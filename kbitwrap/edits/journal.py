"""The journal: a list of reversible edits, applied all or nothing, suspended, and undone in reverse.

Knows nothing of torch. An edit is a value that can say what it does (``describe``), read what it is about to change
(``capture``) and change it (``apply``). What ``capture`` returns is a ``Change``: it alone can put the old state back.
The journal captures, records, then applies, in this order, so that an edit which fails half-way is undone too.

What edits and changes work on is handed to them as a ``view``: the model as it is walked once for an operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from ..errors import EditError


class Missing:
    """The type of ``MISSING``, which stands for "there was nothing here" and survives copying and pickling."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


class View(Protocol):
    """What an operation sees of the thing that is edited."""

    def again(self) -> Any:
        """The same thing, seen anew: after an edit that failed half-way."""


class WayBack(Protocol):
    """How to get back to a state."""

    def undo(self, view: Any) -> None:
        """Put the state back, however far the edit got. A second call changes nothing."""


class Call:
    """A way back that is a call.

    Args:
        call: Puts the state back; takes no argument.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def undo(self, view: Any) -> None:
        """Make the call."""
        self._call()


@runtime_checkable
class Change(Protocol):
    """The state from before one edit, and how to get back there."""

    def undo(self, view: Any) -> None:
        """Put back the state from before the edit, however far the edit got. A second call changes nothing."""

    def now(self, view: Any) -> WayBack:
        """Record what is there now, of all that ``undo`` changes; changes nothing."""

    def originals(self) -> Iterable[Any]:
        """What this change holds of original tensors: see ``HeldOriginal``."""


@runtime_checkable
class Edit(Protocol):
    """One reversible edit of a model."""

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""

    def capture(self, view: Any) -> Change:
        """Read what the edit is about to change; changes nothing."""

    def apply(self, change: Any) -> None:
        """Make the edit; ``change`` is what ``capture`` returned."""


Failures = list[tuple[WayBack, BaseException]]


class Journal:
    """The changes made to a model, newest last.

    Invariant: whatever ``apply`` has changed is either recorded here or has been put back.

    Attributes:
        changes: The changes, oldest first.
    """

    def __init__(self) -> None:
        self.changes: list[Any] = []

    def apply(self, edits: Iterable[Edit], view: View) -> None:
        """Apply every edit, or none.

        Args:
            edits: The edits, in order.
            view: The model, as it is before the first of them.

        Raises:
            EditError: An edit raised an ``Exception``. This call's edits were undone; earlier ones stand.
            BaseException: ``KeyboardInterrupt`` and ``SystemExit`` pass unchanged, the edits undone likewise.
        """
        start = len(self.changes)
        edit: Edit | None = None
        try:
            for edit in edits:
                change = edit.capture(view)
                self.changes.append(change)
                edit.apply(change)
        except BaseException as error:
            failures = [failure for _, failure in self._roll_back(start, view)]
            if not isinstance(error, Exception):
                raise
            for failure in failures:
                if not isinstance(failure, Exception):
                    raise failure from error
            message = f"could not {edit.describe() if edit else 'plan'}: {error}; the model is as it was"
            if failures:
                message = f"{message}, except that undoing failed: {'; '.join(map(str, failures))}"
            raise EditError(message, edit=edit) from error

    def _roll_back(self, start: int, view: View) -> Failures:
        """Undo what was recorded since, and forget it."""
        failures = self.undo(view.again(), since=start)
        del self.changes[start:]
        return failures

    @contextlib.contextmanager
    def all_or_nothing(self, view: View) -> Iterator[None]:
        """Inside, what is applied is undone if the body raises."""
        start = len(self.changes)
        try:
            yield
        except BaseException:
            self._roll_back(start, view)
            raise

    def record(self, *changes: Any) -> None:
        """Add changes that were captured elsewhere, before what they take back is done."""
        self.changes += changes

    def undo(self, view: Any, *, since: int = 0, show: Callable[[Sequence[Any]], Iterable[Any]] = iter) -> Failures:
        """Undo changes, newest first, each of them even when another fails; what failed stays in the journal.

        An interrupt waits until the model is as it was. What it interrupted is done again: undoing writes values.

        Args:
            view: The model.
            since: How many of the oldest changes to leave alone.
            show: Wraps the list of changes in a progress bar.

        Returns:
            What went wrong, in the order in which it happened; empty when everything is back.
        """
        failures: Failures = []
        for change in show(self.changes[since:][::-1]):
            for _ in range(2):
                try:
                    change.undo(view)
                    self._forget(change)
                    break
                except Exception as error:
                    failures.append((change, error))
                    break
                except BaseException as error:
                    failures.append((change, error))
        return failures

    def _forget(self, change: Any) -> None:
        place = next(i for i, other in enumerate(self.changes) if other is change)
        del self.changes[place]

    def suspend(self, view: Any, way_back: Journal, also: Sequence[Any] = ()) -> None:
        """Put back the state from before all changes for a while, all or nothing.

        Args:
            view: The model.
            way_back: The journal that leads back to what is there now: its ``resume`` ends the suspension. It is
                complete at every moment, whatever interrupts this call.
            also: Further changes, newer than the journal's, which are undone for the while.

        Raises:
            BaseException: What a change raised; the state from before this call is back.
        """
        try:
            for change in reversed([*self.changes, *also]):
                way_back.changes.append(change.now(view))
                change.undo(view)
        except BaseException:
            way_back.resume(view)
            raise

    def resume(self, view: Any) -> None:
        """Undo everything, and raise the first failure; what failed stays, and this may be called again."""
        failures = self.undo(view)
        if failures:
            raise failures[0][1]

    def originals(self) -> list[Any]:
        """What the changes hold of original tensors, the newest first: where two hold one tensor, the last says it."""
        return [held for change in reversed(self.changes) for held in change.originals()]
