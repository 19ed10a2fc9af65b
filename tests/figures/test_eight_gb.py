"""The tables of docs/eight_gb.md show what was saved, which is what is predicted."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.fixture(scope="module")
def eight_gb(figures: Any) -> Any:
    return figures("eight_gb")


@pytest.fixture(scope="module")
def rows(eight_gb: Any) -> list[dict[str, Any]]:
    return list(json.loads(eight_gb.FIGURES.read_text())["rows"])


def test_the_page_shows_what_was_saved(eight_gb: Any, figures: Any, rows: list[dict[str, Any]]) -> None:
    section = figures("sections").section
    assert section(eight_gb.PAGE, "steps").strip() == eight_gb.table_of_steps(rows).strip()
    assert section(eight_gb.PAGE, "lengths").strip() == eight_gb.table_of_lengths(rows).strip()


def test_the_page_begins_with_figures_of_its_table(eight_gb: Any, rows: list[dict[str, Any]]) -> None:
    first = " ".join(eight_gb.PAGE.read_text(encoding="utf-8").split("\n\n")[1].split())
    longest = {
        (row["trainer"], row["way"]): row["longest_sequence"] for row in rows if row["model"] == eight_gb.REPORTED
    }
    assert f"sequences of {longest['plain', 'norms']:,} tokens" in first
    assert f"of {longest['sft', 'norms']:,} with TRL" in first
    assert longest["plain", "peft"] == 0


def test_what_the_host_takes_was_measured_with_torch_for_cuda(eight_gb: Any) -> None:
    host = json.loads(eight_gb.HOST.read_text())
    assert "+cu" in host["environment"]["versions"]["torch"]
    loading = host["loading"]
    assert loading["mapped_bytes"] >= 0.99 * loading["file_bytes"]
    assert loading["beside_the_model_bytes"] < 0.01 * loading["file_bytes"]
    assert "Cannot allocate memory" in host["larger_than_memory"]


@pytest.mark.thorough
def test_what_was_saved_is_what_is_predicted(eight_gb: Any, rows: list[dict[str, Any]]) -> None:
    (model,) = (one for one in eight_gb.fits.models() if one["name"] == eight_gb.REPORTED)
    found = eight_gb.predict(model, "plain", "none")
    assert found in rows
