"""Writes the figures of docs/guarantees.md from the records of `python tests/campaign`.

    python docs/figures guarantees [RECORD ...]

The records are added to docs/benchmarks/guarantees.json: each is one run, told by its kind and its first seed, and a
longer record of it takes the place of a shorter one. Without a record the page is written from what is there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sections import DOCS, markdown_table, replace_section

PAGE, FIGURES = DOCS / "guarantees.md", DOCS / "benchmarks" / "guarantees.json"
GOALS = {"faults": 100_000, "cycles": 10_000, "kills": 500, "sequences": 100_000, "files": 1_000_000}


def add(runs: list[dict[str, Any]], record: dict[str, Any]) -> None:
    """Add a record's runs; a longer record of the same run takes the place of a shorter one."""
    for kind in GOALS.keys() & record.keys():
        run = {"kind": kind, "versions": record["versions"], "seed": 0, **record[kind]}
        run["violations"] = len(run["violations"])
        same = [one for one in runs if (one["kind"], one["seed"]) == (kind, run["seed"])]
        runs[:] = [one for one in runs if one not in same] + [max([*same, run], key=lambda one: one["trials"])]


def table(runs: list[dict[str, Any]]) -> str:
    """The sums by kind."""
    rows = [["kind", "trials", "at least", "violations", "hours of one core"]]
    for kind, goal in GOALS.items():
        of_kind = [run for run in runs if run["kind"] == kind]
        trials, violations, seconds = (sum(run[key] for run in of_kind) for key in ("trials", "violations", "seconds"))
        rows.append([f"`{kind}`", f"{trials:,}", f"{goal:,}", str(violations), f"{seconds / 3600:.1f}"])
    return markdown_table(rows, "---:")


def main() -> None:
    """Add the records, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    runs: list[dict[str, Any]] = json.loads(FIGURES.read_text()) if FIGURES.exists() else []
    for path in parser.parse_args().records:
        add(runs, json.loads(path.read_text()))
    runs.sort(key=lambda run: (run["kind"], run["seed"]))
    FIGURES.write_text(json.dumps(runs, indent=1) + "\n")
    replace_section(PAGE, "figures", table(runs))
