"""Tables that fit the width: no line is longer, and no figure is broken."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from .console import num_columns

_GAP = 2
_LEAST_TEXT = 16  # columns of text that is folded
_SHORTEST_BAR = 8
_LONGEST_BAR = 32
_FIGURE = re.compile(r"[-+±\d\s.,:()%e]*")
_STYLES = {"pass": "green", "yes": "green", "FAIL": "bold red", "no": "red"}

Column = Sequence[str]
"""The cells of a column, the header first."""
Rows = list[list[str]]
"""The cells of the rows, the header first."""


@dataclass(frozen=True)
class Bars:
    """A column of bars, drawn behind a table where there is room for it.

    Attributes:
        title: The header of the column.
        sizes: The sizes of the parts of each row's bar; the first is drawn full, the
            second light.
        mark: A size that is marked on every bar.
    """

    title: str
    sizes: Sequence[Sequence[int]]
    mark: int | None = None

    def drawn(self, room: int) -> Column | None:
        """Draw the column.

        Args:
            room: The columns of the terminal that are left for it.

        Returns:
            The column; ``None`` where they are too few, or all is zero.
        """
        width = min(room, _LONGEST_BAR)
        longest = max([*map(sum, self.sizes), self.mark or 0])
        if width < max(_SHORTEST_BAR, cell_len(self.title)) or not longest:
            return None
        scale = width / longest
        return [self.title, *(self._bar(sizes, width, scale) for sizes in self.sizes)]

    def _bar(self, sizes: Sequence[int], width: int, scale: float) -> str:
        """Draw the bar of a row.

        Args:
            sizes: The sizes of its parts, one behind the other.
            width: The columns of the terminal that the longest bar takes.
            scale: Columns for each unit of size.

        Returns:
            The bar, padded to the width.
        """
        parts, line = _drawn_with()
        cells = [" "] * width
        start = end = 0
        for size, part in zip(sizes, parts, strict=False):
            end += size
            last = round(scale * end)
            if end > 0 and not last:
                last = 1  # what is there is seen
            first = round(scale * start)
            cells[first:last] = part * len(cells[first:last])
            start = end
        if self.mark is not None:
            place = round(scale * self.mark)
            cells[min(place, width - 1)] = line
        return "".join(cells)


def _drawn_with() -> tuple[str, str]:
    """The two parts of a bar and the mark, in what standard output can show."""
    try:
        "█░│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#+", "|"
    return "█░", "│"


def table(
    rows: Sequence[Sequence[str]],
    *,
    keys: int = 1,
    right: bool = False,
    bars: Bars | None = None,
) -> Group:
    """Lay rows out in columns, a rule under the first row.

    Where they are too wide, headers are folded first, then columns of text. What is
    still too wide becomes several tables, one below the other, each with the first
    columns. Figures are not broken where a column has room for them.

    Args:
        rows: The header and the rows, of equal lengths.
        keys: How many of the first columns name a row.
        right: Whether to align the others to the right.
        bars: Bars to draw behind the rows.

    Returns:
        The table for ``show``.

    Example:
        >>> from kbitwrap.cli.console import show
        >>> show(table([("check", "result"), ("loss", "pass")]))
        check  result
        -----  ------
        loss   pass
    """
    columns: list[Column] = list(zip(*rows, strict=True))
    taken = sum(_widest(column) + _GAP for column in columns)
    drawn = None if bars is None else bars.drawn(num_columns() - taken)
    if drawn is not None:
        columns.append(drawn)
    num_left = keys if right else len(columns)
    names = columns[:keys]
    part = list(names)
    parts: list[Table | str] = []
    for column in columns[keys:]:
        if len(part) > keys and _widths([*part, column]) is None:
            parts += [_lay_out(part, num_left), ""]
            part = list(names)
        part.append(column)
    last = _lay_out(part, num_left)
    if drawn is not None:
        last.columns[-1].justify = "left"
    return Group(*parts, last)


def _widest(cells: Column) -> int:
    return max(map(cell_len, cells))


def _widths(columns: Sequence[Column]) -> list[int] | None:
    """Find widths in which columns fit side by side.

    Of the columns that can still be folded, the one in which the fewest cells are folded
    by it gives way by one, and the widest of several; and so on, until all fit.

    Args:
        columns: The columns.

    Returns:
        Their widths; ``None`` where they do not fit.
    """
    room = num_columns() - _GAP * (len(columns) - 1)
    widths = [_widest(column) for column in columns]
    least = [_least_width(column) for column in columns]
    while sum(widths) > room:
        wider = [place for place, width in enumerate(widths) if width > least[place]]
        if not wider:
            return None

        def cost(place: int) -> tuple[int, int]:
            _, *cells = columns[place]
            num_folded = sum(cell_len(cell) >= widths[place] for cell in cells)
            return num_folded, -widths[place]

        widths[min(wider, key=cost)] -= 1
    return widths


def _least_width(column: Column) -> int:
    """The width down to which a column may be folded.

    A header is folded between words, and text anywhere; a figure is not.

    Args:
        column: The column.

    Returns:
        The width.
    """
    header, *cells = column
    words = _widest([*header.split(), ""])
    text = _widest([*cells, ""])
    if not all(map(_FIGURE.fullmatch, cells)):
        text = min(text, _LEAST_TEXT)
    return max(words, text)


def _lay_out(columns: Sequence[Column], num_left: int) -> Table:
    """Make one table, without asking whether its columns fit.

    Args:
        columns: The columns.
        num_left: How many of the first are aligned to the left; the others to the right.

    Returns:
        The table.
    """
    grid = Table.grid(padding=(0, _GAP, 0, 0))
    widths = _widths(columns)
    if widths is None:
        even = max((num_columns() + _GAP) // len(columns) - _GAP, 1)
        widths = [min(even, _widest(column)) for column in columns]
    for width in widths:
        grid.add_column(width=width, overflow="fold")
    for column in grid.columns[num_left:]:
        column.justify = "right"
    header, *rows = zip(*columns, strict=True)
    grid.add_row(*(Text(cell, "bold") for cell in header))
    grid.add_row(*(Rule(characters="-", style="dim") for _ in header))
    for row in rows:
        grid.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    return grid


def add_column(rows: Rows, header: str, cells: Sequence[str]) -> None:
    """Add a column behind the others."""
    for row, cell in zip(rows, [header, *cells], strict=True):
        row.append(cell)


def figure(num_bytes: int, unit: int, digits: int = 3) -> str:
    """Write bytes in a unit; a number above zero is never shown as zero.

    Args:
        num_bytes: The bytes.
        unit: Bytes in the unit.
        digits: Digits behind the point.

    Returns:
        The number, without the unit.
    """
    return "0" if num_bytes == 0 else f"{max(num_bytes / unit, 0.001):,.{digits}f}"
