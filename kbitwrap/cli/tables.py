"""Tables that fit the width: no line is longer, and no figure is broken."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from .console import num_columns

_GAP = 2
_LEAST_TEXT = 16  # columns of text that is folded
_FIGURE = re.compile(r"[-+±\d\s.,:()%e]*")
_STYLES = {"pass": "green", "yes": "green", "FAIL": "bold red", "no": "red"}


def table(rows: Sequence[Sequence[str]], *, keys: int = 1, right: bool = False) -> Text:
    """Lay rows out in columns, a rule under the first row.

    Where they are too wide, headers are folded first, then columns of text. What is still too wide becomes several
    tables, one below the other, each with the first columns. Figures are not broken where a column has room for them.

    Args:
        rows: The header and the rows, of equal lengths.
        keys: How many of the first columns name a row.
        right: Whether to align the others to the right.

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
    return Text("\n\n").join([_lay_out(part, width, keys if right else len(part)) for part in parts])


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


def _lay_out(columns: Sequence[Sequence[str]], width: int, first_right: int) -> Text:
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
                line += (Text(space) + part if place >= first_right else part + Text(space)) + Text(" " * _GAP)
            line.rstrip()
            lines.append(line)
    return Text("\n").join(lines)
