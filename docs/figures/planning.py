"""Measures what predictions and searches take: the CPU time of each way to prepare, of models of 7B and 70B.

    python docs/figures planning [MODEL ...]

For Mistral-7B and Llama-3.3-70B in nf4, PEFT's way and each precision: building the model, the first prediction of 2048
tokens, one more of another length, and both searches for what fits a budget. What importing the libraries takes is not
in it. The result is the data of docs/benchmarks/planning.json and a table of docs/prediction.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import warnings
from collections.abc import Callable
from typing import Any

import fits
from kbitwrap.cli.console import quiet_libraries
from machine import environment
from measuring import clock
from sections import DOCS, markdown_table, replace_section

FIGURES = DOCS / "benchmarks" / "planning.json"
PAGE = DOCS / "prediction.md"
BUDGETS = {"mistralai/Mistral-7B-v0.3": "8GiB", "meta-llama/Llama-3.3-70B-Instruct": "60GiB"}
IMPORTED = (
    "bitsandbytes",
    "peft.tuners.lora.bnb",
    "transformers.integrations.bitsandbytes",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "kbitwrap.foresight.predict",
)
PARTS = {
    "building": "building",
    "first": "first prediction",
    "more": "one more",
    "searches": "both searches",
}


def seconds(run: Callable[[], Any]) -> float:
    """The CPU time of a call."""
    return round(clock(run).cpu_seconds, 2)


def measure(model: dict[str, Any], budget: str) -> dict[str, dict[str, float]]:
    """The CPU seconds of each part, by precision."""
    found = {}
    for precision in fits.PRECISIONS:
        made: list[Any] = []

        def build(precision: str = precision, made: list[Any] = made) -> None:
            made.append(fits.predictor(model, fits.PLAIN, precision))
            _ = made[0].max_seq_len

        parts = {"building": seconds(build)}
        predict = made[0]
        parts["first"] = seconds(lambda predict=predict: predict(1, 2048))
        parts["searches"] = seconds(
            lambda predict=predict: (predict.longest_sequence(budget, 1), predict.largest_batch(budget, 2048))
        )
        parts["more"] = seconds(lambda predict=predict: predict(1, 1000))
        found[precision] = parts
    return found


def table(models: dict[str, Any]) -> str:
    """The figures as Markdown."""
    rows = [["CPU seconds", *PARTS.values(), "all but one more"]]
    for name, by_precision in models.items():
        short = name.rpartition("/")[2]
        sums = {part: math.fsum(parts[part] for parts in by_precision.values()) for part in PARTS}
        counted = math.fsum(number for part, number in sums.items() if part != "more")
        rows.append([f"{short}, all six ways", *(f"{sums[part]:.1f}" for part in PARTS), f"{counted:.1f}"])
    return markdown_table(rows)


def main() -> None:
    """Measure, and write the figures and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(BUDGETS), metavar="MODEL")
    asked = parser.parse_args().models
    with warnings.catch_warnings(), quiet_libraries():
        warnings.simplefilter("ignore")
        for module in IMPORTED:
            importlib.import_module(module)
        found = {}
        for model in fits.models():
            name = model["name"]
            if name in asked:
                found[name] = measure(model, BUDGETS[name])
                print(name, json.dumps(found[name]), flush=True)
    if set(found) == set(BUDGETS):
        result = {"environment": environment(), "models": found}
        FIGURES.write_text(json.dumps(result, indent=1) + "\n")
        replace_section(PAGE, "planning", table(found))
