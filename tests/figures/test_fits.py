"""The table of docs/fits.md: it shows what was saved, and what it says fits does, and one token more does not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.thorough import few

SAMPLE = [
    ("SmolLM2-360M", "compute", "8"),
    ("Llama-3.1-8B", "peft", "12"),
    ("Llama-3.2-3B", "norms", "8"),
    ("Qwen2.5-0.5B", "peft", "8"),
    ("TinyLlama-1.1B-Chat-v1.0", "none", "12"),
]


@pytest.fixture(scope="module")
def fits(figures: Any) -> Any:
    return figures("fits")


@pytest.fixture(scope="module")
def rows(fits: Any) -> list[dict[str, Any]]:
    return list(json.loads(fits.FIGURES.read_text())["rows"])


def test_the_page_shows_what_was_saved(fits: Any, figures: Any, rows: list[dict[str, Any]]) -> None:
    section = figures("sections").section
    assert section(fits.PAGE, "fits").strip() == fits.table(rows).strip()
    assert json.loads(fits.FIGURES.read_text())["sources"] == fits.sources()


def test_the_page_begins_with_figures_of_its_table(fits: Any, rows: list[dict[str, Any]]) -> None:
    first = " ".join(fits.PAGE.read_text(encoding="utf-8").split("\n\n")[1].split())
    longest = {
        row["precision"]: row["fits"]["24"][0]
        for row in rows
        if row["model"].endswith("/Llama-3.1-8B") and row["trainer"] == fits.PLAIN
    }
    assert f"sequences of {longest['norms']:,} tokens, and PEFT's own preparation on {longest['peft']:,}." in first


def test_each_model_says_where_its_shapes_are_published_and_were_read(fits: Any) -> None:
    models = fits.models()
    assert len({model["name"] for model in models}) >= 30
    for model in models:
        assert model["source"].startswith(f"https://huggingface.co/{model['name']}/")
        assert model["read"]
        assert fits.config_of(model).num_hidden_layers == model["config"]["num_hidden_layers"]


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "precision", "device"), few(SAMPLE, SAMPLE[:1]))
def test_what_the_table_says_fits_and_one_more_does_not(
    model: str, precision: str, device: str, fits: Any, rows: list[dict[str, Any]]
) -> None:
    (described,) = (one for one in fits.models() if one["name"].endswith(f"/{model}"))
    wanted = described["name"], fits.PLAIN, precision
    (row,) = (row for row in rows if fits.key(row) == wanted)
    longest, largest = row["fits"][device]
    predict = fits.predictor(described, fits.PLAIN, precision)
    budget = fits.budget_of(None, int(device) * 2**30)
    assert predict(1, longest).peak_bytes <= budget
    if longest < row["most"]:
        assert predict(1, longest + 1).peak_bytes > budget
    if largest:
        assert predict(largest, fits.SEQ_LEN).peak_bytes <= budget < predict(largest + 1, fits.SEQ_LEN).peak_bytes
