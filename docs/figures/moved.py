"""Leads from the addresses of pages that were moved to where their text is now, when the site is built.

The old address gets a page that goes on to the new one. A link to one of its sections goes on to where that section is,
which a script sees; without scripts it leads to the page.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

# By the old page: where it went, and where its sections went that are elsewhere.
MOVED: dict[str, tuple[str, dict[str, str]]] = {
    "step": (
        "fit",
        {
            "how-it-is-predicted": "prediction",
            "what-is-counted": "prediction#what-is-counted",
            "what-is-reserved": "prediction#what-is-reserved",
            "loading": "prediction#loading",
            "on-several-devices": "prediction#several-devices",
            "optimizers": "prediction#what-is-refused-by-name",
            "the-step-of-a-trainer": "fit",
            "a-script-unedited": "fit#a-script-unedited",
            "in-python": "fit#in-python",
            "check-it-where-you-are": "fit#in-python",
        },
    ),
    "measure": (
        "check",
        {
            "what-it-finds": "check#what-it-finds",
            "what-it-costs-on-your-own-text": "check#what-it-costs-on-your-own-text",
            "a-run-without-a-record": "check#a-run-without-a-manifest",
            "four-merges-measured": "merges_measured#four-merges-by-their-weights",
        },
    ),
    "precision": (
        "block#which-precision",
        {
            "the-dtype-of-adapters": "block#the-dtype-of-adapters",
            "adapters-that-return-float32": "block#float32-that-meets-16-bits",
            "models-that-are-given-float-features": "block#float32-that-meets-16-bits",
            "copies-of-a-prepared-model": "block#what-verify-and-restore-report",
            "logits-in-float32": "block#logits-in-float32",
        },
    ),
    "generation": (
        "block#generate-and-evaluate-in-between",
        {"the-merged-weights-without-files": "block#the-merged-weights-without-files"},
    ),
    "rollouts": (
        "export#the-base-dequantized",
        {"what-differs-without-it": "benchmarks#rollouts", "trl-and-vllm": "trl#vllm"},
    ),
    "peft": ("block#in-place-of-pefts-function", {}),
    "stories": ("start#see-for-yourself", {"resume-from-it-in-a-new-process": "resume"}),
    "others": ("upstream#what-each-does-today", {}),
    "citation": ("contributing#citation", {}),
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Moved</title>
<link rel="canonical" href="{page}">
<meta name="robots" content="noindex">
<script>
const sections = {sections};
location.replace(sections[location.hash.slice(1)] ?? "{page}");
</script>
<meta http-equiv="refresh" content="1; url={page}">
</head>
<body>This page is now <a href="{page}">here</a>.</body>
</html>
"""


def address(target: str) -> str:
    """The address of a page, or of a section on it, as it is from the folder of another page."""
    page, mark, section = target.partition("#")
    return f"../{page}/{mark}{section}"


def on_post_build(config: Any, **_: Any) -> None:
    """Write the pages that lead on: the event of MkDocs."""
    for old, (page, sections) in MOVED.items():
        folder = Path(config.site_dir) / old
        folder.mkdir()
        found = json.dumps({section: address(target) for section, target in sections.items()})
        text = _PAGE.format(page=html.escape(address(page)), sections=found)
        (folder / "index.html").write_text(text, encoding="utf-8")
