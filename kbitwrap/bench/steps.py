"""Measures training steps: their memory, their time, and how far their numbers are from PEFT's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import StepTracker
from .memory import MemoryMeter, Timings, stored_bytes
from .settings import PEFT, Figures, Settings

# Figures that are None where the device has too little memory for them.
_COSTS = ("system_peak_bytes", "seconds", "peak_bytes")
_NUMBERS = ("loss", "num_gradients", "largest_gradient_difference")


@dataclass(frozen=True)
class StepMeasurement:
    """Measures the training steps of one case.

    Attributes:
        case: Its name.
        model: The prepared model with a LoRA, in train mode.
        settings: What to measure.
        meter: Of the model's device.
        baseline: Bytes of the system's that were held before the model was built.
        folder: Where PEFT's gradients are kept.
    """

    case: str
    model: PeftModel
    settings: Settings
    meter: MemoryMeter
    baseline: int
    folder: Path

    def measure(self, tokens: Tensor) -> Figures:
        """Measure what a step costs, then its numbers.

        Args:
            tokens: The batch, which is also its labels: ``(1, num_tokens)``, int64.

        Returns:
            The figures, ready for JSON; ``None`` for those that the device has too
                little memory for.
        """
        ids = tokens.to(self.meter.device)
        result: Figures = {"tokens": ids.shape[1]}
        if self.settings.repeats:
            try:
                result |= self._costs(ids)
            except torch.OutOfMemoryError:
                result |= dict.fromkeys(_COSTS)
            self._clear_gradients()
        try:
            result |= self._numbers(ids)
        except torch.OutOfMemoryError:
            result |= dict.fromkeys(_NUMBERS)
        self._clear_gradients()
        return result

    def _costs(self, ids: Tensor) -> Figures:
        # The first step also pays for what is set up once.
        self.meter.start()
        self._step(ids)
        system_peak = self.meter.system_peak() - self.baseline
        timings = Timings()
        for _ in range(self.settings.repeats):
            self._clear_gradients()
            with self.meter.timed(timings):
                self._step(ids)
        self._clear_gradients()
        peak = self.meter.tensor_peak(
            lambda: stored_bytes(self.model), lambda: self._step(ids)
        )
        costs = {
            "system_peak_bytes": system_peak,
            "seconds": timings.seconds,
            "peak_bytes": peak,
        }
        if self.settings.predict:
            self._clear_gradients()
            with StepTracker(self.model, inputs=[ids]) as tracker:
                self._step(ids)
            costs["tracked_bytes"] = tracker.peak_bytes
        return costs

    def _numbers(self, ids: Tensor) -> Figures:
        with _deterministic(self.meter.device):
            loss = self._step(ids).item()
        return {"loss": loss, **self._compare_gradients(ids.shape[1])}

    def _step(self, ids: Tensor) -> Tensor:
        with torch.autocast(
            self.meter.device.type, torch.bfloat16, enabled=self.settings.autocast
        ):
            loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def _clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _compare_gradients(self, num_tokens: int) -> Figures:
        found = {
            name: parameter.grad for name, parameter in self.model.named_parameters()
        }
        gradients = {
            name: gradient.cpu()
            for name, gradient in found.items()
            if gradient is not None
        }
        path = self.folder / f"gradients-{num_tokens}.pt"
        if self.case == PEFT:
            torch.save(gradients, path)
        if not path.exists():
            return {"num_gradients": len(gradients)}
        expected = torch.load(path, mmap=True)
        others = expected.keys() ^ gradients.keys()
        if others:
            raise RuntimeError(
                f"other parameters have a gradient: {sorted(others)[:3]}"
            )
        differences = [
            gradients[name].double() - gradient.double()
            for name, gradient in expected.items()
        ]
        return {
            "num_gradients": len(gradients),
            "largest_gradient": _largest(expected.values()),
            "largest_gradient_difference": _largest(differences),
        }


def _largest(tensors: Iterable[Tensor]) -> float:
    return max(float(tensor.abs().max()) for tensor in tensors)


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Where numbers are compared bit for bit, the same operations must give the same: not all of CUDA's kernels do.

    Those that only warn, as torch's fused attention does, are left out: attention is
    computed by its formula.
    """
    attention = (
        sdpa_kernel(SDPBackend.MATH)
        if device.type == "cuda"
        else contextlib.nullcontext()
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with attention:
            yield
    finally:
        torch.use_deterministic_algorithms(False)
