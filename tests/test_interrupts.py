"""An interrupt at any line lets an undo finish; before the first change it passes at once."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from interrupts import interrupted_at
from kbitwrap import KbitPreparedModel, LifecycleState, prepared_of
from snapshot import Snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")

REORDERED = (": attributes",)


def modes() -> tuple[bool, ...]:
    """The modes of torch that a call must leave as they were."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_torch_function_enabled()


def prepare(precision: str) -> KbitPreparedModel:
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)).bfloat16()
    return KbitPreparedModel(model, precision=precision)


def interrupts(call: Callable[[], object]) -> Iterator[str]:
    """Interrupt a call at its first line, its second and so on, until it ends without; yield where, each time."""
    for number in itertools.count():
        try:
            with interrupted_at(number) as lines:
                call()
        except KeyboardInterrupt:
            yield lines[-1]
        else:
            return


def leave(prepared: KbitPreparedModel) -> None:
    with prepared:
        pass


@pytest.mark.parametrize(
    ("precision", "call"),
    [("full", leave), ("compute", KbitPreparedModel.restore), ("norms", KbitPreparedModel.restore)],
)
def test_an_interrupt_at_any_line_of_a_restore_restores_all_or_changes_nothing(
    precision: str, call: Callable[[KbitPreparedModel], object]
) -> None:
    prepared = prepare(precision)
    model = prepared.model
    before, of_process, outcomes = Snapshot(model), modes(), []
    call(prepared.prepare())  # fills the caches
    during = Snapshot(prepared.prepare().model)
    for line in interrupts(lambda: call(prepared)):
        assert modes() == of_process, line
        outcomes.append(prepared.state)
        if prepared.state is LifecycleState.PREPARED:
            assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == [], line
            continue
        report = prepared.restore()
        assert prepared_of(model) is None, line
        assert before.diff(Snapshot(model), moved=True) == [], line
        assert not any((report.replaced, report.trained, report.foreign)), line
        during = Snapshot(prepared.prepare().model)
    assert min(outcomes.count(state) for state in (LifecycleState.PREPARED, LifecycleState.RESTORED)) > 50


def test_an_interrupt_at_any_line_of_resuming_resumes_all_or_changes_nothing() -> None:
    prepared = prepare("full").prepare()
    model = prepared.model
    during, of_process, num_lines = Snapshot(model), modes(), 0
    suspensions = [prepared.suspend()]
    suspended = Snapshot(model)
    for line in interrupts(lambda: suspensions[-1]()):
        assert modes() == of_process, line
        num_lines += 1
        if prepared.state is LifecycleState.SUSPENDED:
            assert suspended.diff(Snapshot(model), moved=True, ignore=REORDERED) == [], line
            continue
        assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == [], line
        suspensions.append(prepared.suspend())
        suspended = Snapshot(model)
    assert num_lines > 200
    prepared.restore()


def test_an_interrupt_at_any_line_of_an_export_leaves_a_whole_folder_or_none(tmp_path: Path) -> None:
    prepared = prepare("full").prepare()
    during, of_process, num_lines = Snapshot(prepared.model), modes(), 0
    whole = files_of(prepared.export(tmp_path / "whole").path)
    for line in interrupts(lambda: prepared.export(tmp_path / "out")):
        assert modes() == of_process, line
        num_lines += 1
        found = [path.name for path in tmp_path.iterdir()]
        if "out" in found:
            assert files_of(tmp_path / "out") == whole, line
            shutil.rmtree(tmp_path / "out")
            found.remove("out")
        assert found == ["whole"], line
    assert num_lines > 400
    assert during.diff(Snapshot(prepared.model)) == []
    prepared.restore()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
