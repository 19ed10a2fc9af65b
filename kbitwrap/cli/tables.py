"""Tables that fit the width: no line is longer, and no figure is broken."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .console import num_columns

_GAP = 2
_LEAST_TEXT = 16  # columns of text that is folded
_SHORTEST_BAR, _LONGEST_BAR = 8, 32
_FIGURE = re.compile(r"[-+±\d\s.,:()%e]*")
_STYLES = {"pass": "green", "yes": "green", "FAIL": "bold red", "no": "red"}


def with_bars(
    rows: Sequence[Sequence[str]], title: str, bars: Sequence[Sequence[int]], mark: int | None = None
) -> tuple[list[list[str]], int]:
    """Add a column of bars to rows, if there is room for it.

    Args:
        rows: The header and the rows.
        title: The header of the bars.
        bars: The sizes of the parts of each row's bar; the first is drawn full, the second light.
        mark: A size that is marked on every bar.

    Returns:
        The rows for ``table``, and the number of columns that were added, for its ``left``.
    """
    taken = sum(max(map(cell_len, column)) + _GAP for column in zip(*rows, strict=True))
    width = min(num_columns() - taken, _LONGEST_BAR)
    most = max([*map(sum, bars), mark or 0])
    if width < max(_SHORTEST_BAR, cell_len(title)) or not most:
        return [list(row) for row in rows], 0
    header, *others = rows
    drawn = [_bar(sizes, most, width, mark) for sizes in bars]
    return [[*header, title], *([*row, one] for row, one in zip(others, drawn, strict=True))], 1


def _bar(sizes: Sequence[int], most: int, width: int, mark: int | None) -> str:
    cells, end, parts, line = [" "] * width, 0, *_drawn_with()
    for size, part in zip(sizes, parts, strict=False):
        start, end = end, end + size
        first, last = (round(width * place / most) for place in (start, end))
        last = last or int(end > 0)  # what is there is seen
        cells[first:last] = part * len(cells[first:last])
    if mark is not None:
        cells[min(round(width * mark / most), width - 1)] = line
    return "".join(cells)


def _drawn_with() -> tuple[str, str]:
    """The two parts of a bar and the mark, in what standard output can show."""
    try:
        "█░│".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "#+", "|"
    return "█░", "│"


def table(rows: Sequence[Sequence[str]], *, keys: int = 1, right: bool = False, left: int = 0) -> Text:
    """Lay rows out in columns, a rule under the first row.

    Where they are too wide, headers are folded first, then columns of text. What is still too wide becomes several
    tables, one below the other, each with the first columns. Figures are not broken where a column has room for them.

    Args:
        rows: The header and the rows, of equal lengths.
        keys: How many of the first columns name a row.
        right: Whether to align the others to the right.
        left: How many of the last columns are aligned to the left all the same.

    Returns:
        The table for ``show``.

    Example:
        >>> from kbitwrap.cli.console import show
        >>> show(table([("check", "result"), ("loss", "pass")]))
        check  result
        -----  ------
        loss   pass
    """
    width = num_columns()
    columns = list(zip(*rows, strict=True))
    first = columns[:keys]
    parts = [first]
    for column in columns[keys:]:
        if len(parts[-1]) == keys or _widths([*parts[-1], column], width) is not None:
            parts[-1] = [*parts[-1], column]
        else:
            parts.append([*first, column])
    aligned = [(keys if right else len(part), left if part is parts[-1] else 0) for part in parts]
    return Text("\n\n").join([_lay_out(part, width, *sides) for part, sides in zip(parts, aligned, strict=True)])


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The widths of columns that fit side by side; ``None`` where they do not."""
    room = width - _GAP * (len(columns) - 1)
    widest = [max(map(cell_len, column)) for column in columns]
    if sum(widest) <= room:
        return widest
    widths = [max([*map(cell_len, cells), *map(cell_len, header.split())]) for header, *cells in columns]
    for i in sorted(range(len(columns)), key=lambda i: widest[i] - widths[i]):
        if sum(widths) + widest[i] - widths[i] <= room:  # not every header has to be folded
            widths[i] = widest[i]
    texts = [i for i, column in enumerate(columns) if not all(map(_FIGURE.fullmatch, column[1:]))]
    for _ in range(sum(widths) - room):
        texts = [i for i in texts if widths[i] > _LEAST_TEXT]
        if not texts:
            return None
        # The column in which the fewest cells are folded for it, or else the widest.
        widths[min(texts, key=lambda i: (sum(cell_len(c) >= widths[i] for c in columns[i]), -widths[i]))] -= 1
    return widths


def _lay_out(columns: Sequence[Sequence[str]], width: int, first_right: int, num_left: int) -> Text:
    even = max((width + _GAP) // len(columns) - _GAP, 1)
    widths = _widths(columns, width) or [min(even, max(map(cell_len, column))) for column in columns]
    headers, *rows = zip(*columns, strict=True)
    styled = [[Text(header, "bold") for header in headers], [Text("-" * width, "dim") for width in widths]]
    styled += [[Text(cell, _STYLES.get(cell, "")) for cell in row] for row in rows]
    console = Console()
    lines = []
    for row in styled:
        cells = [
            cell.wrap(console, width, overflow="fold") or [Text()] for cell, width in zip(row, widths, strict=True)
        ]
        for number in range(max(1, *map(len, cells))):
            line = Text()
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
                part = cell[number] if number < len(cell) else Text()
                part.rstrip()
                space = " " * (width - part.cell_len)
                is_right = first_right <= place < len(columns) - num_left
                line += (Text(space) + part if is_right else part + Text(space)) + Text(" " * _GAP)
            line.rstrip()
            lines.append(line)
    return Text("\n").join(lines)
