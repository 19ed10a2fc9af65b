"""The journal: all or nothing, undone in reverse, nothing swallowed. Uses no torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from kbitwrap import EditError
from kbitwrap.edits.journal import MISSING, Journal, Slot, Undoing, finish

START = {"a": 0, "b": 0, "c": 0, "d": 0}


class Look:
    """What an operation sees; counts how often it is taken anew."""

    def __init__(self) -> None:
        self.count = 0

    def again(self) -> Look:
        self.count += 1
        return self


LOOK = Look()


class Set:
    """Set one key of a dict, failing where told to: `fails` maps a phase to what it raises."""

    def __init__(self, state: dict[str, int], key: str, value: int, log: list[str], **fails: BaseException) -> None:
        self.state, self.key, self.value, self.log, self.fails = state, key, value, log, fails

    def describe(self) -> str:
        return f"set {self.key}"

    def enter(self, phase: str) -> None:
        self.log.append(f"{phase} {self.key}")
        if phase in self.fails:
            raise self.fails[phase]

    def apply(self, journal: Journal, view: Look) -> None:
        self.enter("capture")
        journal.save(Key(self))
        self.enter("apply")
        self.state[self.key] = self.value
        self.enter("half")


class Key(Slot):
    def __init__(self, edit: Set) -> None:
        self.edit, self.before = edit, edit.state.get(edit.key, MISSING)

    def _write(self, value: Any) -> None:
        if value is MISSING:
            self.edit.state.pop(self.edit.key, None)
        else:
            self.edit.state[self.edit.key] = value

    def read(self, view: Look) -> Any:
        self.edit.enter("read")
        return self.edit.state.get(self.edit.key, MISSING)

    def undo(self, view: Look, undoing: Undoing) -> None:
        self.edit.enter("undo")
        self._write(self.before)

    def resume(self, view: Look, value: Any) -> None:
        self.edit.enter("resume")
        self._write(value)


def edits(state: dict[str, int], log: list[str], **fails: dict[str, BaseException]) -> list[Set]:
    return [Set(state, key, i + 1, log, **fails.get(key, {})) for i, key in enumerate(START)]


def test_each_edit_saves_its_slot_just_before_it_writes() -> None:
    state, log = dict(START), []
    journal = Journal()
    journal.apply(edits(state, log), LOOK)
    assert state == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert [line for line in log if not line.startswith("half")] == [
        f"{phase} {key}" for key in "abcd" for phase in ("capture", "apply")
    ]
    assert [slot.edit.key for slot in journal.slots] == ["a", "b", "c", "d"]


def test_undo_is_newest_first_and_exact() -> None:
    state, log = {"a": 7}, []
    journal = Journal()
    journal.apply(edits(state, log), LOOK)
    log.clear()
    assert journal.undo(LOOK) == []
    assert log == ["undo d", "undo c", "undo b", "undo a"]
    assert state == {"a": 7}


def test_edits_of_one_key_unwind_to_the_first_value() -> None:
    state, log = dict(START), []
    journal = Journal()
    journal.apply([Set(state, "a", value, log) for value in (1, 2, 3)], LOOK)
    journal.undo(LOOK)
    assert state == START


@pytest.mark.parametrize("phase", ["capture", "apply", "half"])
@pytest.mark.parametrize("key", START)
def test_a_fault_leaves_everything_as_it_was(key: str, phase: str) -> None:
    state, log = dict(START), []
    journal = Journal()
    error = ValueError("no room")
    with pytest.raises(EditError, match=f"set {key}: no room; the model is as it was") as caught:
        journal.apply(edits(state, log, **{key: {phase: error}}), LOOK)
    assert state == START
    assert journal.slots == []
    assert caught.value.__cause__ is error
    assert caught.value.edit.key == key
    # What was captured is undone, and nothing else: an edit that failed to capture has changed nothing.
    captured = [k for k in START if k < key or (k == key and phase != "capture")]
    assert [line for line in log if line.startswith("undo")] == [f"undo {k}" for k in reversed(captured)]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("phase", ["capture", "apply", "half"])
@pytest.mark.parametrize("key", START)
def test_an_interrupt_passes_unchanged_with_everything_as_it_was(key: str, phase: str, error: BaseException) -> None:
    state = dict(START)
    journal = Journal()
    with pytest.raises(type(error)) as caught:
        journal.apply(edits(state, [], **{key: {phase: error}}), LOOK)
    assert caught.value is error
    assert state == START
    assert journal.slots == []


@pytest.mark.parametrize("error", [ValueError("no room"), KeyboardInterrupt()], ids=repr)
def test_edits_of_an_earlier_call_stay_when_a_later_call_fails(error: BaseException) -> None:
    state = dict(START)
    journal = Journal()
    journal.apply([Set(state, "a", 5, [])], LOOK)
    with pytest.raises((EditError, KeyboardInterrupt)):
        journal.apply(edits(state, [], c={"apply": error}), LOOK)
    assert state == START | {"a": 5}
    assert len(journal.slots) == 1
    assert journal.undo(LOOK) == []
    assert state == START


def test_undoing_goes_on_when_one_undo_fails() -> None:
    state, log = dict(START), []
    first, second = OSError("gone"), ValueError("odd")
    journal = Journal()
    journal.apply(edits(state, log, b={"undo": second}, c={"undo": first}), LOOK)
    assert [error for _, error in journal.undo(LOOK)] == [first, second]
    assert [line for line in log if line.startswith("undo")] == ["undo d", "undo c", "undo b", "undo a"]
    assert state == {"a": 0, "b": 2, "c": 3, "d": 0}


def test_an_undo_that_fails_while_unwinding_is_named_beside_the_cause() -> None:
    state = dict(START)
    journal = Journal()
    cause = ValueError("no room")
    with pytest.raises(EditError, match=r"set d: no room.*undoing failed: gone") as caught:
        journal.apply(edits(state, [], b={"undo": OSError("gone")}, d={"apply": cause}), LOOK)
    assert caught.value.__cause__ is cause
    # Everything but the one is back.
    assert state == START | {"b": 2}
    assert journal.slots == []


def test_an_undo_that_fails_does_not_hide_an_interrupt() -> None:
    state = dict(START)
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        Journal().apply(edits(state, [], b={"undo": OSError("gone")}, d={"apply": interrupt}), LOOK)
    assert caught.value is interrupt
    assert state == START | {"b": 2}


def test_a_fault_in_the_iterator_of_edits_undoes_the_applied_ones() -> None:
    state = dict(START)

    def generate() -> Any:
        yield Set(state, "a", 1, [])
        raise ValueError("the list ends here")

    with pytest.raises(EditError, match="the list ends here"):
        Journal().apply(generate(), LOOK)
    assert state == START


def test_a_plan_that_fails_before_its_first_edit_is_an_edit_error() -> None:
    def generate() -> Any:
        raise ValueError("no list")
        yield

    journal = Journal()
    with pytest.raises(EditError, match="no list") as caught:
        journal.apply(generate(), LOOK)
    assert caught.value.edit is None
    assert journal.slots == []


def test_an_empty_list_of_edits_is_applied_suspended_and_undone() -> None:
    journal = Journal()
    journal.apply([], LOOK)
    way_back = Journal()
    journal.suspend(LOOK, way_back)
    way_back.undo_or_raise(LOOK)
    assert journal.slots == way_back.slots == []
    assert journal.undo(LOOK) == []


def test_suspending_is_newest_first_and_resuming_oldest_first() -> None:
    state, log = {"a": 7}, []
    journal = Journal()
    journal.apply(edits(state, log), LOOK)
    prepared = dict(state)
    log.clear()
    way_back = Journal()
    journal.suspend(LOOK, way_back)
    assert state == {"a": 7}
    assert len(way_back.slots) == len(START)
    way_back.undo_or_raise(LOOK)
    assert way_back.slots == []
    assert state == prepared
    assert log == [f"{phase} {key}" for key in "dcba" for phase in ("read", "undo")] + [
        f"resume {key}" for key in "abcd"
    ]
    assert journal.undo(LOOK) == []
    assert state == {"a": 7}


def test_resuming_brings_back_what_was_suspended_not_what_was_applied() -> None:
    state = dict(START)
    journal = Journal()
    journal.apply(edits(state, []), LOOK)
    state["b"] = 99
    way_back = Journal()
    journal.suspend(LOOK, way_back)
    assert state == START
    way_back.undo_or_raise(LOOK)
    assert state["b"] == 99


@pytest.mark.parametrize("error", [ValueError("no room"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("phase", ["read", "undo"])
@pytest.mark.parametrize("key", START)
def test_a_suspension_that_fails_is_taken_back(key: str, phase: str, error: BaseException) -> None:
    state, log = dict(START), []
    journal = Journal()
    journal.apply(edits(state, log, **{key: {phase: error}}), LOOK)
    prepared = dict(state)
    way_back = Journal()
    with pytest.raises(type(error)) as caught:
        journal.suspend(LOOK, way_back)
    assert caught.value is error
    way_back.undo_or_raise(LOOK)
    assert state == prepared
    assert len(journal.slots) == len(START)


def test_resuming_goes_on_when_one_resume_fails_and_raises_the_first_failure() -> None:
    state = dict(START)
    first = ValueError("no room")
    journal = Journal()
    journal.apply(edits(state, [], b={"resume": first}, c={"resume": OSError("gone")}), LOOK)
    way_back = Journal()
    journal.suspend(LOOK, way_back)
    with pytest.raises(ValueError, match="no room") as caught:
        way_back.undo_or_raise(LOOK)
    assert caught.value is first
    assert state == {"a": 1, "b": 0, "c": 0, "d": 4}
    assert len(way_back.slots) == 3  # they may be called again, and what is undone after them too


def test_missing_is_one_object_however_it_is_copied() -> None:
    assert repr(MISSING) == "MISSING"
    assert copy.copy(MISSING) is MISSING
    assert copy.deepcopy([MISSING])[0] is MISSING
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING


def test_a_change_that_fails_to_undo_stays_for_the_next_call() -> None:
    state, log = dict(START), []
    journal = Journal()
    journal.apply(edits(state, log, b={"undo": ValueError("not yet")}), LOOK)
    assert [change.edit.key for change, _ in journal.undo(LOOK)] == ["b"]
    assert [change.edit.key for change in journal.slots] == ["a", "b"]
    journal.slots[1].edit.fails.clear()
    assert journal.undo(LOOK) == []
    assert journal.slots == []
    assert state == START


def test_a_change_that_failed_is_undone_before_the_older_ones_again() -> None:
    state, log = dict(START), []
    journal = Journal()
    newest = Set(state, "a", 3, log, undo=ValueError("not yet"))
    journal.apply([Set(state, "a", 1, log), Set(state, "b", 2, log), newest], LOOK)
    assert [error for _, error in journal.undo(LOOK)] == [newest.fails.pop("undo")]
    assert state == START
    assert journal.undo(LOOK) == []
    assert state == START
    assert journal.slots == []


def test_an_undo_that_is_interrupted_is_finished_before_the_interrupt_is_raised() -> None:
    state, log = dict(START), []
    journal = Journal()
    interrupt = KeyboardInterrupt()
    journal.apply(edits(state, log, b={"undo": interrupt}), LOOK)
    fails = journal.slots[1].edit.fails  # type: ignore[attr-defined]

    def undo() -> None:
        try:
            journal.undo(LOOK)
        finally:
            fails.clear()

    with pytest.raises(KeyboardInterrupt) as caught:
        finish(undo)
    assert caught.value is interrupt
    assert state == START
    assert journal.slots == []


def test_undoing_goes_on_when_one_undo_is_interrupted_at_every_try() -> None:
    state, log = dict(START), []
    journal = Journal()
    interrupt = KeyboardInterrupt()
    journal.apply(edits(state, log, b={"undo": interrupt}), LOOK)
    with pytest.raises(KeyboardInterrupt) as caught:
        finish(journal.undo, LOOK)
    assert caught.value is interrupt
    assert state == START | {"b": 2}
    assert [slot.edit.key for slot in journal.slots] == ["a", "b"]
    journal.slots[1].edit.fails.clear()
    assert journal.undo(LOOK) == []
    assert state == START
    assert journal.slots == []


def test_unwinding_goes_on_when_one_undo_is_interrupted_at_every_try() -> None:
    state = dict(START)
    interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught:
        Journal().apply(edits(state, [], b={"undo": interrupt}, d={"apply": ValueError("no room")}), LOOK)
    assert caught.value is interrupt
    assert state == START | {"b": 2}


def test_undo_can_keep_the_oldest_changes() -> None:
    state, log = dict(START), []
    journal = Journal()
    journal.apply(edits(state, log), LOOK)
    assert journal.undo(LOOK, since=1) == []
    assert state == START | {"a": 1}
    assert [change.edit.key for change in journal.slots] == ["a"]


def test_the_changes_of_one_kind_are_listed_newest_first() -> None:
    journal = Journal()
    journal.apply(edits(dict(START), []), LOOK)
    assert [part.edit.key for part in journal.of(Key)] == ["d", "c", "b", "a"]
    assert journal.of(Look) == []


def test_a_failed_edit_is_undone_on_a_new_walk_of_the_model() -> None:
    look = Look()
    with pytest.raises(EditError):
        Journal().apply(edits(dict(START), [], c={"apply": ValueError("no room")}), look)
    assert look.count == 1
