"""Predicts which models train on which devices: the longest sequence and the largest batch that fit.

    python docs/figures fits [--trainer plain|sft] [--precision NAME ...] [--again] [WORD ...]

The models are those of fits_models.json, in this folder, with their published shapes; WORD picks those that have it in
their name. They are in nf4 and bfloat16, with LoRA of rank 16 on every linear layer. What was predicted before is kept
unless `--again` is given, so a run that was stopped goes on. The result is docs/benchmarks/fits.json, of which
docs/fits.js makes a table, and a short table on docs/fits.md. `--trainer sft` needs TRL.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import BitsAndBytesConfig, PretrainedConfig

from kbitwrap import StepPredictor
from kbitwrap.cli.console import quiet_libraries
from kbitwrap.cli.limits import budget_of
from kbitwrap.cli.trainers import arguments
from kbitwrap.foresight.batch import MOST_TOKENS
from kbitwrap.foresight.search import largest
from sections import DOCS, markdown_table, replace_section

MODELS = Path(__file__).with_name("fits_models.json")
FIGURES = DOCS / "benchmarks" / "fits.json"
PAGE = DOCS / "fits.md"
DEVICES = (8, 12, 16, 24, 48, 80)  # GiB
SEQ_LEN = 2048
PLAIN, SFT = TRAINERS = ("plain", "sft")
PRECISIONS = ("peft", "full", "compute", "norms", "adapted", "none")
SHOWN = {PLAIN: "a loop", SFT: "TRL's SFT"}
IN_SHORT = "Llama-3.2-3B", "Llama-3.1-8B", "Qwen3-14B", "Llama-3.3-70B-Instruct"


def models() -> list[dict[str, Any]]:
    """The models: their names, where their configs are published, where they were read, and their fields."""
    found: list[dict[str, Any]] = json.loads(MODELS.read_text())
    return found


def config_of(model: dict[str, Any]) -> PretrainedConfig:
    """The config of a model."""
    architecture = getattr(transformers, model["config"]["architectures"][0])
    config: PretrainedConfig = architecture.config_class(**model["config"], dtype="bfloat16")
    return config


def predictor(model: dict[str, Any], trainer: str, precision: str) -> StepPredictor:
    """What predicts the steps of a model."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    args = None
    if trainer == SFT:
        args = arguments("sft")
    return StepPredictor(
        config_of(model),
        precision=precision,
        args=args,
        lora=peft.LoraConfig(r=16, target_modules="all-linear"),
        quantization_config=nf4,
        dtype="bfloat16",
    )


def predict(model: dict[str, Any], trainer: str, precision: str) -> dict[str, Any]:
    """What the tensors of a step fit on each device, without what the allocator reserves beside them.

    Args:
        model: One of `models`.
        trainer: One of `TRAINERS`.
        precision: One of `PRECISIONS`.

    Returns:
        The figures: by device, the longest sequence alone in its batch, and the largest batch of sequences of 2048
        tokens.
    """
    start = time.process_time()
    predict = predictor(model, trainer, precision)
    loading_bytes = predict(1, min(SEQ_LEN, predict.max_seq_len or SEQ_LEN)).loading_bytes or 0
    fits = {}
    for device in reversed(DEVICES):
        budget = budget_of(None, device * 2**30)
        longest = batch = 0
        if loading_bytes <= budget:
            most = min(predict.max_seq_len or MOST_TOKENS, MOST_TOKENS)
            longest = largest(lambda number: predict(1, number).peak_bytes if number else 0, budget, [SEQ_LEN], most)
        # a step of TRL's takes as long as it has tokens, and its batches have a million
        if trainer == PLAIN and longest >= SEQ_LEN:
            most = MOST_TOKENS // SEQ_LEN
            batch = largest(lambda number: predict(number, SEQ_LEN).peak_bytes if number else 0, budget, [1], most)
        fits[str(device)] = [longest, batch]
    return {
        "model": model["name"],
        "trainer": trainer,
        "precision": precision,
        "fits": dict(reversed(fits.items())),
        "most": predict.max_seq_len,
        "seconds": round(time.process_time() - start, 1),
    }


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What a row is of."""
    return row["model"], row["trainer"], row["precision"]


def load() -> dict[tuple[str, str, str], dict[str, Any]]:
    """The rows that were predicted before."""
    if not FIGURES.exists():
        return {}
    return {key(row): row for row in json.loads(FIGURES.read_text())["rows"]}


def save(rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """Write the rows, in the order of the models."""
    names = [model["name"] for model in models()]

    def place(row: dict[str, Any]) -> tuple[int, int, int]:
        number = names.index(row["model"])
        return number, TRAINERS.index(row["trainer"]), PRECISIONS.index(row["precision"])

    versions = {module.__name__: module.__version__ for module in (torch, transformers, peft)}
    ordered = sorted(rows.values(), key=place)
    result = {"versions": versions, "devices": DEVICES, "sources": sources(), "rows": ordered}
    FIGURES.write_text(json.dumps(result, indent=1) + "\n")


def cell(longest: int, largest: int) -> str:
    """What fits on one device."""
    if not longest:
        return "-"
    return f"{longest:,}" if largest < 2 else f"{longest:,} / {largest}"


def table(rows: list[dict[str, Any]]) -> str:
    """Some of the rows as Markdown: a few models, after PEFT's preparation and with the default."""
    head = ["model", "precision", "trained by", *(f"{device} GB" for device in DEVICES)]
    lines = [head]
    for row in rows:
        name = row["model"].rpartition("/")[2]
        if name not in IN_SHORT or row["precision"] not in ("peft", "norms"):
            continue
        fits = [cell(*row["fits"][str(device)]) for device in DEVICES]
        lines.append([name, row["precision"], SHOWN[row["trainer"]], *fits])
    return markdown_table(lines)


def sources() -> dict[str, dict[str, Any]]:
    """By model, where its config is published, and where its shapes were read."""
    return {model["name"]: {"config": model["source"], "read": model["read"]} for model in models()}


def main() -> None:
    """Predict what is asked for and not known yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--trainer", choices=TRAINERS, default=PLAIN)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--again", action="store_true", help="predict anew what is known")
    asked = parser.parse_args()
    chosen = [model for model in models() if all(word in model["name"] for word in asked.words)]
    wanted = [(model, precision) for precision in asked.precision for model in chosen]
    rows = load()
    for number, (model, precision) in enumerate(wanted, 1):
        name = model["name"], asked.trainer, precision
        if name in rows and not asked.again:
            continue
        with warnings.catch_warnings(), quiet_libraries():
            warnings.simplefilter("ignore")
            found = predict(model, asked.trainer, precision)
        rows = load() | {name: found}  # another run may have written meanwhile
        save(rows)
        print(f"{number} of {len(wanted)}:", *name, found["fits"], f"{found['seconds']} s", flush=True)
    replace_section(PAGE, "fits", table(json.loads(FIGURES.read_text())["rows"]))
