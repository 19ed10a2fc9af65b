"""Runs a step of a model without values, and writes down its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ConfigError
from ..model.tree import ModelTree
from .fakes import FakeModel, HostIntegers
from .ledger import OPTIMIZER_STEP, Ledger
from .tracker import Watch, hold_all, vocabulary_size


def trace(fakes: FakeModel, optimizer: Any, inputs: Mapping[str, torch.Tensor], autocast: torch.dtype | None) -> Ledger:
    """Run a forward, a backward and an optimizer step; ``inputs`` are real integers or fake floats."""
    model = fakes.model

    def forward() -> torch.Tensor:
        context = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
        with context:
            return _loss_of(model(**inputs))

    with fakes.mode, HostIntegers(fakes.mode):
        with torch.no_grad():
            forward()  # what a first forward leaves on its modules is there in later steps
        watch = Watch(vocabulary_size(model))
        hold_all(watch, ModelTree(model), optimizer, inputs)
        watch.follow_phase()
        with watch:
            forward().backward()
            if optimizer is not None:
                watch.enter(OPTIMIZER_STEP)
                optimizer.step()
    return watch.ledger


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError("the model returned no loss for these inputs; give `inputs` with its labels")
    return loss
