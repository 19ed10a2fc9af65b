"""Pages that are written from saved figures show what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

TABLES: dict[str, tuple[str, Callable[[Any, Any], str]]] = {
    "evidence": ("evidence", lambda command, saved: command.tables(saved)),
    "guarantees": ("figures", lambda command, saved: command.table(saved)),
    "numerics": ("numerics", lambda command, saved: command.table(saved)),
    "planning": ("planning", lambda command, saved: command.table(saved["models"])),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_what_was_saved(name: str, figures: Callable[[str], Any]) -> None:
    command = figures(name)
    section, text = TABLES[name]
    saved = json.loads(command.FIGURES.read_text(encoding="utf-8"))
    assert figures("sections").section(command.PAGE, section).strip() == text(command, saved)
