"""Makes README.md the front page of the site, when the site is built.

The line `<!-- README.md -->` of docs/index.md is replaced by the text of README.md up to `## Developing`, with links as
they are from the folder docs/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

README = Path(__file__).parents[2] / "README.md"
_MARKER = "<!-- README.md -->"
_FIRST_LEFT_OUT = "\n## Developing\n"


def front_page() -> str:
    """The text of README.md for the site."""
    text, _, _ = README.read_text(encoding="utf-8").partition(_FIRST_LEFT_OUT)
    return text.replace("](docs/", "](").replace("<details>", "<details markdown>")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker: the event of MkDocs."""
    return markdown.replace(_MARKER, front_page())
