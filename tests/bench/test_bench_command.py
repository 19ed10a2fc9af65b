"""`kbitwrap bench`: tables, JSON, plots, and what it refuses."""

from __future__ import annotations

import copy
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from kbitwrap.bench import runner
from kbitwrap.bench.plot import draw
from kbitwrap.bench.settings import MISTRAL_7B, PLOT_SUFFIXES, SMALL, Settings, Shape, default_cases
from kbitwrap.cli import main
from support.benchmarks import all_cases, all_combinations, predicted_cases
from support.thorough import few

# ----------------------------------------------------------------------------------------------------
# The command.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return all_cases()


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return all_combinations()


@pytest.fixture
def without_processes(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any], compared: dict[str, Any]
) -> list[tuple[Settings, tuple[str, ...]]]:
    """Collects what the command asks for, and answers with what was measured."""
    asked: list[tuple[Settings, tuple[str, ...]]] = []

    def answer(name: str, result: dict[str, Any]) -> None:
        def run(given: Settings, cases: Any, show: Any) -> dict[str, Any]:
            asked.append((given, tuple(cases)))
            show("case 1 of 1")
            return result

        monkeypatch.setattr(runner, name, run)

    answer("run_benchmark", measured)
    answer("run_identity", compared)
    return asked


@pytest.mark.thorough
def test_the_command_prints_tables(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--step", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("machine ")
    rows = re.findall(r"^(?:\d+ +)?compute ", printed.out, re.MULTILINE)
    assert len(rows) == 1 + 2  # preparing; the steps of two numbers of tokens
    assert printed.err == "case 1 of 1\n"
    assert (tmp_path / "out").read_text() == printed.out
    asked = Settings(shape=SMALL, step=True)
    assert without_processes == [(asked, default_cases(asked))]


@pytest.mark.thorough
def test_the_command_prints_predictions_beside_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = predicted_cases()  # which calls what is replaced next
    monkeypatch.setattr(runner, "run_benchmark", lambda *_: result)
    assert main(["bench", "--step"]) == 0
    rows = re.findall(r"^(?:\d+ +)?compute-chunked .*", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 3  # preparing; the step; its prediction
    assert "+0" in rows[2]


def test_the_command_prints_json(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], measured: dict[str, Any]
) -> None:
    assert main(["bench", "--json", "--case", "none", "--layers", "3", "--tied"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(measured))
    given, cases = without_processes[0]
    assert cases == ("none",)
    assert given.shape == Shape(**{**vars(MISTRAL_7B), "num_layers": 3, "is_tied": True})


def test_the_command_takes_several_numbers_of_tokens(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--step", "--tokens", "512", "8192", "512", "--head-chunk-bytes", "4096"]) == 0
    given, _ = without_processes[0]
    assert (given.tokens, given.head_chunk_bytes) == ((512, 8192), 4096)


def test_the_command_compares(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], compared: dict[str, Any]
) -> None:
    assert main(["bench", "--identity"]) == 0
    given, cases = without_processes[0]
    assert (given.step, given.tokens, given.shape, cases) == (True, (32,), SMALL, ("compute",))
    assert len(re.findall("^compute ", capsys.readouterr().out, re.MULTILINE)) == 16


def test_the_command_says_no_where_a_number_differs(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "is_identical", lambda result: False)
    assert main(["bench", "--identity"]) == 1


@pytest.mark.parametrize("options", [["--step"], ["--identity"]], ids=" ".join)
def test_what_was_saved_is_shown_again(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str]
) -> None:
    saved = str(tmp_path / "saved.json")
    assert main(["bench", *options]) == 0
    printed = capsys.readouterr().out
    assert main(["bench", *options, "--json", "--output", saved]) == 0
    capsys.readouterr()
    assert main(["bench", "--from", saved]) == 0
    assert capsys.readouterr().out == printed
    assert len(without_processes) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "is not what --json prints"),
        ('{"a": 1}', "is not what --json prints"),
        ('{"cases": []}', "is not what --json prints: KeyError"),
        ('{"cases": 1, "environment": 1, "settings": {"export": false}}', "is not what --json prints: TypeError"),
    ],
)
def test_what_was_not_saved_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "saved.json"
    if text is not None:
        path.write_text(text)
    assert main(["bench", "--from", str(path)]) == 2
    assert re.fullmatch(f"kbitwrap: error: --from: .*{message}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("suffix", few(PLOT_SUFFIXES, []))
def test_the_same_figures_make_the_same_plot(tmp_path: Path, measured: dict[str, Any], suffix: str) -> None:
    preparing = {**measured, "settings": {**measured["settings"], "step": False}}
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        draw(preparing, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert len(first) > 1000


@pytest.mark.thorough
def test_a_plot_shows_the_figures(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, measured: dict[str, Any]
) -> None:
    path = tmp_path / "plot.svg"
    assert main(["bench", "--step", "--plot", str(path)]) == 0
    tree = ET.parse(path)
    texts = [element.text for element in tree.iter() if element.tag.endswith("}text")]
    assert not list(tree.iter("{http://purl.org/dc/elements/1.1/}date"))
    for case in measured["cases"]:
        assert texts.count(case["case"]) == 9
        assert f"{case['added_bytes'] / 2**20:.2f}" in texts
        for step in case["steps"]:
            assert f"{step['peak_bytes'] / 2**20:.0f}" in texts
    assert {"live bytes added", "peak of tensors in a step, 16 tokens", "MiB", "ratio to PEFT's"} <= set(texts)


def test_a_plot_without_peft_has_no_ratios(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, measured: dict[str, Any]
) -> None:
    alone = copy.deepcopy(measured)
    alone["cases"] = [case for case in alone["cases"] if case["case"] == "none"]
    for part in (alone["cases"][0], *alone["cases"][0]["steps"]):
        del part["ratio_to_peft"]
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(alone))
    assert main(["bench", "--from", str(saved), "--plot", str(tmp_path / "plot.svg")]) == 0
    texts = [element.text for element in ET.parse(tmp_path / "plot.svg").iter() if element.tag.endswith("}text")]
    assert texts.count("-") == 3


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "plot.svg"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--autocast"],
        ["--modules-to-save"],
        ["--identity", "--autocast"],
        ["--identity", "--reentrant"],
        ["--identity", "--tied"],
        ["--identity", "--plot", "plot.svg"],
        ["--export", "--plot", "plot.svg"],
        ["--export", "--case", "peft"],
        ["--case", "merged"],
        ["--step", "--case", "merged"],
        ["--export", "--autocast"],
        ["--plot", "plot.txt"],
        ["--plot", "/no/such/folder/plot.svg"],
        ["--hidden-size", "100"],
        ["--device", "mps"],
        ["--output", "/no/such/folder/file"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert re.fullmatch(r"kbitwrap: error: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    "options",
    [
        ["--repeats", "0"],
        ["--seed", "-1"],
        ["--case", "half"],
        ["--tokens", "many"],
        ["--tokens"],
        ["--step", "--identity"],
        ["--device", "nowhere"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert re.fullmatch(r"kbitwrap bench: error: .*expected .+\n", capsys.readouterr().err)
