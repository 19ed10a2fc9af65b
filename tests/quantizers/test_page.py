"""The table of docs/compatibility.md is that of these tests."""

from __future__ import annotations

import re
from pathlib import Path

from cells import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_page_has_a_row_for_every_cell_with_an_answer_in_every_column() -> None:
    (block,) = re.findall(r"<!-- compatibility -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    header, _, *rows = [[part.strip() for part in line.strip("|").split("|")] for line in block.strip().splitlines()]
    found = {row[0]: row[1:] for row in rows}
    assert found.keys() == {f"{method}-{name}" for method, cells in METHODS.items() for name in cells}
    assert all(len(row) == len(header) and "-" not in row[1:] for row in rows)
