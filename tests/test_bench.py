"""The benchmark: every case is measured, bytes are exact, "compute" is PEFT bit for bit. No timing is asserted."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap import build_plan
from kbitwrap.bench import case as bench_case
from kbitwrap.bench import runner
from kbitwrap.bench.memory import MemoryMeter, live_bytes
from kbitwrap.bench.models import build_model
from kbitwrap.bench.report import header, preparation_rows, step_rows
from kbitwrap.bench.settings import CASES, MISTRAL_7B, SMALL, BenchError, Settings, Shape
from kbitwrap.cli import main

HIDDEN, LAYERS, VOCAB = 256, 2, 512
TINY = Shape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=128,
    vocab_size=128,
)
NORM_BYTES = (2 * LAYERS + 1) * HIDDEN * 2  # bfloat16: what float32 adds to a weight is what it holds
TABLE_BYTES = VOCAB * HIDDEN * 2  # the embeddings', and the head's


def settings(**fields: Any) -> Settings:
    return Settings(**{"shape": TINY, "repeats": 1, "step": True, "tokens": 16, **fields})


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """A run of all cases, steps included.

    PEFT's and "compute" run each in a process of its own, as all do for a user. The others run in this one: a process
    imports the libraries for as long as it then measures.
    """
    lines: list[str] = []
    shape = MISTRAL_7B.resized(hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB)
    run_case = runner._run_case

    def run(case: str, asked: Settings, folder: Path) -> dict[str, Any]:
        if case in ("peft", "compute"):
            return run_case(case, asked, folder)
        request, answer = folder / "request.json", folder / "answer.json"
        request.write_text(json.dumps({"case": case, "settings": asked.to_dict()}))
        bench_case.main(str(request), str(answer))
        result: dict[str, Any] = json.loads(answer.read_text())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(runner, "_run_case", run)
        result = runner.run_benchmark(settings(shape=shape), CASES, lines.append)
    assert len(lines) == len(CASES)
    return result


def by_case(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {case["case"]: case for case in result["cases"]}


def test_every_case_is_measured_and_is_json(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured)) == measured
    assert [case["case"] for case in measured["cases"]] == list(CASES)
    assert measured["environment"]["versions"]["torch"] == torch.__version__
    for case in measured["cases"]:
        for key in ("prepare_seconds", "step_seconds"):
            timing = case[key]
            assert 0 < timing["least"] <= timing["median"] <= timing["most"]
            assert len(timing["all"]) == 1
        assert bool(case["restore_seconds"]) == (case["case"] != "peft")
        assert case["transient_peak_bytes"] >= 0
        assert case["step_peak_bytes"] > 0


def test_added_bytes_are_exact(measured: dict[str, Any]) -> None:
    added = {name: case["added_bytes"] for name, case in by_case(measured).items()}
    full = 2 * TABLE_BYTES + NORM_BYTES
    assert added == {"peft": full, "full": full, "compute": NORM_BYTES, "norms": 0, "adapted": 0, "none": 0}
    assert {case["left_bytes"] for case in measured["cases"]} == {0}


@pytest.mark.parametrize("name", ["peft", "full", "compute"])
def test_full_and_compute_are_peft_bit_for_bit(measured: dict[str, Any], name: str) -> None:
    case = by_case(measured)[name]
    assert case["num_gradients"] == 2 * 7 * LAYERS
    assert case["largest_gradient"] > 0
    assert (case["loss_difference"], case["largest_gradient_difference"]) == (0, 0)


def test_the_others_are_seen_to_differ(measured: dict[str, Any]) -> None:
    for name in ("norms", "adapted", "none"):
        assert by_case(measured)[name]["largest_gradient_difference"] > 0


def test_the_tables_show_it(measured: dict[str, Any]) -> None:
    preparation, step = preparation_rows(measured), step_rows(measured)
    for rows in (preparation, step):
        assert [row[0] for row in rows[1:]] == list(CASES)
        assert {len(row) for row in rows} == {len(rows[0])}
    assert preparation[0].count("reserved MiB added") == 0
    assert dict(zip(step[0], step[3], strict=True))["gradient difference"] == "0"
    assert f"torch {torch.__version__}" in header(measured)
    on_cuda = copy.deepcopy(measured)
    on_cuda["cases"][0]["reserved_bytes"] = 1 << 20
    assert [row[-1] for row in preparation_rows(on_cuda)][:3] == ["reserved MiB added", "1.0", "-"]


@pytest.mark.parametrize(
    "fields",
    [
        {"autocast": True},
        {"reentrant": True},
        {"modules_to_save": True},
        {"shape": {**vars(TINY), "is_tied": True}},
        {"autocast": True, "reentrant": True, "modules_to_save": True},
        {"compute_dtype": "bfloat16"},
        {"head_chunk_bytes": 1 << 20},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_compute_is_peft_bit_for_bit_in_every_setting(tmp_path: Path, fields: dict[str, Any]) -> None:
    asked = Settings.from_dict({**settings().to_dict(), **fields})
    peft, compute = (bench_case.Case(name, asked, tmp_path).run() for name in ("peft", "compute"))
    assert compute["loss"] == peft["loss"]
    assert compute["largest_gradient"] > 0
    assert compute["largest_gradient_difference"] == 0
    assert compute["num_gradients"] == 2 * 7 * TINY.num_layers + asked.modules_to_save


def test_settings_travel_as_json() -> None:
    asked = settings(head_chunk_bytes=4096)
    assert Settings.from_dict(json.loads(json.dumps(asked.to_dict()))) == asked


def test_the_shapes() -> None:
    assert (SMALL.hidden_size, SMALL.num_layers, SMALL.vocab_size) == (1024, 4, 32768)
    assert MISTRAL_7B.resized(hidden_size=4096, num_layers=None, vocab_size=None) == MISTRAL_7B


def test_the_model_is_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(TINY, torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0)
    plan = build_plan(model, precision="full")
    assert plan.quantization == "bitsandbytes_4bit"
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    again = build_model(TINY, torch.device("cpu"), compute_dtype=torch.bfloat16, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    packed = TINY.num_layers * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) // 2
    assert sum(p.nbytes for p in model.parameters() if p.dtype == torch.uint8) == packed


def test_live_bytes_count_shared_memory_once() -> None:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = torch.nn.ModuleDict({"first": first, "second": second})
    assert live_bytes(model, lambda name: True) == 64
    assert live_bytes(model, lambda name: False) == 0


def test_a_peak_is_seen() -> None:
    meter = MemoryMeter(torch.device("cpu"))
    if not meter.method.endswith("reset before"):
        pytest.skip("the high-water mark cannot be reset here")
    meter.start()
    torch.ones(16 << 20)
    assert meter.peak() > 60 << 20
    meter.start()
    assert meter.peak() < 30 << 20


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo Traceback >&2; echo 'ValueError: too wide' >&2; exit 1", "case 'none' failed: ValueError: too wide"),
        ("exit 3", "case 'none' failed: exit status 3"),
        ("kill -9 $$", "case 'none' was ended by signal 9: was there enough memory?"),
    ],
    ids=["raises", "exits", "is killed"],
)
@pytest.mark.skipif(os.name != "posix", reason="stands a shell script in for the interpreter")
def test_a_case_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, message: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(BenchError, match=re.escape(message)):
        runner.run_benchmark(settings(), ["none"], lambda line: None)


# ----------------------------------------------------------------------------------------------------
# The command.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def without_processes(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any]
) -> list[tuple[Settings, tuple[str, ...]]]:
    """Collects what the command asks for, and answers with what was measured."""
    asked: list[tuple[Settings, tuple[str, ...]]] = []

    def answer(given: Settings, cases: Any, show: Any) -> dict[str, Any]:
        asked.append((given, tuple(cases)))
        show("case 1 of 1")
        return measured

    monkeypatch.setattr(runner, "run_benchmark", answer)
    return asked


def test_the_command_prints_tables(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "--step", "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("machine ")
    assert len(re.findall("^compute ", printed.out, re.MULTILINE)) == 2
    assert printed.err == "case 1 of 1\n"
    assert (tmp_path / "out").read_text() == printed.out
    assert without_processes == [(Settings(shape=SMALL, step=True), CASES)]


def test_the_command_prints_json(
    without_processes: list[Any], capsys: pytest.CaptureFixture[str], measured: dict[str, Any]
) -> None:
    assert main(["bench", "--json", "--case", "none", "--layers", "3", "--tied"]) == 0
    assert json.loads(capsys.readouterr().out) == measured
    given, cases = without_processes[0]
    assert cases == ("none",)
    assert given.shape == Shape(**{**vars(MISTRAL_7B), "num_layers": 3, "is_tied": True})


@pytest.mark.parametrize(
    "options",
    [
        ["--autocast"],
        ["--modules-to-save"],
        ["--hidden-size", "100"],
        ["--device", "nowhere"],
        ["--output", "/no/such/folder/file"],
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    assert re.fullmatch(r"kbitwrap: error: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("options", [["--repeats", "0"], ["--seed", "-1"], ["--case", "half"], ["--tokens", "many"]])
def test_bad_usage_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *options])
    assert "error: argument" in capsys.readouterr().err
