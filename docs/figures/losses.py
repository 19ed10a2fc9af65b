"""Trains the same LoRA under several arithmetics, and writes the losses into docs/benchmarks.md, with their plot.

    python docs/figures losses                        train with five seeds, save the figures, draw them, write the page
    python docs/figures losses --saved                draw and write what was saved
    python docs/figures losses --learning-rate RATE   train with three seeds at another rate, and print the table

Each seed takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import machine
import style
from kbitwrap.cli.console import quiet_libraries
from llamas import FLOAT64, LAST_STEPS, PEFT, Run, Settings, adapt, adapter_dtype, load_exact, pretrain, read_text
from sections import DOCS, replace_section, text_table

PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "benchmarks" / "loss.json"
CASES = ("none", "norms", "none-float32", "norms-float32", PEFT, FLOAT64)
COMPARED_WITH = {
    "norms": "none",
    "none-float32": "none",
    "norms-float32": "none-float32",
    PEFT: "none-float32",
    FLOAT64: "none",
}
"""For each case, the one that it differs from in one respect."""
HEADER = """\
model     Llama over bytes in {quant} and bfloat16, hidden {hidden_size}, \
{num_layers} layers, pretrained for {pretraining_steps} steps on pydoc's topics
training  LoRA of rank {rank} on all linears, bfloat16 autocast, learning rate \
{learning_rate:g} falling to 0, {steps} steps of {batch_size} blocks of {length} bytes \
of the standard library's source
seeds     {repeats}, each with a base, adapters and an order of its own, alike in all \
cases; () is the deviation between seeds, ± the standard error of a mean over them
losses    of a byte: of {num_held_out} blocks that are held out, before training \
{before}; and of training, the mean of the last {last} steps
off       the distance from float64 with the same adapters, in parts of that, before \
and after training"""
LINEAR_UP_TO = 1e-3  # of the scale of differences
ZERO_COLOR = "#1f2328"
# Those that lie on one another show through each other's gaps.
LOOKS = cycler(
    color=("#e69f00", "#0072b2", "#cc79a7", "#009e73", "#d55e00", "#1f2328"),
    linestyle=("-", "--", "-.", "--", "-.", ":"),
)


# ----------------------------------------------------------------------------------------------------
# Training.
# ----------------------------------------------------------------------------------------------------


def train(settings: Settings, cases: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Train each case with each seed.

    Args:
        settings: What to train.
        cases: A precision, `PEFT` or `FLOAT64`; of a precision whose name ends in `-float32` the adapters are so.
        folder: Where the seeds' pretrained bases are kept, and taken from if they are there.

    Returns:
        The machine, the settings, and the figures of each case over the seeds, ready for JSON.
    """
    text = read_text(settings)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with torch.random.fork_rng(), quiet_libraries():
        for seed in range(settings.repeats):
            base = folder / f"seed-{seed}"
            if not base.exists():
                pretrain(text, settings, seed).bfloat16().save_pretrained(base)
            exact = adapt(load_exact(base, settings.quant), settings)
            for name, own in runs.items():
                own.append(Run(name, settings, seed, base, exact).train(text))
                print(f"seed {seed + 1} of {settings.repeats}: {name}", flush=True)
    losses = []
    for name, own in runs.items():
        case = {"case": name, "adapters": adapter_dtype(name), **over_seeds(own)}
        other = COMPARED_WITH.get(name)
        if other in runs:
            case["difference"] = {"case": other, **differences(own, runs[other])}
        losses.append(case)
    return {"environment": machine.environment(), "settings": dataclasses.asdict(settings), "losses": losses}


