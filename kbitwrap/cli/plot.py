"""``--plot`` of ``kbitwrap plan``: what a preparation adds, or what a step holds, by precision."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import InputError, check_file

if TYPE_CHECKING:
    from .. import StepMemory

PLOT_SUFFIXES = (".svg", ".png", ".pdf")
_GIB = 2**30
_LINE_COLOR = "#1f2328"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "figure.facecolor": "#ffffff",
    "axes.facecolor": "#ffffff",
}


def check_plot(path: Path, *, overwrite: bool, source: str | Path | None) -> None:
    """Refuse a figure that cannot be drawn to a file, before anything is computed for it.

    Args:
        path: The file.
        overwrite: Whether one that exists is to be replaced.
        source: The path of what is drawn, if it has one.

    Raises:
        InputError: matplotlib is not installed, the name has another suffix, or the
            file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--plot needs matplotlib, which is not there: pip install matplotlib; in a checkout, pip install '.[plot]'"
        )
    if path.suffix not in PLOT_SUFFIXES:
        raise InputError(
            f"--plot: expected a name that ends in {' or '.join(PLOT_SUFFIXES)}, found {str(path)!r}"
        )
    check_file(path, "--plot", overwrite=overwrite, source=source)


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

    Raises:
        InputError: The file cannot be written.
    """
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure

    parts = dict.fromkeys(part for sizes in bars.values() for part in sizes)
    with matplotlib.rc_context(_STYLE), writing(path) as unfinished:
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
        figure.savefig(unfinished)


def draw_steps(
    steps: Mapping[str, StepMemory], path: Path, title: str, budget: int | None
) -> None:
    """Draw predicted steps: the phases of one, or several side by side at their peaks, by kind.

    Args:
        steps: By precision.
        path: The file to write.
        title: What is drawn.
        budget: Bytes, drawn as a line where there are several.

    Raises:
        InputError: The file cannot be written.
    """
    import matplotlib

    if len(steps) == 1:
        (step,) = steps.values()
        with matplotlib.rc_context(_STYLE), writing(path) as unfinished:
            step.plot(unfinished)
        return
    bars = {}
    for name, step in steps.items():
        kinds = step.by_kind.items()
        bars[name] = {kind.replace("_", " "): size for kind, size in kinds}
    draw(bars, path, title, budget=budget)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Let a file be written beside its place, and put there once it is whole.

    What is there and no file, such as a pipe, is written to. Nothing is left over if
    the body raises.

    Args:
        path: The file, or a link to it.

    Yields:
        The file to write, with the same suffix.

    Raises:
        InputError: The file cannot be written.
    """
    target = Path(os.path.realpath(path))
    unfinished = target.with_name(f".kbitwrap-{os.getpid()}{target.suffix}")
    try:
        if target.exists() and not target.is_file():
            yield target
            return
        yield unfinished
        os.replace(unfinished, target)
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)
