"""How all plots look, and how they are saved: the same figures give the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

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


def draw(make: Callable[..., Figure], path: Path, *given: Any) -> None:
    """Make a figure of what is given, and save it."""
    with matplotlib.rc_context(STYLE):
        make(*given).savefig(path, metadata={"Date": None})
