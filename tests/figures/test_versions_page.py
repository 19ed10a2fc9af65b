"""docs/versions.md: its tables are what was noted, the gate notes each column, and no version stands there untested."""

from __future__ import annotations

import datetime
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from support import pages

AROUND = {
    "python": "3.11",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.50.2",
    "accelerate": "1.15.0",
    "huggingface-hub": "2.4.0",
    "safetensors": "0.8.0",
    "typer": "0.29.2",
}


@pytest.fixture(scope="module")
def versions(figures: Any) -> Any:
    return figures("versions")


def test_the_page_shows_what_was_noted(versions: Any, figures: Any) -> None:
    saved = json.loads(versions.FIGURES.read_text(encoding="utf-8"))
    for name, columns in versions.TABLES.items():
        assert figures("sections").section(versions.PAGE, name).strip() == versions.table(saved, columns)


def test_each_column_is_noted_by_the_gate_and_stands_in_one_table(versions: Any) -> None:
    gate = (pages.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    named = set(re.findall(r"^ *(?:tested|quantizers|versions) ([a-z][\w.-]+)", gate, re.MULTILINE))
    columns = [column for table in versions.TABLES.values() for column in table]
    assert named == set(columns) == set(versions.COLUMNS)
    assert len(columns) == len(versions.COLUMNS)


def test_what_is_installed_is_noted_without_the_name_of_a_build(versions: Any, tmp_path: Path) -> None:
    noted = tmp_path / "versions.json"
    assert versions.note(noted, "pinned", []) == 0
    assert versions.note(noted, "pinned", ["pytest"]) == 0
    found = versions.read(noted)["pinned"]
    assert found["torch"] == version("torch").split("+")[0]
    assert found["pytest"] == version("pytest")
    assert datetime.date.fromisoformat(found["tested"]) <= datetime.date.today()
    assert set(found) == {"tested", "python", *versions.EVERYWHERE, "pytest"}


def test_a_run_that_agrees_with_the_page_leaves_its_versions(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = tmp_path / "noted.json"
    monkeypatch.setattr(versions, "FIGURES", tmp_path / "saved.json")
    versions.save(versions.FIGURES, {"pinned": {**AROUND, "trl": "1.16.0"}, "oldest": AROUND})
    versions.save(noted, {"pinned": AROUND | {"tested": "2026-11-26"}})  # a part of the gate
    assert versions.compare(noted) == 0
    assert capsys.readouterr().out.startswith("docs/versions.md has these versions. This writes the day:\npython ")


@pytest.mark.parametrize("library", ["peft", "trl"])
def test_a_version_that_the_page_does_not_have_is_said_with_the_command_that_writes_it(
    library: str, versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = tmp_path / "noted.json"
    monkeypatch.setattr(versions, "FIGURES", tmp_path / "saved.json")
    versions.save(versions.FIGURES, {"pinned": AROUND})
    versions.save(noted, {"pinned": {**AROUND, library: "9.9"}})
    assert versions.compare(noted) == 0
    said = capsys.readouterr().out
    assert f"pinned: {library} 9.9 was tested, the page has {AROUND.get(library, 'none')}" in said
    assert "\npython docs/figures versions write '{" in said


def test_a_run_with_another_python_is_not_compared(
    versions: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = tmp_path / "noted.json"
    monkeypatch.setattr(versions, "FIGURES", tmp_path / "saved.json")
    versions.save(versions.FIGURES, {"pinned": AROUND})
    versions.save(noted, {"pinned": {**AROUND, "python": "3.10", "transformers": "5.20.0"}})
    assert versions.compare(noted) == 0
    assert "tested with Python 3.10, the page has 3.11: not compared" in capsys.readouterr().out


def test_what_was_tested_with_other_versions_around_it_is_dropped(versions: Any) -> None:
    saved = {"pinned": {**AROUND, "deepspeed": "0.19.8"}, "oldest": AROUND, "torch-2.12": AROUND}
    same = {"pinned": {**AROUND, "trl": "1.16.0"}}
    assert versions.merged(saved, same) == {
        "pinned": {**AROUND, "deepspeed": "0.19.8", "trl": "1.16.0"},
        "oldest": AROUND,
    }
    later = {"pinned": AROUND | {"tested": "2026-11-26"}}
    assert versions.merged(later, {"pinned": AROUND | {"tested": "2026-12-01"}})["pinned"]["tested"] == "2026-12-01"
    newer = {"pinned": {**AROUND, "peft": "0.22.0", "trl": "1.16.0"}}
    assert versions.merged(saved, newer) == {**newer, "oldest": AROUND}
