"""Runs tests/quantizers, and writes what they answer into the table of docs/compatibility.md.

    python .ci/compatibility.py
    QUANTIZERS="gptq awq" python .ci/compatibility.py

A row is a method of quantization with its settings. The rows that the page has between `<!-- compatibility -->` and
`<!-- end -->` are replaced by those of the methods that were run, if every test passes; the rows of other methods stay.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
COLUMNS = ("wrapper", "export", "merged export", "drop-in", "Trainer")


class Answers:
    """A plugin of pytest that collects what passed tests answer, by row and column."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep each answer once."""
        if report.when != "call" or not report.passed:
            return
        for name, value in report.user_properties:
            if name == "compatibility":
                row, column, text = value  # type: ignore[misc]
                texts = self.rows.setdefault(row, {}).setdefault(column, [])
                if text not in texts:
                    texts.append(text)

    def table(self, old: str) -> str:
        """The table, in the order of the old one; new rows come last, in the order of the tests."""
        head = [f"| {' | '.join(row)} |" for row in (["method", *COLUMNS], ["---"] * (len(COLUMNS) + 1))]
        lines = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[2:]}
        for row, found in self.rows.items():
            lines[row] = f"| {row} | {' | '.join('; '.join(found.get(column, ['-'])) for column in COLUMNS)} |"
        return "\n".join([*head, *lines.values()])


def main() -> int:
    answers = Answers()
    tests = ROOT / "tests" / "quantizers"
    status = int(pytest.main(["-q", str(tests), f"--ignore={tests / 'test_page.py'}"], plugins=[answers]))
    page = PAGE.read_text(encoding="utf-8")
    page, count = re.subn(
        r"(<!-- compatibility -->\n)(.*?)(<!-- end -->)",
        lambda found: f"{found[1]}\n{answers.table(found[2])}\n\n{found[3]}",
        page,
        flags=re.DOTALL,
    )
    if count != 1:
        raise SystemExit(f"{PAGE}: expected one block <!-- compatibility -->, found {count}")
    if status == 0:
        PAGE.write_text(page, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
