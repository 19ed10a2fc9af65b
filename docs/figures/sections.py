"""The parts of pages that commands write."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parents[1]
_END = "<!-- end -->"


def section(page: Path, name: str) -> str:
    """The text of a page between the comment `<!-- NAME -->` and the next `<!-- end -->`."""
    return _split(page, name)[1]


def replace_section(page: Path, name: str, text: str) -> None:
    """Write a text between these two comments."""
    before, _, after = _split(page, name)
    page.write_text(f"{before}\n{text.strip()}\n\n{after}", encoding="utf-8")


def _split(page: Path, name: str) -> tuple[str, str, str]:
    begin = f"<!-- {name} -->\n"
    source = page.read_text(encoding="utf-8")
    if source.count(begin) != 1:
        raise SystemExit(f"{page}: expected one section {begin.strip()}, found {source.count(begin)}")
    start = source.index(begin) + len(begin)
    end = source.find(_END, start)
    if end < 0:
        raise SystemExit(f"{page}: the section {begin.strip()} has no {_END}")
    return source[:start], source[start:end], source[end:]


def markdown_table(rows: list[list[str]], rule: str = "---") -> str:
    """Rows as Markdown, the first of them the headings; the rule is that under all columns but the first."""
    rules = ["---", *[rule] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rules, *rows[1:]])


def text_table(rows: list[list[str]]) -> str:
    """Rows as text in columns, the first of them the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * width for width in widths]
    padded = [
        [cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (rows[0], rule, *rows[1:])
    ]
    return "\n".join("  ".join(row).rstrip() for row in padded)
