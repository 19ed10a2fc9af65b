"""Runs tests/quantizers, and writes what they answer into the table of docs/compatibility.md.

    python docs/figures compatibility
    QUANTIZERS="gptq awq" python docs/figures compatibility

A row is a method of quantization with its settings. The rows that the page has between `<!-- compatibility -->` and
`<!-- end -->` are replaced by those of the methods that were run, if every test passes; the rows of other methods stay.
"""

from __future__ import annotations

import pytest

from sections import DOCS, markdown_table, replace_section, section

PAGE = DOCS / "compatibility.md"
COLUMNS = ("block", "export", "merged export", "drop-in", "Trainer")


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
        head = markdown_table([["method", *COLUMNS]])
        lines = {line.split("|")[1].strip(): line for line in old.strip().splitlines()[2:]}
        for row, found in self.rows.items():
            lines[row] = f"| {row} | {' | '.join('; '.join(found.get(column, ['-'])) for column in COLUMNS)} |"
        return "\n".join([head, *lines.values()])


def main() -> int:
    answers = Answers()
    tests = DOCS.parent / "tests" / "quantizers"
    status = int(
        pytest.main(
            ["-q", "-m", "thorough or not thorough", str(tests), f"--ignore={tests / 'test_page.py'}"],
            plugins=[answers],
        )
    )
    if status == 0:
        replace_section(PAGE, "compatibility", answers.table(section(PAGE, "compatibility")))
    return status
