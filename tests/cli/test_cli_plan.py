"""`kbitwrap plan`: PEFT's way beside each precision, bars that are as long as what they stand for, and plots."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import prepare_model_for_kbit_training
from rich.cells import cell_len

import zoo
from kbitwrap import StepTracker, build_plan
from kbitwrap.bench.memory import live_bytes
from kbitwrap.cli import main, plan, plot, step
from kbitwrap.cli.console import as_text
from kbitwrap.cli.tables import table, with_bars


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_pefts_row_is_what_its_function_does_to_the_byte(
    name: str, quant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = zoo.load(name, quant)
    before = live_bytes(model, lambda _: True)
    with StepTracker(model) as tracker:
        prepare_model_for_kbit_training(model)
    result = run_json(capsys, str(zoo.checkpoint(name)), "--quant", quant, "--precision", "norms")
    assert result["peft"]["added_bytes"] == live_bytes(model, lambda _: True) - before
    assert result["peft"]["peak_bytes"] == tracker.peak_bytes - tracker.static_bytes
    assert result["peft"]["cache_bytes"] == result["plans"]["norms"]["cache_bytes"]
    assert list(result["plans"]) == list(result["fits"]) == ["norms"]


def rows_of(out: str) -> dict[str, list[str]]:
    return {line.split("  ")[0]: line.split() for line in out.splitlines() if line}


def test_a_plan_is_told_with_totals_and_bars(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = str(zoo.checkpoint("llama"))
    result = run_json(capsys, model)
    assert main(["plan", model, "--memory-budget", "40KiB"]) == 1
    out = capsys.readouterr().out
    assert max(map(cell_len, out.splitlines())) <= 80
    rows = rows_of(out)
    assert " ".join(rows["precision"]) == "precision added after peak freed to cache fits peak, budget 0.039"
    mib = {name: f"{size / 2**20:.3f}" for name, size in result["peft"].items()}
    after = f"{(result['loaded_bytes'] + result['peft']['added_bytes']) / 2**20:.3f}"
    assert rows["peft"][1:6] == [mib["added_bytes"], after, mib["peak_bytes"], mib["cache_bytes"], "no"]
    assert rows["norms"][1:6] == ["0", f"{result['loaded_bytes'] / 2**20:.3f}", "0", "0", "yes"]
    assert "│" in out.split("\npeft")[1].splitlines()[0]
    assert "+peft, full" in out
    assert "+norms" not in out
    assert "Nothing is added by norms, adapted, none." in out


def test_where_nothing_is_added_that_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("llama", None, torch.float32)
    plans = {name: build_plan(model, precision=name) for name in ("full", "norms")}
    monkeypatch.setattr(plan, "_plans", lambda *_: plans)
    capsys.readouterr()
    assert main(["plan", str(zoo.checkpoint("llama"))]) == 0
    out = capsys.readouterr().out
    assert "Nothing is added by peft, full, norms.\n" in out
    assert not [line for line in out.splitlines() if line.startswith(("precision", "peft", "full", "norms"))]
    assert "+" not in out


def test_a_bar_is_as_long_as_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = [["role", "bytes"], ["a", "100"], ["b", "50"], ["c", "1"], ["d", "0"]]
    drawn, left = with_bars(rows, "bytes", [[50, 50], [25, 25], [1], [0]], mark=75)
    full, half, least, none = (row[-1] for row in drawn[1:])
    assert (len(full), left) == (27, 1)
    assert full == "█" * 14 + "░" * 6 + "│" + "░" * 6
    assert half == "█" * 7 + "░" * 7 + " " * 6 + "│" + " " * 6
    assert least == "█" + " " * 19 + "│" + " " * 6
    assert none == " " * 20 + "│" + " " * 6
    lines = as_text(table(drawn, right=True, left=left)).splitlines()
    assert lines[2:4] == [f"a       100  {full}", f"b        50  {half.rstrip()}"]


def test_without_room_there_are_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    rows = [["role", "bytes"], ["embeddings", "100"]]
    assert with_bars(rows, "bytes", [[100]]) == (rows, 0)


def test_bars_are_of_characters_that_the_output_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    drawn, _ = with_bars([["role", "bytes"], ["a", "100"]], "bytes", [[50, 50]], mark=50)
    assert set(drawn[1][-1]) == {"#", "+", "|"}


@pytest.mark.parametrize("suffix", plot.PLOT_SUFFIXES)
def test_a_plan_is_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"plan{suffix}"
    model = str(zoo.checkpoint("llama"))
    assert main(["plan", model, "--plot", str(file), "--memory-budget", "1GiB"]) == 0
    assert file.stat().st_size > 1000
    if suffix == ".svg":
        text = file.read_text()
        assert all(f">{name}<" in text for name in ("peft", "norms", "input embeddings", "memory budget", "GiB"))
    capsys.readouterr()
    before = file.read_bytes()
    assert main(["plan", model, "--plot", str(file)]) == 2
    assert "exists; choose another name, or add --overwrite" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert main(["plan", model, "--plot", str(file), "--overwrite"]) == 0
    assert file.read_bytes() != before  # without the budget


@pytest.mark.parametrize("precisions", [["norms"], ["norms", "peft"]])
def test_a_step_is_drawn(precisions: list[str], tmp_path: Path) -> None:
    file = tmp_path / "step.svg"
    arguments = ["--step", "--seq", "8", "--rank", "2", "--precision", *precisions, "--plot", str(file)]
    assert main(["plan", str(zoo.checkpoint("llama")), *arguments]) == 0
    words = ["activations", "weights", "GiB", *(precisions if len(precisions) > 1 else ["before", "backward"])]
    assert [word for word in words if f">{word}<" not in file.read_text()] == []


def test_what_is_the_same_for_every_precision_is_said_once_and_what_comes_on_top_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "_predict", lambda request, precision, say: predict(request, precision))
    arguments = ["--step", "--seq", "8", "--budget", "8GiB", "--precision", "norms", "none"]
    assert main(["plan", str(zoo.checkpoint("llama")), *arguments]) == 0
    out = capsys.readouterr().out
    assert "longest sequence 64, largest batch" not in out.splitlines()[2]
    assert "For each: fits yes, longest sequence 64." in out
    out = " ".join(out.split())
    assert "largest batch at 8" in out
    assert "Unknown, beside each peak: " in out
    assert "workspaces of cuBLAS" in out
    assert "the CUDA context, fragmentation and other programs on the device come on top" in out


def predict(request: step.StepRequest, precision: str) -> step.Prediction:
    from transformers import BitsAndBytesConfig

    from kbitwrap import predict_step

    nf4 = BitsAndBytesConfig(load_in_4bit=True)
    one = predict_step(request.model, precision=precision, batch_size=1, seq_len=8, quantization_config=nf4)
    return step.Prediction(one, longest=64, largest={"norms": 3, "none": 4}[precision])
