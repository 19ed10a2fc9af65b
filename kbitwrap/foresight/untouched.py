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
from unittest import mock

import torch

_LOGGERS = ("transformers", "trl", "datasets", "accelerate")


@contextlib.contextmanager
def process_of_trainer(own: list[dict[str, Any]]) -> Iterator[None]:
    """Run what is inside quietly, with the state that accelerate shares in the whole process for one trainer alone.

    The process has its own again afterwards, seeds too.

    Args:
        own: The trainer's state, by accelerate's classes: empty at first, and as the
            trainer leaves it afterwards, so that it continues where it was.

    Yields:
        Nothing.
    """
    state = importlib.import_module("accelerate.state")
    numpy = importlib.import_module("numpy")
    classes = (state.PartialState, state.AcceleratorState, state.GradientState)
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(torch.random.fork_rng(devices))
        stack.callback(random.setstate, random.getstate())
        stack.callback(numpy.random.set_state, numpy.random.get_state())
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        bars = sys.modules.get("datasets.utils")
        if bars is not None and bars.is_progress_bar_enabled():
            stack.callback(bars.enable_progress_bars)
            bars.disable_progress_bars()
        for cls, shared in zip(classes, own, strict=True):
            # every instance has this very dict
            whole = cls._shared_state
            stack.enter_context(mock.patch.dict(whole, shared, clear=True))
        try:
            yield
        finally:
            own[:] = [dict(cls._shared_state) for cls in classes]
