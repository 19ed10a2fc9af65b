"""Benchmarks of tiny models, whose cases run in this process."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kbitwrap.bench import case as bench_case
from kbitwrap.bench import runner
from kbitwrap.bench.settings import CASES, MISTRAL_7B, Settings, Shape
from support import forks

HIDDEN, LAYERS, VOCAB = 256, 1, 2048  # the head, made in one piece, decides the peak of a step
SHAPE = MISTRAL_7B.resized(hidden_size=HIDDEN, num_layers=LAYERS, vocab_size=VOCAB)
HEAD_CHUNK_BYTES = 256 << 10
PREDICTED_CASES = ("peft", "compute-chunked")
TINY = Shape(
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=128,
    vocab_size=128,
)


def settings(**fields: Any) -> Settings:
    return Settings(**{"shape": TINY, "repeats": 1, "step": True, "tokens": (16,), **fields})


def run_here(case: str, asked: Settings, folder: Path) -> dict[str, Any]:
    """A case in this process."""
    return run_in(lambda function, *args: function(*args), case, asked, folder)


def run_in(call: Callable[..., object], case: str, asked: Settings, folder: Path) -> dict[str, Any]:
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps({"case": case, "settings": asked.to_dict()}))
    call(bench_case.main, str(request), str(answer))
    result: dict[str, Any] = json.loads(answer.read_text())
    return result


@functools.cache
def all_cases() -> dict[str, Any]:
    """A run of all cases, steps included, at the first call.

    PEFT's and "compute" run each in a process of its own, as all do for a user, but one that has imported all.
    """
    lines: list[str] = []

    def run(case: str, asked: Settings, folder: Path) -> dict[str, Any]:
        return run_in(forks.run, case, asked, folder) if case in ("peft", "compute") else run_here(case, asked, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr(runner, "_run_case", run)
        asked = settings(shape=SHAPE, tokens=(8, 16), head_chunk_bytes=HEAD_CHUNK_BYTES)
        result = runner.run_benchmark(asked, CASES, lines.append)
    assert len(lines) == len(CASES)
    return result


@functools.cache
def predicted_cases() -> dict[str, Any]:
    """A run of two cases whose steps are predicted too, at the first call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_run_case", run_here)
        asked = settings(shape=SHAPE, tokens=(8,), head_chunk_bytes=HEAD_CHUNK_BYTES, predict=True)
        return runner.run_benchmark(asked, PREDICTED_CASES, lambda line: None)


@functools.cache
def all_combinations() -> dict[str, Any]:
    """A comparison of "compute" with PEFT in every combination of settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_run_case", run_here)
        asked = settings(shape=dataclasses.replace(TINY, num_layers=1))
        return runner.run_identity(asked, ["compute"], lambda line: None)
