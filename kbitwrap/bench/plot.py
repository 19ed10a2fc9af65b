"""Draws the figures of a benchmark: a panel for each figure, a bar for each case; and the curves of losses.

Panels stand one below the other, so that a phone shows them in a size that can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .environment import where
from .settings import Figures

# What of a file's metadata differs from run to run or version to version, by the
# formats that can be drawn.
_STAMPS = {".svg": "Date", ".png": "Software", ".pdf": "CreationDate"}
_MIB = 1024**2
_WIDTH = 5.0  # inches
_PANEL_HEIGHT = 1.8
_CURVES_HEIGHT = 2.6
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
_PEFT_COLOR = "#d55e00"
_OWN_COLOR = "#0072b2"
_ZERO_COLOR = "#1f2328"
_LINEAR_UP_TO = 1e-3


_RATIO = "ratio to PEFT's"


@dataclass(frozen=True)
class _Panel:
    """A figure of every case.

    Attributes:
        title: What is drawn.
        key: Its key in the result.
        label: A format for the value beside its bar.
        unit: Its unit: MiB, or the ratio to PEFT's.
    """

    title: str
    key: str
    label: str
    unit: str = "MiB"

    def value(self, part: Figures) -> float | None:
        """The figure of a case; ``None`` where it was not measured, or ran out of memory."""
        if self.unit == _RATIO:
            return part.get("ratio_to_peft", {}).get(self.key)  # type: ignore[no-any-return]
        num_bytes = part[self.key]
        return None if num_bytes is None else num_bytes / _MIB


_PREPARING = (
    _Panel("live bytes added", "added_bytes", "{:.2f}"),
    _Panel(
        "peak while preparing", "transient_peak_bytes", "{:.1f}", "MiB above the start"
    ),
    _Panel("time to prepare", "prepare_seconds", "{:.3f}", _RATIO),
)
_STEP = (
    _Panel("peak of tensors in a step", "peak_bytes", "{:.0f}"),
    _Panel("peak of the system in a step", "system_peak_bytes", "{:.0f}"),
    _Panel("step time", "seconds", "{:.3f}", _RATIO),
)
# How curves look, of the same palette. Those that lie on one another show through each
# other's gaps.
_COLORS = (
    "#e69f00",
    "#0072b2",
    "#cc79a7",
    "#009e73",
    "#d55e00",
    "#1f2328",
    "#56b4e9",
)
_LOOKS = cycler(color=_COLORS, linestyle=("-", "--", "-.", "--", "-.", ":", "--"))
Looks = dict[str, Figures]
"""How the curve of each case looks."""


def draw(result: Figures, path: Path) -> None:
    """Draw what ``run_benchmark`` returned. The same result gives the same file.

    Args:
        result: The result.
        path: Where to; its suffix, one of ``PLOT_SUFFIXES``, says the format.

    Raises:
        OSError: The file cannot be written.
    """
    settings = result["settings"]
    shape = settings["shape"]
    tokens = settings["tokens"] if settings["step"] else []
    num_panels = len(_PREPARING) + len(_STEP) * len(tokens)
    with matplotlib.rc_context(STYLE):
        size = _WIDTH, _PANEL_HEIGHT * num_panels
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(
            f"Mistral in nf4 and bfloat16, hidden {shape['hidden_size']},\n"
            f"{shape['num_layers']} layers, vocabulary {shape['vocab_size']},\n"
            f"on {where(result)}"
        )
        axes = iter(figure.subplots(num_panels))
        cases = {case["case"]: case for case in result["cases"]}
        _draw_panels(axes, _PREPARING, cases, "")
        for index, num_tokens in enumerate(tokens):
            steps = {name: case["steps"][index] for name, case in cases.items()}
            _draw_panels(axes, _STEP, steps, f", {num_tokens} tokens")
        _save(figure, path)


def _draw_panels(
    axes: Iterator[Axes],
    panels: Sequence[_Panel],
    parts: dict[str, Figures],
    of_what: str,
) -> None:
    """Draw panels.

    Args:
        axes: Where to draw them; as many are taken as there are panels.
        panels: The panels.
        parts: What was measured, by case.
        of_what: What stands behind the titles.
    """
    for panel in panels:
        axis = next(axes)
        _draw_panel(axis, panel, parts)
        axis.set_title(
            f"{panel.title}{of_what}",
            fontsize=10,
            loc="left",
        )


def _draw_panel(axis: Axes, panel: _Panel, parts: dict[str, Figures]) -> None:
    """A bar for each case."""
    values = []
    labels = []
    colors = []
    for name, part in parts.items():
        value = panel.value(part)
        values.append(value or 0.0)
        labels.append("-" if value is None else panel.label.format(value))
        colors.append(_PEFT_COLOR if name.startswith("peft") else _OWN_COLOR)
    bars = axis.barh(
        [*parts],
        values,
        color=colors,
        height=0.7,
    )
    axis.bar_label(bars, labels=labels, padding=3)
    axis.invert_yaxis()
    axis.set_xlim(0, max([*values, 1e-9]) * _ROOM_FOR_LABELS)
    axis.set_xlabel(panel.unit)
    axis.xaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(left=False)
    axis.spines[["top", "right", "left"]].set_visible(False)


def draw_losses(result: Figures, path: Path) -> None:
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
    adapters = {case["case"]: case["adapters"] for case in losses}
    compared = [case for case in losses if "difference" in case]
    steps = range(1, settings["steps"] + 1)
    with matplotlib.rc_context(STYLE):
        size = _WIDTH, _CURVES_HEIGHT * 4
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(_losses_title(settings))
        curves, preparations, dtypes, ends = figure.subplots(4)
        for case in losses:
            name = case["case"]
            curves.plot(
                steps, case["train_loss"], label=name, linewidth=1.2, **looks[name]
            )
        for case in compared:
            has_same_dtype = case["adapters"] == adapters[case["difference"]["case"]]
            axis = preparations if has_same_dtype else dtypes
            _draw_differences(
                axis,
                steps,
                case,
                looks[case["case"]]["color"],
            )
        _draw_ends(ends, compared, looks)
        _finish(curves, "train loss, mean of the seeds")
        _finish(preparations, "difference of train losses, same dtype of adapters")
        _finish(dtypes, "difference of train losses, another dtype")
        by_seed = f"each seed, mean and standard error; linear to {_LINEAR_UP_TO}"
        _finish(ends, "difference of held-out losses", by_seed)
        _save(figure, path)


def _losses_title(settings: Figures) -> str:
    # Results saved before there was a choice do not name it.
    quant = settings.get("quant", "nf4")
    autocast = "" if settings.get("autocast", True) else "no autocast, "
    return (
        f"LoRA on a byte-level Llama in {quant} and bfloat16, {autocast}\n"
        f"hidden {settings['hidden_size']}, layers {settings['num_layers']}, seeds {settings['repeats']}"
    )


def _save(figure: Figure, path: Path) -> None:
    stamp = _STAMPS[path.suffix]
    figure.savefig(path, metadata={stamp: None})


def _draw_differences(axis: Axes, steps: range, case: Figures, color: str) -> None:
    """Draw a curve of the differences of the train losses, in a band of their standard errors where these are known.

    Args:
        axis: Where to draw it.
        steps: The numbers of the steps.
        case: The case.
        color: Of the curve and the band.
    """
    difference = case["difference"]["train_loss"]
    means = np.array(difference["mean"])
    label = _difference_name(case, " ")
    axis.plot(
        steps,
        means,
        color=color,
        label=label,
        linewidth=1.2,
    )
    axis.axhline(0, color=_ZERO_COLOR, linewidth=0.6)
    if None not in difference["error"]:
        errors = np.array(difference["error"])
        axis.fill_between(
            steps, means - errors, means + errors, color=color, alpha=0.2, linewidth=0
        )


def _draw_ends(axis: Axes, compared: list[Figures], looks: Looks) -> None:
    """Draw a row for each comparison: the differences of the held-out losses of each seed, their mean and its error.

    Args:
        axis: Where to draw them.
        compared: The cases that are compared with another.
        looks: How the curve of each case looks.
    """
    values: list[float] = []
    for row, case in enumerate(compared):
        color = looks[case["case"]]["color"]
        difference = case["difference"]["held_out_loss"]
        seeds = difference["all"]
        axis.plot(
            seeds,
            [row] * len(seeds),
            ".",
            color=color,
            alpha=0.5,
        )
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
    names = [_difference_name(case, "\n") for case in compared]
    axis.set_yticks(range(len(compared)), names)
    axis.set_ylim(max(len(compared), 1) - 0.5, -0.5)


def _difference_name(case: Figures, between: str) -> str:
    return f"{case['case']}{between}- {case['difference']['case']}"


def _scale(axis: Axes, values: list[float]) -> None:
    """Scale differences of several magnitudes: linearly near zero, by the logarithm beyond, with room at both ends."""
    least = 1.3 * min([*values, -_LINEAR_UP_TO])
    most = 1.3 * max([*values, _LINEAR_UP_TO])
    axis.set_xscale("symlog", linthresh=_LINEAR_UP_TO)
    axis.set_xlim(least, most)
    ticks = [0.0]
    for power in range(4):
        magnitude = _LINEAR_UP_TO * 10**power
        ticks += [-magnitude, magnitude]
    shown = [tick for tick in ticks if least <= tick <= most]
    axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axis.minorticks_off()


def _finish(axis: Axes, title: str, label: str = "step") -> None:
    """Give a panel its title, its labels and, where curves have names, a legend.

    Args:
        axis: The panel.
        title: What is drawn.
        label: What is drawn along the horizontal axis.
    """
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel(label)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(framealpha=0.9, edgecolor="none", fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axis.spines[["top", "right"]].set_visible(False)
