"""The page of published figures: every measurement is predicted, and its counts are those of the data."""

from __future__ import annotations

import csv
import json
import math
import re
from typing import Any

import pytest

from support import pages

FIGURES = pages.DOCS / "figures"


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    data = json.loads((pages.DOCS / "benchmarks" / "published.json").read_text(encoding="utf-8"))
    return list(data["rows"])


@pytest.fixture(scope="module")
def rows(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose peak was measured."""
    return [row for row in runs if "peak_bytes" in row["measured"]]


def _near(rows: list[dict[str, Any]], percent: float, figure: str = "peak_bytes") -> int:
    return sum(abs(row["error_percent"].get(figure, math.inf)) <= percent for row in rows)


def test_every_measurement_is_predicted(runs: list[dict[str, Any]]) -> None:
    with open(FIGURES / "published.csv", newline="", encoding="utf-8") as file:
        given = list(csv.DictReader(file))
    for row, said in zip(runs, given, strict=True):
        measured = {name: int(value) for name, value in said.items() if value and name.endswith("_bytes")}
        assert row["measured"] == measured
        settings = {name: value for name, value in said.items() if value and not name.endswith("_bytes")}
        assert settings.items() <= row.items()


def test_the_page_counts_the_runs_of_the_data(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    page = (pages.DOCS / "published.md").read_text(encoding="utf-8")
    said = f"**{_near(rows, 2)} of {len(rows)} published runs are predicted within 2 %, {_near(rows, 3)} within 3 %"
    assert said in page
    table = page.partition("<!-- published -->")[2].partition("<!-- end -->")[0]
    assert table.count("\n| ") == sum(bool(row["measured"]) for row in runs) + 2


def test_the_page_counts_those_that_are_near_with_what_the_allocator_adds(rows: list[dict[str, Any]]) -> None:
    page = " ".join((pages.DOCS / "published.md").read_text(encoding="utf-8").split())
    near = sum(abs(row["error_with_least_percent"]) <= 0.5 for row in rows)
    assert f"With the least that is predicted of these, {near} of the runs are met within 0.5 %" in page


def test_the_page_counts_what_is_reserved(runs: list[dict[str, Any]]) -> None:
    page = " ".join((pages.DOCS / "published.md").read_text(encoding="utf-8").split())
    stated = [row for row in runs if "reserved_bytes" in row["measured"]]
    near = [_near(stated, percent, "reserved_bytes") for percent in (3, 5, 10)]
    said = "**Of {} runs that state reserved memory, {} are predicted within 3 %, {} within 5 % and {} within 10 %.**"
    assert said.format(len(stated), *near) in page


def test_a_run_is_predicted_to_fit_where_it_did(runs: list[dict[str, Any]]) -> None:
    wrong = [row for row in runs if row["fits"] is not None and row["measured"] and not row["fits"]]
    wrong += [row for row in runs if "ran_out" in row and row["fits"]]
    assert not [(row["source"], row["model"], row["batch"]) for row in wrong]


def test_every_run_has_its_source(runs: list[dict[str, Any]]) -> None:
    with open(FIGURES / "published_sources.csv", newline="", encoding="utf-8") as file:
        sources = [row["source"] for row in csv.DictReader(file)]
    assert not [row["source"] for row in runs if not row["source"].startswith(tuple(sources))]
    assert not [source for source in sources if not any(row["source"].startswith(source) for row in runs)]


@pytest.mark.parametrize("name", ["published.md", "pictures.md"])
def test_the_picture_is_said_to_show_the_runs_of_the_data(rows: list[dict[str, Any]], name: str) -> None:
    page = (pages.DOCS / name).read_text(encoding="utf-8")
    [(count, near)] = re.findall(r"peaks of (\d+) runs, .*: (\d+) of them within 2 %", page)
    assert (int(count), int(near)) == (len(rows), _near(rows, 2))


def test_other_pages_count_as_many(rows: list[dict[str, Any]]) -> None:
    pictures = (pages.DOCS / "pictures.md").read_text(encoding="utf-8")
    assert f"Of {len(rows)} peaks that others measured on GPUs, {_near(rows, 2)} are predicted within 2 %" in pictures
    fit = (pages.DOCS / "fit.md").read_text(encoding="utf-8")
    assert f"[{len(rows)} peaks of real runs](published.md)" in fit


def test_the_page_says_how_many_of_fitchecks_peaks_lie_in_range(rows: list[dict[str, Any]]) -> None:
    of_fitcheck = [row for row in rows if row["source"].startswith("fitcheck")]
    outside = [row for row in of_fitcheck if not row["in_range"]]
    below = [1 - row["measured"]["peak_bytes"] / row["range"][0] for row in outside]
    page = " ".join((pages.DOCS / "published.md").read_text(encoding="utf-8").split())
    inside = len(of_fitcheck) - len(outside)
    assert all(0 < share < 0.0006 for share in below)
    assert f"Of fitcheck's {len(of_fitcheck)} peaks {inside} lie in the predicted range" in page
