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
from typing import Any

from .environment import environment
from .settings import PEFT, BenchError, Settings

_TIMED_PARTS = [f"{part}{kind}_seconds" for part in ("save", "merge", "export") for kind in ("", "_cpu")]
_TIMINGS = ("prepare_seconds", "restore_seconds", "seconds", *_TIMED_PARTS)
_RATIOS = ("prepare_seconds", "transient_peak_bytes", "seconds", "peak_bytes")


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
        for part in _parts(result):
            for key in _TIMINGS:
                if part.get(key):
                    part[key] = _summary(part[key])
    if results[0]["case"] == PEFT:
        for result in results:
            for part, pefts in zip(_parts(result), _parts(results[0]), strict=True):
                _relate(part, pefts)
    return {"environment": environment(settings.device), "settings": settings.to_dict(), "cases": results}


def run_identity(settings: Settings, cases: Sequence[str], show: Callable[[str], None]) -> dict[str, Any]:
    """Compare loss and gradients with PEFT's in every combination of what may change the arithmetic.

    Args:
        settings: What to measure; the combinations replace its options of the same names.
        cases: Names out of ``CASES``, each compared with PEFT's.
        show: Called with a line of progress before each combination.

    Returns:
        ``{"environment", "settings", "combinations"}``, ready for JSON. A combination is ``{"settings", "cases"}``.

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
        combinations.append({"settings": result["settings"], "cases": result["cases"][1:]})
    return {
        "environment": environment(settings.device),
        "settings": settings.to_dict(),
        "combinations": combinations,
    }


def is_identical(result: dict[str, Any]) -> bool:
    """Whether nothing differs from PEFT's numbers.

    Args:
        result: What ``run_identity`` returned.

    Returns:
        Whether every difference is exactly 0.
    """
    return all(
        step.get(key) == 0
        for combination in result["combinations"]
        for case in combination["cases"]
        for step in case["steps"]
        for key in ("loss_difference", "largest_gradient_difference")
    )


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


def _parts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A case's figures: of its preparation, and of its step at each number of tokens."""
    return [result, *result.get("steps", ())]


def _relate(part: dict[str, Any], pefts: dict[str, Any]) -> None:
    """Add the ratios of figures to PEFT's, and the difference of the loss."""
    ratios = {}
    for key in _RATIOS:
        if part.get(key) and pefts.get(key):
            own, other = (found[key]["median"] if key in _TIMINGS else found[key] for found in (part, pefts))
            ratios[key] = own / other
    part["ratio_to_peft"] = ratios
    if part.get("loss") is not None and pefts["loss"] is not None:
        part["loss_difference"] = abs(part["loss"] - pefts["loss"])
