"""Tables that fit the width: no line is longer, and no figure is broken."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Iterable, Sequence

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
    rows: Sequence[Sequence[str]],
    title: str,
    bars: Sequence[Sequence[int]],
    mark: int | None = None,
) -> tuple[list[list[str]], int]:
    """Add a column of bars to rows, if there is room for it.

    Args:
        rows: The header and the rows.
        title: The header of the bars.
        bars: The sizes of the parts of each row's bar; the first is drawn full, the
            second light.
        mark: A size that is marked on every bar.

    Returns:
        The rows for ``table``, and the number of columns that were added, for its
            ``left``.
    """
    taken = sum(_widest(column) + _GAP for column in zip(*rows, strict=True))
    width = min(num_columns() - taken, _LONGEST_BAR)
    most = max([*map(sum, bars), mark or 0])
    least_width = max(_SHORTEST_BAR, cell_len(title))
    if width < least_width or not most:
        return [list(row) for row in rows], 0
    added = [title, *(_bar(sizes, most, width, mark) for sizes in bars)]
    return [[*row, cell] for row, cell in zip(rows, added, strict=True)], 1


def _bar(sizes: Sequence[int], most: int, width: int, mark: int | None) -> str:
    parts, line = _drawn_with()
    cells = [" "] * width
    end = 0
    for size, part in zip(sizes, parts, strict=False):
        start = end
        end += size
        first = round(width * start / most)
        last = round(width * end / most)
        if end > 0 and not last:
            last = 1  # what is there is seen
        cells[first:last] = part * len(cells[first:last])
    if mark is not None:
        place = round(width * mark / most)
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
    rows: Sequence[Sequence[str]], *, keys: int = 1, right: bool = False, left: int = 0
) -> Text:
    """Lay rows out in columns, a rule under the first row.

    Where they are too wide, headers are folded first, then columns of text. What is
    still too wide becomes several tables, one below the other, each with the first
    columns. Figures are not broken where a column has room for them.

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
    names = columns[:keys]
    parts = [list(names)]
    for column in columns[keys:]:
        part = parts[-1]
        is_first = len(part) == keys
        if is_first or _widths([*part, column], width) is not None:
            part.append(column)
        else:
            parts.append([*names, column])
    laid_out = []
    for part in parts:
        num_left = left if part is parts[-1] else 0
        right_columns = range(keys, len(part) - num_left) if right else range(0)
        laid_out.append(_lay_out(part, width, right_columns))
    return Text("\n\n").join(laid_out)


def _widest(cells: Iterable[str]) -> int:
    return max(map(cell_len, cells))


def _widths(columns: Sequence[Sequence[str]], width: int) -> list[int] | None:
    """The widths of columns that fit side by side; ``None`` where they do not."""
    room = width - _GAP * (len(columns) - 1)
    widest = [_widest(column) for column in columns]
    if sum(widest) <= room:
        return widest
    widths = []
    for header, *cells in columns:
        widths.append(_widest([*cells, *header.split(), ""]))
    saved = [most - least for most, least in zip(widest, widths, strict=True)]
    for place in sorted(range(len(columns)), key=saved.__getitem__):
        if sum(widths) + saved[place] <= room:  # not every header has to be folded
            widths[place] = widest[place]
    while sum(widths) > room:
        folded = _column_to_narrow(columns, widths)
        if folded is None:
            return None
        widths[folded] -= 1
    return widths


def _column_to_narrow(
    columns: Sequence[Sequence[str]], widths: Sequence[int]
) -> int | None:
    """The column of text in which the fewest cells are folded when it gets narrower, or else the widest."""
    best = None
    least_cost = (math.inf, 0)
    for place, (column, width) in enumerate(zip(columns, widths, strict=True)):
        _, *cells = column
        if width <= _LEAST_TEXT or all(map(_FIGURE.fullmatch, cells)):
            continue
        num_folded = sum(cell_len(cell) >= width for cell in column)
        cost = (num_folded, -width)
        if cost < least_cost:
            best = place
            least_cost = cost
    return best


def _lay_out(
    columns: Sequence[Sequence[str]], width: int, right_columns: range
) -> Text:
    widths = _widths(columns, width)
    if widths is None:
        even = max((width + _GAP) // len(columns) - _GAP, 1)
        widths = [min(even, _widest(column)) for column in columns]
    header, *rows = zip(*columns, strict=True)
    lines = _row_lines([Text(cell, "bold") for cell in header], widths, right_columns)
    lines += _row_lines(
        [Text("-" * width, "dim") for width in widths], widths, right_columns
    )
    for row in rows:
        lines += _row_lines(
            [Text(cell, _STYLES.get(cell, "")) for cell in row], widths, right_columns
        )
    return Text("\n").join(lines)


def _row_lines(
    row: Sequence[Text], widths: Sequence[int], right_columns: range
) -> list[Text]:
    """A row as lines, as many as its longest cell is folded into."""
    console = Console()
    folded = [
        cell.wrap(console, width, overflow="fold")
        for cell, width in zip(row, widths, strict=True)
    ]
    lines = []
    for parts in itertools.zip_longest(*folded):
        line = Text()
        for place, (part, width) in enumerate(zip(parts, widths, strict=True)):
            line += _padded(part, width, is_right=place in right_columns)
        line.rstrip()
        lines.append(line)
    return lines


def _padded(part: Text | None, width: int, *, is_right: bool) -> Text:
    """A line of a cell, or an empty one, with the gap after it."""
    text = Text() if part is None else part
    text.rstrip()
    space = Text(" " * (width - text.cell_len))
    gap = Text(" " * _GAP)
    return space + text + gap if is_right else text + space + gap
