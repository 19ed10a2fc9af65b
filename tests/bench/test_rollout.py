"""The benchmark of rollouts: a trainer beside engines on the original base, the dequantized one, or a quantized one."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kbitwrap.bench.report import rollout_header, rollout_rows
from kbitwrap.bench.rollout import run_rollout
from kbitwrap.bench.settings import ROLLOUT_CASES, LossSettings
from kbitwrap.cli import main
from kbitwrap.cli.console import quiet_libraries

TINY = LossSettings(
    repeats=1,
    hidden_size=64,
    num_layers=1,
    pretraining_steps=15,
    steps=5,
    batch_size=8,
    length=32,
    learning_rate=1e-2,
    rank=4,
    num_held_out=4,
)

pytestmark = pytest.mark.thorough  # trains for seconds, for a table of the authors' own
ENGINES = ("original", "dequantized", "quantized")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    lines: list[str] = []
    with quiet_libraries():
        result = run_rollout(TINY, ROLLOUT_CASES, lines.append)
    assert lines == [f"seed 1 of 1: {name}" for name in ROLLOUT_CASES]
    return result


def test_every_architecture_is_trained_and_is_json(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == measured
    assert [case["case"] for case in measured["rollouts"]] == list(ROLLOUT_CASES)
    assert measured["settings"] == dataclasses.asdict(TINY)
    for case in measured["rollouts"]:
        assert case["held_out_loss"]["mean"] < case["base_loss"]["mean"]
        assert all(case[engine]["divergence"]["mean"] > 0 for engine in ENGINES)
    losses = {case["held_out_loss"]["mean"] for case in measured["rollouts"]}
    assert len(losses) == len(ROLLOUT_CASES)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma"])
def test_a_dequantized_base_is_as_near_to_the_trainer_in_4_bits_as_arithmetic_lets_it(
    architecture: str, measured: dict[str, Any]
) -> None:
    (case,) = (case for case in measured["rollouts"] if case["case"] == f"{architecture}-nf4")
    original, dequantized, quantized = (case[engine]["divergence"]["mean"] for engine in ENGINES)
    assert dequantized < original / 4
    assert dequantized < 3 * quantized


def test_the_table_shows_it(measured: dict[str, Any]) -> None:
    rows = rollout_rows(measured)
    assert [row[0] for row in rows] == ["case", *ROLLOUT_CASES]
    assert all(re.fullmatch(r"\d\.\d\de-\d\d", cell) for row in rows[1:] for cell in row[3:])
    assert "bfloat16 autocast, learning rate 0.01" in rollout_header(measured)


def test_what_was_saved_is_shown_again(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(measured))
    assert main(["bench", "--from", str(saved)]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(f"^{name} ", printed, re.MULTILINE) for name in ROLLOUT_CASES)


def test_the_command_takes_its_settings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("kbitwrap.bench.rollout.run_rollout", lambda *given: asked.extend(given) or {"rollouts": []})
    options = ["--repeats", "2", "--layers", "1", "--steps", "9", "--pretraining-steps", "8", "--no-autocast"]
    assert main(["bench", "--rollout", *options, "--case", "gemma-int8", "--json"]) == 0
    settings, cases, _ = asked
    assert settings == LossSettings(repeats=2, num_layers=1, steps=9, pretraining_steps=8, autocast=False)
    assert cases == ["gemma-int8"]


@pytest.mark.parametrize(
    "options",
    [
        ["--rollout", "--quant", "int8"],
        ["--rollout", "--case", "norms"],
        ["--rollout", "--tokens", "8"],
        ["--rollout", "--plot", "plot.svg"],
        ["--rollout", "--hidden-size", "100"],
        ["--loss", "--case", "llama-nf4"],
        ["--step", "--case", "llama-nf4"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert re.fullmatch(r"kbitwrap: error: .+\n", capsys.readouterr().err)
