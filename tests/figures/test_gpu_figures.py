"""The command that measures on a GPU: it goes on where it was stopped, and pages are written of what is there."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import pages

CARD = {"card": "NVIDIA H100 80GB HBM3", "memory": "79 GiB", "torch": "2.11.0", "date": "2026-12-01"}
# Stands for a part: it writes its file as one does, and the one that is named ends in its middle, the first time.
PART = """
import json, os, pathlib, sys
folder, card, stopped, name = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[5]
path, is_stopped = folder / f"{name}.json", name == stopped and not (folder / "tried").exists()
rows = {"one": {"step_seconds": 0.5}} | ({} if is_stopped else {"two": {"step_seconds": 0.25}})
with (folder / "started").open("a") as started:
    started.write(f"{name} ")
said = {"finished": not is_stopped, "is_small": True, "environment": json.loads(card)}
path.write_text(json.dumps({**said, "rows": rows}))
if is_stopped:
    (folder / "tried").touch()
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def gpu(figures: Callable[[str], Any]) -> Any:
    return figures("gpu")


def test_a_command_that_was_stopped_goes_on_with_what_is_missing(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", PART, str(tmp_path), json.dumps(CARD), "qwen"])
    assert gpu.measure(tmp_path, is_small=True) == 1
    assert "| qwen | 1 | 0 | no |" in capfd.readouterr().out
    (tmp_path / "started").unlink()
    assert gpu.measure(tmp_path, is_small=True) == 0
    assert (tmp_path / "started").read_text() == "qwen "
    said = capfd.readouterr().out
    assert said.count("measured before") == len(gpu.LIMITS) - 1
    assert all(f"| {name} | 2 | 0 | yes |" in said for name in gpu.LIMITS)
    with pytest.raises(SystemExit, match="has figures of small models"):
        gpu.measure(tmp_path, is_small=False)


def test_rows_that_are_there_are_not_measured_again_and_errors_are(
    gpu: Any, figures: Callable[[str], Any], tmp_path: Path
) -> None:
    path, asked = tmp_path / "part.json", []

    def row(name: str, found: Any) -> dict[str, Any]:
        asked.append(name)
        if isinstance(found, BaseException):
            raise found
        return {"seconds": found}

    rows = figures("gpu_parts").Rows(path, is_small=True)
    rows.measure("kept", lambda: row("kept", 1.0))
    rows.measure("failed", lambda: row("failed", RuntimeError("out of memory")))
    with pytest.raises(KeyboardInterrupt):
        rows.measure("stopped", lambda: row("stopped", KeyboardInterrupt()))
    assert json.loads(path.read_text())["rows"]["failed"] == {"error": "RuntimeError: out of memory"}

    asked.clear()
    rows = figures("gpu_parts").Rows(path, is_small=True)
    for name in ("kept", "failed", "stopped"):
        rows.measure(name, lambda name=name: row(name, 2.0))
    assert asked == ["failed", "stopped"]
    assert [found["seconds"] for found in json.loads(path.read_text())["rows"].values()] == [1.0, 2.0, 2.0]


def made(card: str, *, is_small: bool = False) -> dict[str, Any]:
    """What a GPU would measure."""
    added = {"peft": 1024, "compute": 0.5, "norms": 0}
    steps = {"norms, 1 x 512": {"off_percent": -1.5}, "peft, 1 x 512": {"off_percent": 2.5}, "trl": {"error": "none"}}
    parts = {
        "reporter": {way: {"added_reserved_bytes": int(size * 2**20)} for way, size in added.items()},
        "mistral": steps,
        "bits": {"Llama": {"export and merge": "the same bits, 21 tensors"}},
    }
    environment = {**CARD, "card": card}
    said = {"finished": True, "is_small": is_small, "environment": environment}
    return {name: {**said, "rows": rows} for name, rows in parts.items()}


def test_pages_are_written_from_what_was_measured(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAGE", "README"):
        copied = Path(shutil.copy(getattr(gpu, name), tmp_path))
        monkeypatch.setattr(gpu, name, copied)
    monkeypatch.setattr(gpu, "FIGURES", tmp_path / "gpu.json")
    for name, part in made(CARD["card"]).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    gpu.write_pages(gpu.read(tmp_path))

    page, readme = gpu.PAGE.read_text(encoding="utf-8"), gpu.README.read_text(encoding="utf-8")
    assert "NVIDIA H100 80GB HBM3, 79 GiB; torch 2.11.0; 2026-12-01." in page
    assert "| norms, 1 x 512 | -1.50 |" in page
    assert "| Llama: export and merge | the same bits, 21 tensors |" in page
    assert "Nothing was measured yet" not in page
    assert "We measured nothing on a GPU ourselves yet" not in readme
    assert "training steps of\na 7B and an 8B model, 1 are within 2 % of the prediction" in readme
    assert "1,024.0\nMiB more" in readme
    assert json.loads(gpu.FIGURES.read_text()) == gpu.read(tmp_path)
    for rehearsed in (made(gpu.SIMULATED), made(CARD["card"], is_small=True)):
        with pytest.raises(SystemExit, match="found those of a rehearsal"):
            gpu.write_pages(rehearsed)
    with pytest.raises(SystemExit, match="run --out DIR again"):
        gpu.write_pages({})


@pytest.mark.thorough
def test_the_predictions_that_travel_along_are_those_of_now(figures: Callable[[str], Any]) -> None:
    parts = figures("gpu_parts")
    cells = json.loads(parts.PREDICTED.read_text(encoding="utf-8"))["cells"]
    for sizes in (parts.SMALL, parts.FULL):
        cells_of = itertools.product(parts.MODELS, parts.WAYS, sizes.batches)
        expected = {parts.cell_name(model, way, *batch) for model, way, batch in cells_of}
        assert cells[sizes.name].keys() == expected
    assert len(cells["full"]) >= 24
    found = parts.predict("mistral", "norms", parts.FULL._replace(batches=((1, 512),)))
    assert found == {name: cells["full"][name] for name in found}


def test_the_page_names_every_part(gpu: Any) -> None:
    page = (pages.DOCS / "gpu.md").read_text(encoding="utf-8")
    assert [name for name in gpu.LIMITS if f"`{name}`" not in page] == []
