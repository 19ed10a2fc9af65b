"""The state of the process that a trainer's code writes: seeds, the environment, loggers, what accelerate shares."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

_LOGGERS = ("transformers", "trl", "datasets", "accelerate")


class OwnState:
    """The state that accelerate shares in the whole process, for one trainer alone.

    A trainer continues where it was when it is used again.
    """

    def __init__(self) -> None:
        self._own: list[dict[str, Any]] = [{}, {}, {}]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Run what is inside with the trainer's state; the process has its own again afterwards, seeds and loggers too.

        Yields:
            Nothing.
        """
        state: Any = importlib.import_module("accelerate.state")
        classes = (state.PartialState, state.AcceleratorState, state.GradientState)
        shared = [cls._shared_state for cls in classes]
        others = [dict(fields) for fields in shared]
        _replace_all(shared, self._own)
        try:
            with _seeds_kept(), _quiet():
                yield
        finally:
            self._own = [dict(fields) for fields in shared]
            _replace_all(shared, others)


def _replace_all(places: list[Any], contents: list[dict[str, Any]]) -> None:
    for place, content in zip(places, contents, strict=True):
        place.clear()
        place.update(content)


@contextlib.contextmanager
def _seeds_kept() -> Iterator[None]:
    """Put back the states of random numbers, and the environment."""
    numpy: Any = importlib.import_module("numpy")
    drawn = random.getstate()
    drawn_by_numpy = numpy.random.get_state()
    environment = dict(os.environ)
    devices: list[int] = []
    if torch.cuda.is_initialized():
        devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(drawn)
        numpy.random.set_state(drawn_by_numpy)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries from logging and from showing progress."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    bars: Any = sys.modules.get("datasets.utils")
    has_bars = bars is not None and bars.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    if has_bars:
        bars.disable_progress_bars()
    try:
        yield
    finally:
        if has_bars:
            bars.enable_progress_bars()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
