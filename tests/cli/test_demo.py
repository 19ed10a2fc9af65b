"""The demonstration: its answers are yes, each is no where its promise is broken, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from peft import prepare_model_for_kbit_training
from rich.cells import cell_len
from safetensors.torch import save_file
from torch import nn
from torch._subclasses import FakeTensor
from transformers.utils import logging as transformers_logging

from kbitwrap import KbitPreparedModel, RestoreReport
from kbitwrap.cli import demo, main

PREDICTED, PEFTS_NUMBERS, AS_LOADED, LOSES_LESS, IS_MERGE = range(5)  # the answers


def run_json(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["demo", "--json", *options])
    return status, json.loads(capsys.readouterr().out)


class Run(NamedTuple):
    """What the demonstration printed, and what it should leave in the process: before it, and after."""

    result: dict[str, Any]
    lines: list[str]
    before: list[object]
    after: list[object]
    files: list[Path]


def process_state() -> list[object]:
    return [torch.get_rng_state().tolist(), transformers_logging.get_verbosity()]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The demonstration on a screen of 80 columns."""
    folder, results = tmp_path_factory.mktemp("temporary"), []
    run, before = demo.run, process_state()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("COLUMNS", "80")
        patch.setattr(demo, "run", lambda *given: results.append(run(*given)) or results[-1])
        assert main(["demo"]) == 0
    return Run(results[0], out.getvalue().splitlines(), before, process_state(), [*folder.glob("kbitwrap-demo-*")])


@pytest.mark.thorough
def test_each_answer_is_yes_and_fits_a_screen(shown: Run) -> None:
    assert list(shown.result["answers"].values()) == [True] * 5
    assert max(map(cell_len, shown.lines)) <= 80
    assert len(shown.lines) < 34
    assert shown.lines[0] == "built-in byte-level Llama, nf4: PEFT's way and ours"
    assert [line.split()[0] for line in shown.lines if line.startswith(("yes", "NO"))] == ["yes"] * 5
    said = " ".join(" ".join(shown.lines).split())
    assert re.search(r"peft 264,704 ([\d,]+) \1 26 ", said)
    assert re.search(r"norms 0 ([\d,]+) \1 0 ", said)
    assert re.search(r"merge_and_unload in nf4 [\d.]+% a merge in 4 bits\b", said)
    assert re.search(r"merge_and_unload in bfloat16 [\d.]+% a merge, on the original weights", said)
    assert re.search(r"kbitwrap's export 0.00% a merge, on the trained weights", said)


@pytest.mark.thorough
def test_pefts_way_is_measured_beside_ours(shown: Run) -> None:
    sides = shown.result["sides"]
    # 256 rows of 256 in the embeddings and in the head, and five norms, in float32: twice two bytes.
    added = {name: side["added_bytes"] for name, side in sides.items()}
    assert added == {"peft": (2 * 256 * 256 + 5 * 256) * 2, "compute": 5 * 256 * 2, "norms": 0}
    changed = {"bytes": 7, "dtypes": 7, "requires_grad": 7, "hooks": 1, "attributes": 4}
    assert sides["peft"]["left"] == changed
    assert 0 < sides["norms"]["distance_from_peft"] < 0.05
    assert sides["norms"]["step_bytes"] < sides["compute"]["step_bytes"] < sides["peft"]["step_bytes"]
    in_place, reloaded, export = shown.result["merges"].values()
    assert in_place["faults"] == ["an adapter was merged into 4-bit weights"]
    assert reloaded["faults"] == export["faults"] == []
    assert 0 <= export["lost"] < reloaded["lost"] / 100 < in_place["lost"] / 1000
    assert export["kept"] == pytest.approx(1, abs=1e-3)  # it is rounded to bfloat16


@pytest.mark.thorough
def test_what_the_demonstration_needs_for_itself_it_leaves_as_it_found(shown: Run) -> None:
    assert shown.after == shown.before
    assert shown.files == []


@pytest.mark.thorough
def test_the_same_seed_gives_the_same_figures(capsys: pytest.CaptureFixture[str], shown: Run) -> None:
    found = []
    for seed in ("0", "8"):
        status, result = run_json(capsys, "--seed", seed)
        assert status == 0
        found.append({key: value for key, value in result.items() if key != "seed"})
    assert found[0] == {key: value for key, value in shown.result.items() if key != "seed"}
    assert found[1] != found[0]


@pytest.mark.thorough
def test_each_answer_is_yes_where_layers_repack_their_weights(
    repacking: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_json(capsys)[0] == 0


def break_prediction(patch: pytest.MonkeyPatch) -> None:
    """Hold a tensor more in each step that is measured."""
    backward = torch.Tensor.backward

    def hold_more(self: torch.Tensor) -> None:
        is_predicted = isinstance(self, FakeTensor)
        held = self.new_empty(0 if is_predicted else 1 << 20)
        backward(self)
        del held

    patch.setattr(torch.Tensor, "backward", hold_more)


def break_numbers(patch: pytest.MonkeyPatch) -> None:
    """Change a norm after PEFT's function."""

    def prepare_and_write(model: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare_model_for_kbit_training(model, *args, **kwargs)
        prepared.model.norm.weight.data.mul_(1.5)
        return prepared

    patch.setattr(peft, "prepare_model_for_kbit_training", prepare_and_write)


def break_restore(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KbitPreparedModel, "restore", lambda self: RestoreReport())


def break_export(patch: pytest.MonkeyPatch) -> None:
    """Export the base."""
    export = KbitPreparedModel.export

    def export_the_base(self: KbitPreparedModel, path: Path, *, merge_adapters: bool, model: Any) -> Any:
        report = export(self, path, merge_adapters=merge_adapters, model=model)
        save_file(dict(self.merged_weights([])), path / "model.safetensors")
        return report

    patch.setattr(KbitPreparedModel, "export", export_the_base)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("broken", "is_no"),
    [
        (break_prediction, {PREDICTED}),
        (break_numbers, {PEFTS_NUMBERS}),
        (break_restore, {AS_LOADED}),
        (break_export, {LOSES_LESS, IS_MERGE}),
    ],
    ids=lambda given: getattr(given, "__name__", None),
)
def test_an_answer_is_no_where_its_promise_is_broken(
    broken: Callable[[pytest.MonkeyPatch], None],
    is_no: set[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    status, result = run_json(capsys)
    assert status == 1
    assert {number for number, answer in enumerate(result["answers"].values()) if not answer} == is_no


def test_the_same_bytes_of_another_dtype_or_shape_are_noticed() -> None:
    module = nn.Module()
    module.register_buffer("table", torch.zeros(4))
    before = demo.base_state({"module": module})
    for other in (module.table.view(torch.int32), module.table.view(2, 2)):
        module.table = other
        assert demo.differences(before, demo.base_state({"module": module}))["bytes"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "-1"], "Invalid value for '--seed'"),
        (["--seed", str(2**63)], "Invalid value for '--seed'"),
        (["--frobnicate"], "No such option: --frobnicate"),
    ],
)
def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
