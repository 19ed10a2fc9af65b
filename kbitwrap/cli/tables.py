"""Tables, and the figures in them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.rule import Rule
from rich.table import Table
from rich.text import Text

_STYLES = {"pass": "green", "yes": "green", "FAIL": "bold red", "no": "red"}

Rows = list[list[str]]
"""The cells of the rows, the header first."""


def table(rows: Sequence[Sequence[str]], *, right: bool = False) -> Table:
    """Lay rows out in columns, a rule under the first row.

    Args:
        rows: The header and the rows, of equal lengths.
        right: Whether to align all columns but the first to the right.

    Returns:
        The table for ``show``.

    Example:
        >>> from kbitwrap.cli.console import show
        >>> from kbitwrap.cli.tables import table
        >>> show(table([("check", "result"), ("loss", "pass")]))
        check  result
        -----  ------
        loss   pass
    """
    header, *others = rows
    grid = Table.grid(padding=(0, 2, 0, 0))
    for number, _ in enumerate(header):
        is_right = right and number > 0
        grid.add_column(justify="right" if is_right else "left", overflow="fold")
    grid.add_row(*(Text(cell, "bold") for cell in header))
    grid.add_row(*(Rule(characters="-", style="dim") for _ in header))
    for row in others:
        grid.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    return grid


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
