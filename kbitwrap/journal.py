"""The journal: a list of reversible edits, applied all or nothing and undone in reverse.

Knows nothing of torch. An edit is a value that can say what it does (``describe``), read what it is about to change
(``capture``) and change it (``apply``). What ``capture`` returns is a ``Change``: it alone can put the old state back.
The journal captures, records, then applies, in this order, so that an edit which fails half-way is undone too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from .errors import EditError

Resume = Callable[[], None]
"""What ``Change.suspend`` leaves: a call that brings back, exactly, the state that was suspended."""


class Missing:
    """The type of ``MISSING``, which stands for "there was nothing here" and survives copying and pickling."""

    def __repr__(self) -> str:
        return "MISSING"

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Missing()


@runtime_checkable
class Change(Protocol):
    """The state from before one edit, and how to get back there."""

    def undo(self) -> None:
        """Put back the state from before the edit, however far the edit got. A second call changes nothing."""

    def suspend(self, resumes: list[Resume]) -> None:
        """Put back the state from before the edit for a while.

        Args:
            resumes: Gets the calls that bring back what is there now, each before what it brings back is changed.
        """


@runtime_checkable
class Edit(Protocol):
    """One reversible edit of a model."""

    def describe(self) -> str:
        """Say in one line what the edit does, and to what."""

    def capture(self) -> Change:
        """Read what the edit is about to change; changes nothing."""

    def apply(self) -> None:
        """Make the edit."""


class Journal:
    """The changes made to a model, newest last.

    Invariant: whatever ``apply`` has changed is either recorded here or has been put back.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []

    def apply(self, edits: Iterable[Edit]) -> None:
        """Apply every edit, or none.

        Args:
            edits: The edits, in order.

        Raises:
            EditError: An edit raised an ``Exception``. This call's edits were undone; earlier ones stand.
            BaseException: ``KeyboardInterrupt`` and ``SystemExit`` pass unchanged, the edits undone likewise.
        """
        start = len(self.changes)
        edit: Edit | None = None
        try:
            for edit in edits:
                self.changes.append(edit.capture())
                edit.apply()
        except BaseException as error:
            failures = undo_all(self.changes[start:])
            del self.changes[start:]
            if not isinstance(error, Exception):
                raise
            for failure in failures:
                if not isinstance(failure, Exception):
                    raise failure from error
            assert edit is not None or not failures
            message = f"could not {edit.describe() if edit else 'plan'}: {error}; the model is as it was"
            if failures:
                message = f"{message}, except that undoing failed: {'; '.join(map(str, failures))}"
            raise EditError(message, edit=edit) from error

    def suspend(self, changes: Iterable[Change], resumes: list[Resume]) -> None:
        """Put back the state from before ``changes``, all or nothing, for a while.

        Args:
            changes: The changes to suspend, oldest first.
            resumes: Gets what `resume_all` takes to bring the suspended state back. It is complete at every moment,
                whatever interrupts this call.
        """
        try:
            for change in reversed(list(changes)):
                change.suspend(resumes)
        except BaseException:
            resume_all(resumes)
            raise


def undo_all(changes: Iterable[Change]) -> list[BaseException]:
    """Undo changes, newest first, each of them even when another fails.

    Args:
        changes: The changes, oldest first.

    Returns:
        What went wrong, in the order it happened; empty when everything is back.
    """
    failures: list[BaseException] = []
    for change in reversed(list(changes)):
        try:
            change.undo()
        except BaseException as error:
            # A second interrupt, too, waits until the model is as it was.
            failures.append(error)
    return failures


def resume_all(resumes: list[Resume]) -> None:
    """Bring back what was suspended, every part of it even when another fails, and then raise the first failure.

    Args:
        resumes: The calls, in the order in which ``suspend`` left them. Each is taken off the list when it is done:
            what is left failed, and may be called again.
    """
    failures: list[BaseException] = []
    for place in reversed(range(len(resumes))):
        # An interrupt waits until the state is back. What it interrupted is done again: resuming writes values.
        for _ in range(2):
            try:
                resumes[place]()
                del resumes[place]
                break
            except Exception as error:
                failures.append(error)
                break
            except BaseException as error:
                failures.append(error)
    if failures:
        raise failures[0]
