"""``--plot`` of ``kbitwrap plan``: what a preparation adds, or what a step holds, by precision."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import InputError

if TYPE_CHECKING:
    from .. import StepMemory

SUFFIXES = (".svg", ".png", ".pdf")
_GIB = 2**30
_LINE_COLOR = "#1f2328"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
}


def check_plot(path: Path, *, overwrite: bool) -> None:
    """Refuse a figure that cannot be drawn to a file, before anything is computed for it.

    Args:
        path: The file.
        overwrite: Whether one that exists is to be replaced.

    Raises:
        InputError: matplotlib is not installed, the name has another suffix, something
            is there, or there is no folder to write to.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, which is not there: pip install matplotlib; in a checkout, pip install '.[plot]'"
        )
    if path.suffix not in SUFFIXES:
        raise InputError(
            f"--plot: expected a name that ends in {' or '.join(SUFFIXES)}, found {str(path)!r}"
        )
    if os.path.exists(path) and not overwrite:
        raise InputError(
            f"--plot: {str(path)!r} exists; choose another name, or add --overwrite"
        )
    if not path.parent.is_dir():
        raise InputError(
            f"--plot: cannot write {str(path)!r}: the folder {str(path.parent)!r} is not there"
        )


def draw(
    bars: Mapping[str, Mapping[str, int]],
    path: Path,
    title: str,
    *,
    marks: Mapping[str, int] | None = None,
    budget: int | None = None,
) -> None:
    """Draw a bar of several parts for each precision.

    Args:
        bars: ``{precision: {part: bytes}}``.
        path: The file to write.
        title: What is drawn.
        marks: The highest level of each precision while it is prepared, in bytes,
            marked beside its bar.
        budget: Bytes, drawn as a line.
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    parts = dict.fromkeys(part for sizes in bars.values() for part in sizes)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8, 1.4 + 0.4 * len(bars)), layout="constrained")
        axes = figure.subplots()
        ends = np.zeros(len(bars))
        for part in parts:
            sizes = np.array([of_one.get(part, 0) for of_one in bars.values()]) / _GIB
            if sizes.any():
                axes.barh([*bars], sizes, left=ends, label=part, height=0.7)
                ends = ends + sizes
        if marks:
            axes.plot(
                np.array([*marks.values()]) / _GIB,
                [*marks],
                "D",
                color=_LINE_COLOR,
                markersize=5,
                label="peak while preparing",
            )
        if budget is not None:
            axes.axvline(
                budget / _GIB, color=_LINE_COLOR, linestyle="--", label="memory budget"
            )
        axes.invert_yaxis()
        axes.set_xlabel("GiB")
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside right upper", frameon=False, fontsize="small")
        figure.savefig(path)


def draw_steps(
    steps: Mapping[str, StepMemory], path: Path, title: str, budget: int | None
) -> None:
    """Draw predicted steps: the phases of one, or several side by side at their peaks, by kind.

    Args:
        steps: By precision.
        path: The file to write.
        title: What is drawn.
        budget: Bytes, drawn as a line where there are several.
    """
    import matplotlib

    if len(steps) == 1:
        (step,) = steps.values()
        with matplotlib.rc_context(_STYLE):
            step.plot(path)
        return
    bars = {}
    for name, step in steps.items():
        kinds = step.by_kind.items()
        bars[name] = {kind.replace("_", " "): size for kind, size in kinds}
    draw(bars, path, title, budget=budget)
