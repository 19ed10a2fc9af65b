"""Draws the figures of a benchmark: a panel for each figure, a bar for each case; and the curves of losses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .environment import where

# What of a file's metadata differs from run to run or version to version, by the
# formats that can be drawn.
_STAMPS = {".svg": "Date", ".png": "Software", ".pdf": "CreationDate"}
_MIB = 1024**2
_PANEL_SIZE = (3.4, 2.3)  # inches
_ROOM_FOR_LABELS = 1.35  # of the longest bar
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "svg.fonttype": "none",  # text stays text: small, searchable
    "svg.hashsalt": "kbitwrap",  # ids are random otherwise
    # Opaque: readable on a light page and on a dark one.
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
    "text.color": "#1f2328",
    "axes.labelcolor": "#1f2328",
    "xtick.color": "#1f2328",
    "ytick.color": "#1f2328",
}
# Vermillion and blue of Okabe and Ito's palette, which people who see colors
# differently can tell apart.
_PEFT_COLOR, _OWN_COLOR = "#d55e00", "#0072b2"
_ZERO_COLOR = "#1f2328"
_LINEAR_UP_TO = 1e-3


@dataclass(frozen=True)
class _Panel:
    """A figure of every case.

    Attributes:
        title: What is drawn.
        unit: Its unit.
        values: By case; a case that was not measured, or ran out of memory, is absent.
        label: A format for the value beside its bar.
    """

    title: str
    unit: str
    values: dict[str, float]
    label: str


@dataclass(frozen=True)
class _Look:
    """How a curve looks."""

    color: str
    style: str


# Of the same palette. Curves that lie on one another show through each other's gaps.
_LOOKS = (
    _Look("#e69f00", "-"),
    _Look("#0072b2", "--"),
    _Look("#cc79a7", "-."),
    _Look("#009e73", "--"),
    _Look("#d55e00", "-."),
    _Look("#1f2328", ":"),
    _Look("#56b4e9", "--"),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what ``run_benchmark`` returned. The same result gives the same file.

    Args:
        result: The result.
        path: Where to; its suffix, one of ``PLOT_SUFFIXES``, says the format.

    Raises:
        OSError: The file cannot be written.
    """
    rows = _rows(result)
    names = [case["case"] for case in result["cases"]]
    shape = result["settings"]["shape"]
    num_rows, num_columns = len(rows), len(rows[0])
    width, height = _PANEL_SIZE
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(width * num_columns, height * num_rows), layout="constrained"
        )
        figure.suptitle(
            f"Mistral in nf4 and bfloat16, hidden {shape['hidden_size']}, {shape['num_layers']} layers, "
            f"vocabulary {shape['vocab_size']}, on {where(result)}"
        )
        grid = figure.subplots(num_rows, num_columns, squeeze=False)
        panels = itertools.chain.from_iterable(rows)
        for panel, axis in zip(panels, grid.flat, strict=True):
            _draw_panel(axis, panel, names)
        _save(figure, path)


def draw_losses(result: dict[str, Any], path: Path) -> None:
    """Draw what ``run_loss`` returned: the curves, and what the cases differ by. The same result gives the same file.

    Args:
        result: The result.
        path: Where to; its suffix, one of ``PLOT_SUFFIXES``, says the format.

    Raises:
        OSError: The file cannot be written.
    """
    settings = result["settings"]
    losses = result["losses"]
    looks = {case["case"]: look for case, look in zip(losses, _LOOKS, strict=False)}
    compared = [case for case in losses if "difference" in case]
    steps = range(1, settings["steps"] + 1)
    width, height = _PANEL_SIZE
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * 2.7, height * 2.6), layout="constrained")
        figure.suptitle(_losses_title(settings))
        (curves, ends), (preparations, dtypes) = figure.subplots(2, 2)
        for case in losses:
            look = looks[case["case"]]
            curves.plot(
                steps,
                case["train_loss"],
                look.style,
                color=look.color,
                label=case["case"],
                linewidth=1.2,
            )
        adapters = {case["case"]: case["adapters"] for case in losses}
        for case in compared:
            has_same_dtype = case["adapters"] == adapters[case["difference"]["case"]]
            axis = preparations if has_same_dtype else dtypes
            _draw_differences(axis, steps, case, looks[case["case"]].color)
        _draw_ends(ends, compared, looks)
        _finish(curves, "train loss, mean of the seeds", "step")
        _finish(
            preparations, "difference of train losses, same dtype of adapters", "step"
        )
        _finish(dtypes, "difference of train losses, another dtype", "step")
        _finish(
            ends,
            "difference of held-out losses",
            f"each seed, mean and standard error; linear to {_LINEAR_UP_TO}",
        )
        _save(figure, path)


def _losses_title(settings: dict[str, Any]) -> str:
    # Results saved before there was a choice do not name it.
    quant = settings.get("quant", "nf4")
    autocast = "" if settings.get("autocast", True) else "no autocast, "
    return (
        f"LoRA on a byte-level Llama in {quant} and bfloat16, {autocast}"
        f"hidden {settings['hidden_size']}, layers {settings['num_layers']}, seeds {settings['repeats']}"
    )


def _save(figure: Figure, path: Path) -> None:
    stamp = _STAMPS[path.suffix]
    figure.savefig(path, metadata={stamp: None})


