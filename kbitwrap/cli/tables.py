"""Tables of text and figures."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table


def table(rows: Sequence[Sequence[str]], *, right: bool = False) -> Table:
    """Lay rows out in columns, a rule under the first row.

    Args:
        rows: The header and the rows, of equal lengths.
        right: Whether to align all columns but the first to the right.

    Returns:
        The table for ``show``.
    """
    header, *others = rows
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(header):
        is_right = right and number > 0
        grid.add_column(name, justify="right" if is_right else "left", overflow="fold")
    for row in others:
        grid.add_row(*row)
    return grid
