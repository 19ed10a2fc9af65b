"""Predicts and draws what docs/pictures/front.svg shows: what merges lose, and what a training step takes.

    python docs/figures front             predict, save the figures, draw them
    python docs/figures front --saved     draw what was saved

The merges are those that `python docs/figures merges` measured. The steps are predicted from a model's shapes; that of
TRL's own trainer needs the extra test-trl. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure, SubFigure
from transformers import BitsAndBytesConfig

import style
from kbitwrap import predict_step
from machine import environment
from memory_tables import CONFIGS, step
from merges import AGAIN, HALF, PEFTS, QUANTIZED, RELOAD, divergences_left
from merges import FIGURES as MERGES
from sections import DOCS

FIGURES = DOCS / "benchmarks" / "front.json"
PICTURE = DOCS / "pictures" / "front.svg"

MODEL = "Mistral-7B-v0.3"
SEQ_LEN = 2048
SUBJECT = "Llama"
TRL, TRL_NORMS = "trl", "trl-norms"
PRECISIONS = ("peft", "compute", "norms", "none")

MERGE_LABELS = {
    PEFTS: "PEFT's merge_and_unload, to 4 bits",
    RELOAD: "merge onto the original weights",
    AGAIN: "the same, quantized to 4 bits again",
    QUANTIZED: "kbitwrap merge --as quantized, to 4 bits",
    HALF: "kbitwrap merge",
}
STEP_LABELS = {
    "peft": "PEFT's preparation",
    "compute": 'kbitwrap, "compute"',
    "norms": 'kbitwrap, "norms", the default',
    "none": 'kbitwrap, "none"',
    TRL: "TRL's SFTTrainer, without kbitwrap",
    TRL_NORMS: 'kbitwrap, "norms", in TRL\'s SFTTrainer',
}
OURS, OTHERS = "#0072b2", "#8c959f"
GIB = 1 << 30


def trl_step(precision: str) -> int:
    """The peak of the step that TRL's SFT trainer runs, on CUDA."""
    from trl import SFTConfig

    arguments = SFTConfig("out", per_device_train_batch_size=1, max_length=SEQ_LEN, bf16=True, use_cpu=True)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    found = predict_step(
        CONFIGS[MODEL], args=arguments, quantization_config=quantization, dtype="bfloat16", precision=precision
    )
    return found.peak_bytes


def merge_losses() -> dict[str, float]:
    """For each way to merge, the part of the divergence that it leaves: the mean over adapters and seeds."""
    measured = json.loads(MERGES.read_text(encoding="utf-8"))[SUBJECT]
    chosen = [adapter for adapter in measured["adapters"] if adapter["is_chosen"]]
    return {way: fmean(divergences_left(chosen, way)) for way in MERGE_LABELS}


def predict() -> dict[str, Any]:
    """Predict the steps, and take the merges that were measured."""
    peaks = {precision: step(MODEL, precision).peak_bytes for precision in PRECISIONS}
    peaks[TRL] = trl_step("unprepared")
    peaks[TRL_NORMS] = trl_step("norms")
    return {"environment": environment(), "model": MODEL, "peak_bytes": peaks, "divergence_left": merge_losses()}


def draw(figures: dict[str, Any]) -> Figure:
    """Two panels, one above the other, so that a phone shows them in a size that can be read."""
    figure = Figure(figsize=(5.8, 4.9), layout="constrained")
    merges, steps = figure.subfigures(2, 1, height_ratios=(5, 6))

    losses = {label: 100 * figures["divergence_left"][way] for way, label in MERGE_LABELS.items()}
    bars(merges, losses, "{:.2g} %", "The divergence that a merge leaves, in nf4")

    peaks = {label: figures["peak_bytes"][way] / GIB for way, label in STEP_LABELS.items()}
    bars(steps, peaks, "{:.2f} GiB", f"What a training step of {MODEL} takes, in nf4 with {SEQ_LEN:,} tokens")
    return figure


def bars(panel: SubFigure, values: dict[str, float], form: str, title: str) -> None:
    """A horizontal bar for each value, from above, with its figure at its end."""
    panel.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10, weight="bold")
    axis = panel.subplots()
    places = range(len(values))
    colors = [OURS if label.startswith("kbitwrap") else OTHERS for label in values]
    drawn = axis.barh(places, list(values.values()), color=colors, height=0.66)
    axis.bar_label(drawn, [form.format(value) for value in values.values()], padding=3, fontsize=9)
    axis.set_yticks(places, list(values), fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.22 * max(values.values()))
    axis.xaxis.set_visible(False)
    axis.tick_params(axis="y", length=0)
    for side in ("top", "right", "bottom"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """Predict, unless the figures are there, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", action="store_true", help="draw the figures that were saved")
    if not parser.parse_args().saved:
        FIGURES.write_text(json.dumps(predict(), indent=1) + "\n", encoding="utf-8")
    style.draw(draw, PICTURE, json.loads(FIGURES.read_text(encoding="utf-8")))
