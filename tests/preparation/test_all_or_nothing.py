"""What fails after the last edit is taken back too, and an error says so only where it is true."""

from __future__ import annotations

from typing import Any

import pytest

from kbitwrap import EditError, KbitPreparedModel
from kbitwrap.edits.norms import Forwards
from kbitwrap.preparation import preparation
from kbitwrap.preparation.state import ModelState
from support import training, zoo
from support.snapshot import Snapshot


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("no room")


def fail_to_undo(*_: Any) -> None:
    raise RuntimeError("no way back")


def test_a_prepare_that_fails_after_its_edits_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model)
    before = Snapshot(model)
    monkeypatch.setattr(preparation, "ModelState", fail)
    with pytest.raises(EditError, match=r"could not prepare: no room; the model is as it was$") as caught:
        prepared.prepare()
    assert str(caught.value.__cause__) == "no room"
    assert before.diff(Snapshot(model)) == []


def test_an_undo_that_fails_then_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"))
    monkeypatch.setattr(preparation, "ModelState", fail)
    monkeypatch.setattr(Forwards, "undo", fail_to_undo)
    with pytest.raises(EditError, match=r"could not prepare: no room; .* except that undoing failed: no way back"):
        prepared.prepare()


def test_an_adopt_that_fails_after_its_edits_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with KbitPreparedModel(zoo.load("llama"), precision="adapted") as prepared:
        adapted = training.adapt("llama", prepared.model)
        before = Snapshot(adapted)
        monkeypatch.setattr(ModelState, "reread", fail)
        with pytest.raises(EditError, match=r"could not adopt: no room; the model is as it was$"):
            prepared.adopt(adapted)
        assert before.diff(Snapshot(adapted)) == []
        assert not prepared.verify()
