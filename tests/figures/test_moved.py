"""Old addresses lead to pages and sections that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import pages


@pytest.fixture(scope="module")
def moved(figures: Any) -> Any:
    return figures("moved")


def sections(page: str) -> set[str]:
    """The anchors of a page's headings, as Python-Markdown makes them, and the page itself."""
    headings = re.findall(r"^#+ (.+)$", (pages.DOCS / f"{page}.md").read_text(encoding="utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain} | {""}


def test_old_pages_are_gone_and_lead_to_sections_that_exist(moved: Any) -> None:
    for old, (page, found) in moved.MOVED.items():
        assert not (pages.DOCS / f"{old}.md").exists()
        for target in (page, *found.values()):
            name, _, section = target.partition("#")
            assert section in sections(name), target


def test_the_page_at_an_old_address_names_the_new_one(moved: Any, tmp_path: Path) -> None:
    moved.on_post_build(SimpleNamespace(site_dir=tmp_path))
    text = (tmp_path / "measure" / "index.html").read_text(encoding="utf-8")
    assert 'content="1; url=../check/"' in text
    found = json.loads(re.findall(r"const sections = (.*);", text)[0])
    assert found["four-merges-measured"] == "../merges_measured/#four-merges-by-their-weights"
