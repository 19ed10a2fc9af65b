"""PEFT's way and ours on the same bits: what each costs, computes and leaves. Every figure is measured."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel, prepare_model_for_kbit_training
from torch import nn

from .. import KbitPreparedModel, Precision, RestoreError, StepTracker
from ..bench.memory import MemoryMeter, Timings
from .base_state import BaseState

PEFT = "peft"
_LEFT = {
    "dtypes": ("dtypes",),
    "hooks": ("hooks",),
    "flags": ("requires_grad", "attributes"),
}


@dataclass
class Side:
    """One way to prepare.

    Attributes:
        name: A precision, or ``"peft"``.
        digest: Of the bits that it began with.
        added_bytes: What the parameters hold more while prepared.
        peak_bytes: The most that tensors held while preparing, above the start.
        seconds: The time that preparing took.
        loss: Of the first step.
        gradients: Of the first step, by name.
        left: What differs once it is undone, or, with PEFT, once the adapter is
            unloaded: parameters of another dtype, modules with other hooks, parameters
            and modules with other flags.
        merged_bytes: The bytes of the model after ``merge_and_unload``; ``None`` where
            it was not merged.
        merged_error: The error of its logits, relative to those computed in float32;
            ``None`` where not measured.
        exported_bytes: The bytes of the merged model that ``export`` wrote.
        exported_error: The error of its logits.
    """

    name: str
    digest: str
    added_bytes: int
    peak_bytes: int
    seconds: float
    loss: float
    gradients: dict[str, torch.Tensor]
    left: dict[str, int] = field(default_factory=dict)
    merged_bytes: int | None = None
    merged_error: float | None = None
    exported_bytes: int | None = None
    exported_error: float | None = None

    def loss_difference(self, other: Side) -> float:
        """The distance of its loss from another's."""
        return abs(self.loss - other.loss)

    def gradient_difference(self, other: Side) -> float:
        """The largest distance of its gradients from another's, relative to the other's largest; 0 is bit for bit."""
        if self.gradients.keys() != other.gradients.keys():
            return float("inf")
        largest = max(
            gradient.abs().max().item() for gradient in other.gradients.values()
        )
        distance = 0.0
        for name, gradient in other.gradients.items():
            difference = gradient.double() - self.gradients[name].double()
            distance = max(distance, difference.abs().max().item())
        return distance / largest

    def to_dict(self, peft: Side) -> dict[str, Any]:
        """The figures as plain values, ready for JSON, with the distances from PEFT's."""
        shown = {
            name: value
            for name, value in vars(self).items()
            if name not in ("name", "gradients")
        }
        distances = {
            "loss": self.loss_difference(peft),
            "gradients": self.gradient_difference(peft),
        }
        return {**shown, "difference_from_peft": distances}


@dataclass(frozen=True)
class Subject:
    """The model and the batch that both ways are measured on.

    Attributes:
        load: Loads the model, with the same bits at each call.
        adapt: Puts the same adapter on it, which trains no copy of a module.
        loss: The loss of a training step on the first batch.
    """

    load: Callable[[], nn.Module]
    adapt: Callable[[nn.Module], PeftModel]
    loss: Callable[[nn.Module], torch.Tensor]


class _ByPeft:
    """PEFT's function in the place of a wrapper: it is told of no adapter, and nothing undoes it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def prepare(self) -> None:
        prepare_by_peft(self._model)

    def adopt(self, peft_model: PeftModel) -> None:
        pass

    def restore(self) -> None:
        pass


def measure_ours(precision: Precision, subject: Subject) -> Side:
    """Prepare, take the first step, and put everything back.

    Args:
        precision: The precision.
        subject: What is measured.

    Returns:
        What was measured.
    """
    return _measure(
        precision.value,
        subject,
        lambda model: KbitPreparedModel(model, precision=precision),
    )


def measure_peft(subject: Subject) -> Side:
    """Do the same with PEFT's function, which has no way back: unload the adapter.

    Args:
        subject: What is measured.

    Returns:
        What was measured.
    """
    return _measure(PEFT, subject, _ByPeft)


def _measure(
    name: str,
    subject: Subject,
    wrap: Callable[[nn.Module], KbitPreparedModel | _ByPeft],
) -> Side:
    peak_bytes = _peak_of(subject.load(), lambda model: wrap(model).prepare())
    model = subject.load()
    base = BaseState.of(dict(model.named_modules()))
    wrapper = wrap(model)
    timings = Timings()
    with MemoryMeter(_device_of(model)).timed(timings):
        wrapper.prepare()
    added_bytes = base.again().parameter_bytes - base.parameter_bytes
    peft_model = subject.adapt(model)
    wrapper.adopt(peft_model)
    loss, gradients = _first_step(peft_model, subject)
    peft_model.unload()
    with contextlib.suppress(RestoreError):  # what is left is counted
        wrapper.restore()
    return Side(
        name=name,
        digest=base.digest(),
        added_bytes=added_bytes,
        peak_bytes=peak_bytes,
        seconds=timings.seconds[0],
        loss=loss,
        gradients=gradients,
        left=left_behind(base, base.again()),
    )


def prepare_by_peft(model: nn.Module) -> None:
    """Prepare a model by PEFT's own function, as it is by default.

    Args:
        model: The model.
    """
    with warnings.catch_warnings():
        # PEFT calls it by the name that transformers deprecates; that is not the user's
        # code.
        warnings.filterwarnings(
            "ignore", r"`gradient_checkpointing_enable` is deprecated", FutureWarning
        )
        prepare_model_for_kbit_training(model)


def left_behind(base: BaseState, now: BaseState) -> dict[str, int]:
    """Count what differs from the state in which a model was loaded.

    Args:
        base: That state.
        now: The state of the same modules now.

    Returns:
        ``{"dtypes", "hooks", "flags"}``.
    """
    left = {}
    for what, aspects in _LEFT.items():
        left[what] = sum(len(base.differences(now, aspect)) for aspect in aspects)
    return left


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of two tensors, relative to the norm of the expected one."""
    exact = expected.double()
    distance: torch.Tensor = (found.double() - exact).norm() / exact.norm()
    return distance.item()


def in_float32(model: Any) -> nn.Module:
    """Dequantize a model, and compute in float32 from then on.

    Args:
        model: The model of transformers; changed in place.

    Returns:
        It, in evaluation mode.
    """
    plain: nn.Module = (
        model.dequantize() if getattr(model, "is_quantized", False) else model
    )
    return plain.float().eval()


def _first_step(
    model: PeftModel, subject: Subject
) -> tuple[float, dict[str, torch.Tensor]]:
    model.train()
    with warnings.catch_warnings():
        # PEFT's function leaves it to torch which checkpointing there is, and torch
        # wants it said.
        warnings.filterwarnings(
            "ignore",
            r"torch\.utils\.checkpoint: the use_reentrant parameter",
            UserWarning,
        )
        loss = subject.loss(model)
        loss.backward()
    gradients = {
        name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None
    }
    for parameter in model.parameters():
        parameter.grad = None
    return loss.item(), gradients


def _peak_of(model: nn.Module, run: Callable[[nn.Module], object]) -> int:
    """The most bytes held meanwhile, above the start: by CUDA's allocator, or counted on a host."""
    device = _device_of(model)
    if device.type == "cuda":
        meter = MemoryMeter(device)
        meter.start()
        run(model)
        return meter.peak()
    gc.collect()
    with StepTracker(model) as tracker:
        run(model)
    return tracker.peak_bytes - tracker.static_bytes


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
