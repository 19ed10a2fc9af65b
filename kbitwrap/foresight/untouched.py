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


class ProcessState:
    """The state that accelerate shares in the whole process, for one trainer alone.

    A trainer continues where it was when it is used again.
    """

    def __init__(self) -> None:
        self._own: list[dict[str, Any]] = [{}, {}, {}]

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Run what is inside with the trainer's state, quietly; the process has its own again afterwards, seeds too.

        Yields:
            Nothing.
        """
        state: Any = importlib.import_module("accelerate.state")
        numpy: Any = importlib.import_module("numpy")
        classes = (state.PartialState, state.AcceleratorState, state.GradientState)
        devices = []
        if torch.cuda.is_initialized():
            devices = list(range(torch.cuda.device_count()))
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ))
            stack.enter_context(torch.random.fork_rng(devices))
            stack.callback(random.setstate, random.getstate())
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            for logger in map(logging.getLogger, _LOGGERS):
                stack.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.CRITICAL)
            bars: Any = sys.modules.get("datasets.utils")
            if bars is not None and bars.is_progress_bar_enabled():
                stack.callback(bars.enable_progress_bars)
                bars.disable_progress_bars()
            for cls, own in zip(classes, self._own, strict=True):
                # every instance has this very dict
                shared = cls._shared_state
                stack.enter_context(mock.patch.dict(shared, own, clear=True))
            try:
                yield
            finally:
                self._own = [dict(cls._shared_state) for cls in classes]