def _draw_differences(
    axis: Axes, steps: range, case: dict[str, Any], color: str
) -> None:
    """A curve of the differences of the train losses, in a band of their standard errors where these are known."""
    difference = case["difference"]["train_loss"]
    means = difference["mean"]
    errors = difference["error"]
    axis.plot(
        steps, means, color=color, label=_difference_name(case, " "), linewidth=1.2
    )
    axis.axhline(0, color=_ZERO_COLOR, linewidth=0.6)
    if None in errors:
        return
    below = [mean - error for mean, error in zip(means, errors, strict=True)]
    above = [mean + error for mean, error in zip(means, errors, strict=True)]
    axis.fill_between(steps, below, above, color=color, alpha=0.2, linewidth=0)


def _draw_ends(
    axis: Axes, compared: list[dict[str, Any]], looks: dict[str, _Look]
) -> None:
    """A row for each comparison: the differences of the held-out losses of each seed, their mean and its error."""
    values: list[float] = []
    for row, case in enumerate(compared):
        color = looks[case["case"]].color
        difference = case["difference"]["held_out_loss"]
        seeds = difference["all"]
        axis.plot(seeds, [row] * len(seeds), ".", color=color, alpha=0.5)
        axis.errorbar(
            difference["mean"],
            row,
            xerr=difference["error"],
            fmt="D",
            color=color,
            capsize=3,
            markersize=4,
        )
        values += seeds
    _scale(axis, values)
    axis.axvline(0, color=_ZERO_COLOR, linewidth=0.6)
    axis.set_yticks(
        range(len(compared)), [_difference_name(case, "\n") for case in compared]
    )
    axis.set_ylim(max(len(compared), 1) - 0.5, -0.5)


def _difference_name(case: dict[str, Any], between: str) -> str:
    return f"{case['case']}{between}- {case['difference']['case']}"


def _scale(axis: Axes, values: list[float]) -> None:
    """Scale differences of several magnitudes: linearly near zero, by the logarithm beyond, with room at both ends."""
    least = 1.3 * min([*values, -_LINEAR_UP_TO])
    most = 1.3 * max([*values, _LINEAR_UP_TO])
    axis.set_xscale("symlog", linthresh=_LINEAR_UP_TO)
    axis.set_xlim(least, most)
    magnitudes = [_LINEAR_UP_TO * 10**power for power in range(4)]
    ticks = [0.0]
    for magnitude in magnitudes:
        ticks += [-magnitude, magnitude]
    shown = [tick for tick in ticks if least <= tick <= most]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()


def _finish(axis: Axes, title: str, label: str) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _rows(result: dict[str, Any]) -> list[tuple[_Panel, ...]]:
    """A row of panels of preparing, and one of training steps for each number of tokens."""
    cases = {case["case"]: case for case in result["cases"]}
    rows = [_preparing_row(cases)]
    if result["settings"]["step"]:
        for index, tokens in enumerate(result["settings"]["tokens"]):
            steps = {name: case["steps"][index] for name, case in cases.items()}
            rows.append(_step_row(steps, tokens))
    return rows


def _preparing_row(cases: dict[str, dict[str, Any]]) -> tuple[_Panel, ...]:
    added = _mib(cases, "added_bytes")
    peak = _mib(cases, "transient_peak_bytes")
    seconds = _ratios(cases, "prepare_seconds")
    return (
        _Panel("live bytes added", "MiB", added, "{:.2f}"),
        _Panel("peak while preparing", "MiB above the start", peak, "{:.1f}"),
        _Panel("time to prepare", "ratio to PEFT's", seconds, "{:.3f}"),
    )


def _step_row(steps: dict[str, dict[str, Any]], tokens: int) -> tuple[_Panel, ...]:
    tensors = _mib(steps, "peak_bytes")
    system = _mib(steps, "system_peak_bytes")
    seconds = _ratios(steps, "seconds")
    return (
        _Panel(f"peak of tensors in a step, {tokens} tokens", "MiB", tensors, "{:.0f}"),
        _Panel(
            f"peak of the system in a step, {tokens} tokens", "MiB", system, "{:.0f}"
        ),
        _Panel(f"step time, {tokens} tokens", "ratio to PEFT's", seconds, "{:.3f}"),
    )


def _mib(parts: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    return {
        name: part[key] / _MIB for name, part in parts.items() if part[key] is not None
    }


def _ratios(parts: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    """The ratios to PEFT's figure; empty where PEFT's function was not measured."""
    ratios = {}
    for name, part in parts.items():
        own = part.get("ratio_to_peft", {})
        if key in own:
            ratios[name] = own[key]
    return ratios


def _draw_panel(axis: Axes, panel: _Panel, names: list[str]) -> None:
    values = [panel.values.get(name, 0.0) for name in names]
    colors = [_PEFT_COLOR if name.startswith("peft") else _OWN_COLOR for name in names]
    labels = [
        panel.label.format(panel.values[name]) if name in panel.values else "-"
        for name in names
    ]
    bars = axis.barh(names, values, color=colors, height=0.7)
    axis.bar_label(bars, labels=labels, padding=3)
    axis.invert_yaxis()
    axis.set_xlim(0, max([*values, 1e-9]) * _ROOM_FOR_LABELS)
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.set_xlabel(panel.unit)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(left=False)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
