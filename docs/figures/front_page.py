"""Makes README.md the front page of the site, and names the version in its header, when the site is built.

The line `<!-- README.md -->` of docs/index.md is replaced by the text of README.md up to `## Developing`, with links as
they are from the folder docs/. Links of other pages to README.md lead there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
_MARKER = "<!-- README.md -->"
_FIRST_LEFT_OUT = "\n## Developing\n"


def front_page() -> str:
    """The text of README.md for the site."""
    text, _, _ = README.read_text(encoding="utf-8").partition(_FIRST_LEFT_OUT)
    return text.replace("](docs/", "](").replace("<details>", "<details markdown>")


def version() -> str:
    """The version that pyproject.toml gives. (Python 3.10 has no `tomllib`.)"""
    (found,) = _VERSION.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return str(found)


def on_config(config: Any) -> Any:
    """Name the version beside the site's name, which the header shows: the event of MkDocs."""
    config.site_name = f"kbitwrap {version()}"
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marker, and links to README.md: the event of MkDocs."""
    return markdown.replace(_MARKER, front_page()).replace("](../README.md", "](index.md")
