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


# Sections of pages that are still there, to which pages, README or others linked.
KEPT = {
    "merge": ["a-saved-adapter", "how-exact-it-is", "which-merge", "what-quant-stands-for"],
    "start": ["prepare-train-restore", "see-for-yourself"],
    "trainer": ["let-one-of-the-two-enable-checkpointing", "one-line-on-any-trainer", "updates-that-round-to-nothing"],
    "trl": ["adapters-in-float32", "log-probabilities", "vllm"],
    "check": ["saved-after-a-forward-on-a-cpu"],
    "eight_gb": ["traps"],
    "export": ["experts-in-4-bits", "models-that-hqq-quantized", "the-folder"],
    "memory": ["what-each-precision-adds"],
    "resume": ["with-trainer"],
    "sharding": ["export-a-sharded-model", "trainer-and-accelerate", "what-shards-do-not-allow"],
}


@pytest.mark.parametrize("page", KEPT)
def test_sections_that_were_linked_are_still_there(page: str) -> None:
    text = (pages.DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = sections(page) | {*re.findall(r'<a id="([\w-]+)"></a>', text)}
    assert [section for section in KEPT[page] if section not in found] == []


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
