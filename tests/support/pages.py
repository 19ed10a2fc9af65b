"""The blocks of code of README.md and of the pages in docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCED = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block; its title, if it has one, stands above it on the page."""

    language: str
    title: str
    text: str


def pages() -> dict[str, Path]:
    """The pages by name."""
    return {path.name: path for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}


def blocks(path: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, in order."""
    source = path.read_text(encoding="utf-8")
    found = [Block(*parts) for parts in _FENCED.findall(source)]
    assert 2 * len(found) == len(re.findall(r"^```", source, re.MULTILINE)), f"{path}: a block is not understood"
    return [block for block in found if language in (None, block.language)]


def program(path: Path, text: str) -> str:
    """The one Python program of a page that holds a text."""
    (found,) = (block.text for block in blocks(path, "python") if text in block.text)
    return found
