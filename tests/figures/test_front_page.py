"""The figures of README.md, which is the site's front page, are those that commands saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from kbitwrap.cli import main
from support import pages


def _text(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


README, PICTURES = _text(pages.ROOT / "README.md"), _text(pages.DOCS / "pictures.md")
MEASURED = _text(pages.DOCS / "merges_measured.md")
WORDS = {14: "fourteen", 15: "fifteen", 16: "sixteen"}


@pytest.fixture(scope="module")
def front(figures: Callable[[str], Any]) -> Any:
    return figures("front")


@pytest.fixture(scope="module")
def saved(front: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(front.FIGURES.read_text(encoding="utf-8"))
    return found


def test_what_a_merge_loses_is_what_was_measured(front: Any, saved: dict[str, Any]) -> None:
    assert saved["divergence_left"] == pytest.approx(front.merge_losses())
    lost = {way: f"{100 * part:.2g} %" for way, part in saved["divergence_left"].items()}
    quantized, pefts = lost[front.QUANTIZED], lost[front.PEFTS]
    assert f"`half` {lost[front.HALF]}, `quantized` {quantized}, PEFT's merge in 4 bits {pefts}." in README
    assert f"a merge onto the original weights {lost[front.RELOAD]} in the mean" in PICTURES


def test_a_reload_is_told_by_its_worst_and_its_best_figure(front: Any, figures: Callable[[str], Any]) -> None:
    merges = figures("merges")
    adapters = json.loads(front.MERGES.read_text(encoding="utf-8"))[front.SUBJECT]["adapters"]
    lost = [100 * left for left in merges.divergences_left(adapters, front.RELOAD)]
    kept = [100 * one["gain"] for adapter in adapters for one in adapter["merges"][front.RELOAD]]
    assert len(lost) == len(kept) == 6
    assert f"leaves {min(lost):.1f} % of a large delta's divergence and {max(lost):.0f} % of a small one's" in MEASURED
    assert f"keeps {min(kept):.1f} to {max(kept):.1f} % of the gain in loss" in MEASURED
    assert f"lowers the loss by {min(kept):.1f} to {max(kept):.1f} % of what the adapter does" in README


@pytest.mark.thorough
def test_a_step_of_the_picture_is_predicted_as_it_was_drawn(front: Any, saved: dict[str, Any]) -> None:
    assert list(saved["peak_bytes"]) == list(front.STEP_LABELS)
    assert front.step(saved["model"], "none").peak_bytes == saved["peak_bytes"]["none"]


MISTRAL = {  # of mistralai/Mistral-7B-v0.3
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "sliding_window": None,
}


QUOTED = [
    ("README.md", r'The answer is the first line: "(.*?)"'),
    ("docs/fit.md", r"The output begins with the answer: (.*?) The budget is"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("page", "quoted"),
    QUOTED,
)
def test_the_answer_that_is_quoted_is_what_the_command_prints(
    page: str, quoted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    MistralConfig(**MISTRAL).save_pretrained(tmp_path)
    command = next(block.text for block in pages.blocks(pages.ROOT / page, "bash") if " --step " in block.text)
    program, *arguments = command.split()
    assert program == "kbitwrap"
    [name] = [word for word in arguments if "/" in word]
    assert main([str(tmp_path) if word == name else word for word in arguments]) == 1
    answer = capsys.readouterr().out.splitlines()[0]
    text = (pages.ROOT / page).read_text(encoding="utf-8").replace("\n> ", " ")
    assert re.findall(quoted, " ".join(text.split())) == [answer]


def test_what_pefts_function_leaves_is_what_was_measured(figures: Callable[[str], Any]) -> None:
    ways = json.loads(figures("pictures").FIGURES.read_text(encoding="utf-8"))["ways"]
    peft = ways.pop("peft")
    said = (
        f"PEFT's `prepare_model_for_kbit_training` leaves {peft['left']['dtypes']} tensors of a Mistral-7B in float32"
    )
    assert said in README
    said = f"{int(peft['left_bytes'] / 2**20)} MiB more. It changes attributes on {peft['left']['attributes']} modules"
    assert said in README
    assert not any(any(way["left"].values()) for way in ways.values())


def test_as_many_faults_of_a_merge_are_named_as_their_page_lists() -> None:
    page = (pages.DOCS / "check.md").read_text(encoding="utf-8")
    section = page.partition("### What it finds\n")[2].partition("\n### ")[0]
    faults = re.findall(r"^\| (?!finding)", section, re.MULTILINE)
    assert f"[{WORDS[len(faults)]} faults of a merge]" in README


def test_as_many_published_runs_are_near_as_their_page_says() -> None:
    page = (pages.DOCS / "published.md").read_text(encoding="utf-8")
    [(near, count)] = re.findall(r"\*\*(\d+) of (\d+) published runs are predicted within 2 %", page)
    assert f"[{count} peaks that others measured on GPUs](docs/published.md), {near} are predicted within 2 %" in README
