"""Draws the figures of a benchmark: a panel for each figure, a bar for each case; and the curves of losses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .environment import where

# What of a file's metadata differs from run to run or version to version, by the formats that can be drawn.
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
# Vermillion and blue of Okabe and Ito's palette, which people who see colors differently can tell apart.
_PEFT_COLOR, _OWN_COLOR = "#d55e00", "#0072b2"
_ZERO_COLOR = "#1f2328"
# For each curve of the same palette a color and a style: those that lie on one another show through each other's gaps.
_LOOKS = (
    ("#e69f00", "-"),
    ("#0072b2", "--"),
    ("#cc79a7", "-."),
    ("#009e73", "--"),
    ("#d55e00", "-."),
    ("#1f2328", ":"),
    ("#56b4e9", "--"),
)
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


class _Line(NamedTuple):
    """How a curve looks."""

    color: str
    style: str


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
    with matplotlib.rc_context(STYLE):
        width, height = _PANEL_SIZE
        figure = Figure(figsize=(width * len(rows[0]), height * len(rows)), layout="constrained")
        figure.suptitle(
            f"Mistral in nf4 and bfloat16, hidden {shape['hidden_size']}, {shape['num_layers']} layers, "
            f"vocabulary {shape['vocab_size']}, on {where(result)}"
        )
        for row, axes in zip(rows, figure.subplots(len(rows), len(rows[0]), squeeze=False), strict=True):
            for panel, axis in zip(row, axes, strict=True):
                _draw_panel(axis, panel, names)
        figure.savefig(path, metadata={_STAMPS[path.suffix]: None})


def draw_losses(result: dict[str, Any], path: Path) -> None:
    """Draw what ``run_loss`` returned: the curves, and what the cases differ by. The same result gives the same file.

    Args:
        result: The result.
        path: Where to; its suffix, one of ``PLOT_SUFFIXES``, says the format.

    Raises:
        OSError: The file cannot be written.
    """
    settings, losses = result["settings"], result["losses"]
    lines = {case["case"]: _Line(*look) for case, look in zip(losses, _LOOKS, strict=False)}
    adapters = {case["case"]: case["adapters"] for case in losses}
    compared = [case for case in losses if "difference" in case]
    steps = range(1, settings["steps"] + 1)
    with matplotlib.rc_context(STYLE):
        width, height = _PANEL_SIZE
        figure = Figure(figsize=(width * 2.7, height * 2.6), layout="constrained")
        figure.suptitle(
            f"LoRA on a byte-level Llama in {settings.get('quant', 'nf4')} and bfloat16, "
            f"{'' if settings.get('autocast', True) else 'no autocast, '}"
            f"hidden {settings['hidden_size']}, layers {settings['num_layers']}, seeds {settings['repeats']}"
        )
        (curves, ends), (preparations, dtypes) = figure.subplots(2, 2)
        for case in losses:
            line = lines[case["case"]]
            curves.plot(steps, case["train_loss"], line.style, color=line.color, label=case["case"], linewidth=1.2)
        for row, case in enumerate(compared):
            difference, color = case["difference"], lines[case["case"]].color
            is_alike = case["adapters"] == adapters[difference["case"]]
            _draw_differences(preparations if is_alike else dtypes, steps, case, color)
            ends.plot(difference["held_out_loss"]["all"], [row] * settings["repeats"], ".", color=color, alpha=0.5)
            mean, error = (difference["held_out_loss"][key] for key in ("mean", "error"))
            ends.errorbar(mean, row, xerr=error, fmt="D", color=color, capsize=3, markersize=4)
        _finish(curves, "train loss, mean of the seeds", "step")
        _finish(preparations, "difference of train losses, same dtype of adapters", "step")
        _finish(dtypes, "difference of train losses, another dtype", "step")
        _scale(ends, [value for case in compared for value in case["difference"]["held_out_loss"]["all"]])
        ends.axvline(0, color=_ZERO_COLOR, linewidth=0.6)
        ends.set_yticks(range(len(compared)), [_difference_name(case, "\n") for case in compared])
        ends.set_ylim(max(len(compared), 1) - 0.5, -0.5)
        _finish(ends, "difference of held-out losses", f"each seed, mean and standard error; linear to {_LINEAR_UP_TO}")
        figure.savefig(path, metadata={_STAMPS[path.suffix]: None})


def _draw_differences(axis: Axes, steps: range, case: dict[str, Any], color: str) -> None:
    means, errors = (case["difference"]["train_loss"][key] for key in ("mean", "error"))
    axis.plot(steps, means, color=color, label=_difference_name(case, " "), linewidth=1.2)
    axis.axhline(0, color=_ZERO_COLOR, linewidth=0.6)
    if None not in errors:
        below, above = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axis.fill_between(steps, below, above, color=color, alpha=0.2, linewidth=0)


def _difference_name(case: dict[str, Any], between: str) -> str:
    return f"{case['case']}{between}- {case['difference']['case']}"


def _scale(axis: Axes, values: list[float]) -> None:
    """Scale differences of several magnitudes: linearly near zero, by the logarithm beyond, with room at both ends."""
    least, most = (1.3 * bound for bound in (min([*values, -_LINEAR_UP_TO]), max([*values, _LINEAR_UP_TO])))
    axis.set_xscale("symlog", linthresh=_LINEAR_UP_TO)
    axis.set_xlim(least, most)
    ticks = [0.0, *(sign * _LINEAR_UP_TO * 10**power for power in range(4) for sign in (-1, 1))]
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


def _rows(result: dict[str, Any]) -> list[tuple[_Panel, _Panel, _Panel]]:
    """A row of panels of preparing, and one of training steps for each number of tokens."""
    cases = {case["case"]: case for case in result["cases"]}
    rows = [
        (
            _Panel("live bytes added", "MiB", _mib(cases, "added_bytes"), "{:.2f}"),
            _Panel("peak while preparing", "MiB above the start", _mib(cases, "transient_peak_bytes"), "{:.1f}"),
            _Panel("time to prepare", "ratio to PEFT's", _ratios(cases, "prepare_seconds"), "{:.3f}"),
        )
    ]
    for index, tokens in enumerate(result["settings"]["tokens"] if result["settings"]["step"] else ()):
        steps = {name: case["steps"][index] for name, case in cases.items()}
        rows.append(
            (
                _Panel(f"peak of tensors in a step, {tokens} tokens", "MiB", _mib(steps, "peak_bytes"), "{:.0f}"),
                _Panel(
                    f"peak of the system in a step, {tokens} tokens", "MiB", _mib(steps, "system_peak_bytes"), "{:.0f}"
                ),
                _Panel(f"step time, {tokens} tokens", "ratio to PEFT's", _ratios(steps, "seconds"), "{:.3f}"),
            )
        )
    return rows


def _mib(parts: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    return {name: part[key] / _MIB for name, part in parts.items() if part[key] is not None}


def _ratios(parts: dict[str, dict[str, Any]], key: str) -> dict[str, float]:
    ratios = {name: part.get("ratio_to_peft", {}).get(key) for name, part in parts.items()}
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def _draw_panel(axis: Axes, panel: _Panel, names: list[str]) -> None:
    values = [panel.values.get(name, 0.0) for name in names]
    colors = [_PEFT_COLOR if name.startswith("peft") else _OWN_COLOR for name in names]
    labels = [panel.label.format(panel.values[name]) if name in panel.values else "-" for name in names]
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
