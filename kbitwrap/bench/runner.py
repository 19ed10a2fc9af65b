"""Runs the cases, each in a process of its own, and puts their figures side by side."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .report import environment
from .settings import PEFT, BenchError, Settings

_TIMINGS = ("prepare_seconds", "restore_seconds", "step_seconds")
_RATIOS = ("prepare_seconds", "step_seconds", "transient_peak_bytes", "step_peak_bytes")


def run_benchmark(settings: Settings, cases: Sequence[str], show: Callable[[str], None]) -> dict[str, Any]:
    """Measure the cases, one after the other.

    Args:
        settings: What to measure.
        cases: Names out of ``CASES``; PEFT's goes first, since the others' gradients are compared with its.
        show: Called with a line of progress before each case.

    Returns:
        ``{"environment", "settings", "cases"}``, ready for JSON. Timings are ``{"median", "least", "most", "all"}``.

    Raises:
        BenchError: A case could not be measured.
    """
    ordered = sorted(dict.fromkeys(cases), key=lambda case: case != PEFT)
    results = []
    with tempfile.TemporaryDirectory(prefix="kbitwrap-bench-") as folder:
        for index, case in enumerate(ordered, 1):
            show(f"case {index} of {len(ordered)}: {case}")
            results.append(_run_case(case, settings, Path(folder)))
    for result in results:
        for key in _TIMINGS:
            if result.get(key):
                result[key] = _summary(result[key])
    peft = next((result for result in results if result["case"] == PEFT), None)
    if peft is not None:
        for result in results:
            _relate(result, peft)
    return {"environment": environment(settings.device), "settings": settings.to_dict(), "cases": results}


def _run_case(case: str, settings: Settings, folder: Path) -> dict[str, Any]:
    request, answer = folder / f"{case}-request.json", folder / f"{case}-result.json"
    request.write_text(json.dumps({"case": case, "settings": settings.to_dict()}))
    # The child is to import this very package, also where it is run from its source.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.run(
        [sys.executable, "-m", f"{__package__}.case", str(request), str(answer)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.returncode < 0:
        raise BenchError(f"case {case!r} was ended by signal {-process.returncode}: was there enough memory?")
    if process.returncode > 0:
        last = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise BenchError(f"case {case!r} failed: {last[0]}")
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


def _summary(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "all": seconds}


def _relate(result: dict[str, Any], peft: dict[str, Any]) -> None:
    """Add the ratios of a case's figures to PEFT's, and the difference of its loss."""
    ratios = {}
    for key in _RATIOS:
        if result.get(key) and peft.get(key):
            own, other = (r[key]["median"] if key in _TIMINGS else r[key] for r in (result, peft))
            ratios[key] = own / other
    result["ratio_to_peft"] = ratios
    if "loss" in result:
        result["loss_difference"] = abs(result["loss"] - peft["loss"])