def over_seeds(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of seeds as one: of a number the spread, of a curve its mean at each step, of parts likewise."""
    found: dict[str, Any] = {}
    for key, first in runs[0].items():
        values: list[Any] = [run[key] for run in runs]
        if isinstance(first, dict):
            found[key] = over_seeds(values)
        elif isinstance(first, list):
            found[key] = np.mean(values, axis=0).tolist()
        else:
            found[key] = spread(values)
    return found


def differences(own: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, Any]:
    """The losses of a case less another's, seed by seed; those of the training, step by step."""
    pairs = list(zip(own, others, strict=True))
    found: dict[str, Any] = {
        key: spread([run[key] - other[key] for run, other in pairs]) for key in ("held_out_loss", "end_loss")
    }
    curves = np.array([np.subtract(run["train_loss"], other["train_loss"]) for run, other in pairs])
    steps = [spread(losses) for losses in curves.T.tolist()]
    found["train_loss"] = {key: [step[key] for step in steps] for key in ("mean", "error")}
    return found


def spread(values: list[float]) -> dict[str, Any]:
    """The mean, the standard deviation and the standard error of the mean; one value has neither of the two."""
    deviation = stdev(values) if len(values) > 1 else None
    error = deviation / len(values) ** 0.5 if deviation is not None else None
    return {"mean": fmean(values), "deviation": deviation, "error": error, "all": values}


# ----------------------------------------------------------------------------------------------------
# Showing.
# ----------------------------------------------------------------------------------------------------


def text(result: dict[str, Any]) -> str:
    """What was trained, and the table of losses, their paired differences and the distances from exact arithmetic."""
    losses = result["losses"]
    before = with_deviation(losses[0]["base_loss"])
    head = ["case", "adapters", "train loss", "held-out loss", "minus", "train difference", "held-out difference"]
    rows = [[*head, "logits off", "gradients off", "logits off after", "gradients off after"]]
    for case in losses:
        row = [case["case"], case["adapters"], f"{case['end_loss']['mean']:.4f}", with_deviation(case["held_out_loss"])]
        difference = case.get("difference")
        if difference:
            row += [difference["case"], with_error(difference["end_loss"]), with_error(difference["held_out_loss"])]
        else:
            row += ["-"] * 3
        for when in ("start", "end"):
            row += [f"{case[key][when]['mean']:.3%}" for key in ("logits_distance", "gradient_distance")]
        rows.append(row)
    said = HEADER.format(**result["settings"], before=before, last=LAST_STEPS)
    return "\n".join([*machine.lines(result), said, "", text_table(rows)])


def with_deviation(found: dict[str, float]) -> str:
    """A mean over the seeds, and the deviation between them."""
    return f"{found['mean']:.4f} ({found['deviation']:.4f})"


def with_error(found: dict[str, float]) -> str:
    """A mean over the seeds, and its standard error."""
    return f"{found['mean']:+.5f} ± {found['error']:.5f}"


def figure(result: dict[str, Any]) -> Figure:
    """The curves of the losses, and what the cases differ by."""
    settings, losses = result["settings"], result["losses"]
    looks = {case["case"]: look for case, look in zip(losses, LOOKS, strict=True)}
    adapters = {case["case"]: case["adapters"] for case in losses}
    compared = [case for case in losses if "difference" in case]
    steps = range(1, settings["steps"] + 1)
    made = Figure(figsize=(5.0, 10.4), layout="constrained")
    made.suptitle(
        f"LoRA on a byte-level Llama in {settings['quant']} and bfloat16, \n"
        f"hidden {settings['hidden_size']}, layers {settings['num_layers']}, seeds {settings['repeats']}"
    )
    curves, same_dtype, other_dtype, ends = made.subplots(4)
    for case in losses:
        curves.plot(steps, case["train_loss"], label=case["case"], linewidth=1.2, **looks[case["case"]])
    for row, case in enumerate(compared):
        color, difference = looks[case["case"]]["color"], case["difference"]
        axis = same_dtype if case["adapters"] == adapters[difference["case"]] else other_dtype
        means, errors = (np.array(difference["train_loss"][key]) for key in ("mean", "error"))
        axis.plot(steps, means, color=color, label=f"{case['case']} - {difference['case']}", linewidth=1.2)
        axis.axhline(0, color=ZERO_COLOR, linewidth=0.6)
        axis.fill_between(steps, means - errors, means + errors, color=color, alpha=0.2, linewidth=0)
        held_out = difference["held_out_loss"]
        ends.plot(held_out["all"], [row] * len(held_out["all"]), ".", color=color, alpha=0.5)
        ends.errorbar(held_out["mean"], row, xerr=held_out["error"], fmt="D", color=color, capsize=3, markersize=4)
    scale(ends, compared)
    finish(curves, "train loss, mean of the seeds", "step")
    finish(same_dtype, "difference of train losses, same dtype of adapters", "step")
    finish(other_dtype, "difference of train losses, another dtype", "step")
    by_seed = f"each seed, mean and standard error; linear to {LINEAR_UP_TO}"
    finish(ends, "difference of held-out losses", by_seed)
    return made


def scale(axis: Axes, compared: list[dict[str, Any]]) -> None:
    """Scale differences of several magnitudes: linearly near zero, by the logarithm beyond, with room at both ends."""
    values = [value for case in compared for value in case["difference"]["held_out_loss"]["all"]]
    least, most = 1.3 * min([*values, -LINEAR_UP_TO]), 1.3 * max([*values, LINEAR_UP_TO])
    axis.set_xscale("symlog", linthresh=LINEAR_UP_TO)
    axis.set_xlim(least, most)
    magnitudes = [LINEAR_UP_TO * 10**power for power in range(4)]
    ticks = [0.0, *(sign * magnitude for magnitude in magnitudes for sign in (-1, 1))]
    shown = [tick for tick in ticks if least <= tick <= most]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()
    axis.axvline(0, color=ZERO_COLOR, linewidth=0.6)
    names = [f"{case['case']}\n- {case['difference']['case']}" for case in compared]
    axis.set_yticks(range(len(compared)), names)
    axis.set_ylim(len(compared) - 0.5, -0.5)


def finish(axis: Axes, title: str, label: str) -> None:
    """Give a panel its title, its label and, where curves have names, a legend."""
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(framealpha=0.9, edgecolor="none", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Train, or read what was saved, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", action="store_true", help="train nothing")
    parser.add_argument("--learning-rate", type=float, metavar="RATE", help="print the table of this rate alone")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.learning_rate:
            print(text(train(Settings(learning_rate=asked.learning_rate), CASES, Path(folder))))
            return
        if not asked.saved:
            result = train(Settings(repeats=5), CASES, Path(folder))
            FIGURES.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    result = json.loads(FIGURES.read_text(encoding="utf-8"))
    plot = FIGURES.with_suffix(".svg")
    style.draw(figure, plot, result)
    picture = f"![The figures of this run](benchmarks/{plot.name})"
    replace_section(PAGE, "benchmark: loss", f"```text\n{text(result)}\n```\n\n{picture}")
