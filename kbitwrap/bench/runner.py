"""Runs the cases, each in a process of its own, and puts their figures side by side."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .environment import environment
from .settings import PEFT, BenchError, Figures, Settings

_TIMINGS = (
    "prepare_seconds",
    "restore_seconds",
    "seconds",
    "save_seconds",
    "save_cpu_seconds",
    "merge_seconds",
    "merge_cpu_seconds",
    "export_seconds",
    "export_cpu_seconds",
)
_RATIOS = ("prepare_seconds", "transient_peak_bytes", "seconds", "peak_bytes")


def run_benchmark(
    settings: Settings, cases: Sequence[str], show: Callable[[str], None]
) -> Figures:
    """Measure the cases, one after the other.

    Args:
        settings: What to measure.
        cases: Names out of ``CASES``; PEFT's goes first, since the others' gradients
            are compared with its.
        show: Called with a line of progress before each case.

    Returns:
        ``{"environment", "settings", "cases"}``, ready for JSON. Timings are
            ``{"median", "least", "most", "all"}``.

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
        for part in _parts(result):
            _summarize_timings(part)
    first = results[0]
    if first["case"] == PEFT:
        for result in results:
            for part, pefts in zip(_parts(result), _parts(first), strict=True):
                _relate(part, pefts)
    return {
        "environment": environment(settings.device),
        "settings": settings.to_dict(),
        "cases": results,
    }


def run_identity(
    settings: Settings, cases: Sequence[str], show: Callable[[str], None]
) -> Figures:
    """Compare loss and gradients with PEFT's in every combination of what may change the arithmetic.

    Args:
        settings: What to measure; the combinations replace its options of the same
            names.
        cases: Names out of ``CASES``, each compared with PEFT's.
        show: Called with a line of progress before each combination.

    Returns:
        ``{"environment", "settings", "combinations"}``, ready for JSON. A combination
            is ``{"settings", "cases"}``.

    Raises:
        BenchError: A case could not be measured.
    """
    options = list(itertools.product((False, True), repeat=4))
    combinations = []
    for index, (is_tied, reentrant, autocast, modules_to_save) in enumerate(options, 1):
        asked = dataclasses.replace(
            settings,
            shape=dataclasses.replace(settings.shape, is_tied=is_tied),
            repeats=0,
            step=True,
            reentrant=reentrant,
            autocast=autocast,
            modules_to_save=modules_to_save,
        )
        show(f"combination {index} of {len(options)}")
        result = run_benchmark(asked, [PEFT, *cases], lambda line: None)
        combinations.append(
            {"settings": result["settings"], "cases": result["cases"][1:]}
        )
    return {
        "environment": environment(settings.device),
        "settings": settings.to_dict(),
        "combinations": combinations,
    }


def is_identical(result: Figures) -> bool:
    """Whether nothing differs from PEFT's numbers.

    Args:
        result: What ``run_identity`` returned.

    Returns:
        Whether every difference is exactly 0.
    """
    for combination in result["combinations"]:
        for case in combination["cases"]:
            if not all(_is_identical_step(step) for step in case["steps"]):
                return False
    return True


def _is_identical_step(step: Figures) -> bool:
    """Whether two steps are identical; those not compared, for want of memory, are not."""
    differences = (step.get("loss_difference"), step.get("largest_gradient_difference"))
    return differences == (0, 0)


def _run_case(case: str, settings: Settings, folder: Path) -> Figures:
    request = folder / f"{case}-request.json"
    answer = folder / f"{case}-result.json"
    request.write_text(json.dumps({"case": case, "settings": settings.to_dict()}))
    process = subprocess.run(
        [sys.executable, "-m", f"{__package__}.case", str(request), str(answer)],
        env={**os.environ, "PYTHONPATH": _import_path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.returncode < 0:
        raise BenchError(
            f"case {case!r} was ended by signal {-process.returncode}: was there enough memory?"
        )
    if process.returncode > 0:
        lines = process.stderr.strip().splitlines() or [
            f"exit status {process.returncode}"
        ]
        raise BenchError(f"case {case!r} failed: {lines[-1]}")
    result: Figures = json.loads(answer.read_text())
    return result


def _import_path() -> str:
    """The child is to import this very package, also where it is run from its source."""
    root = str(Path(__file__).parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return os.pathsep.join([root, inherited]) if inherited else root


def _summarize_timings(part: Figures) -> None:
    for key in _TIMINGS:
        seconds = part.get(key)
        if seconds:
            part[key] = {
                "median": statistics.median(seconds),
                "least": min(seconds),
                "most": max(seconds),
                "all": seconds,
            }


def _parts(result: Figures) -> list[Figures]:
    """A case's figures: of its preparation, and of its step at each number of tokens."""
    return [result, *result.get("steps", ())]


def _relate(part: Figures, pefts: Figures) -> None:
    """Add the ratios of figures to PEFT's, and the difference of the loss."""
    ratios = {}
    for key in _RATIOS:
        own = part.get(key)
        other = pefts.get(key)
        if not own or not other:
            continue
        if key in _TIMINGS:
            own = own["median"]
            other = other["median"]
        ratios[key] = own / other
    part["ratio_to_peft"] = ratios
    if part.get("loss") is not None and pefts["loss"] is not None:
        part["loss_difference"] = abs(part["loss"] - pefts["loss"])
