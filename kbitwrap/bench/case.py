"""Measures one case, in a process that does nothing else: ``python -m kbitwrap.bench.case REQUEST RESULT``.

The request and the result are JSON files. PEFT's gradients are left in a file beside them, which the other cases
compare theirs with.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import PreTrainedModel

from .. import KbitPreparedModel, Precision
from .memory import MemoryMeter, live_bytes
from .models import LINEARS, build_model
from .settings import PEFT, Settings

_GRADIENTS = "gradients.pt"
_ADAPTED_LAYERS = 2  # without a step, the layers that hold the adapter that "adapted" is told of: the last ones
_RANK = 16


class Case:
    """One way to prepare, measured.

    Args:
        name: ``"peft"``, or a precision.
        settings: What to measure.
        folder: Where PEFT's gradients are kept.

    Attributes:
        result: What was measured, ready for JSON.
    """

    def __init__(self, name: str, settings: Settings, folder: Path) -> None:
        self.name = name
        self.settings = settings
        self.folder = folder
        self.device = torch.device(settings.device)
        self.meter = MemoryMeter(self.device)
        self.result: dict[str, Any] = {"case": name, "memory_method": self.meter.method}
        self._wrapper: KbitPreparedModel | None = None

    def run(self) -> dict[str, Any]:
        """Build the model and measure.

        Returns:
            The figures.
        """
        with _quiet():
            self._measure()
        return self.result

    def _measure(self) -> None:
        self.meter.start()
        baseline = self.meter.held()  # what the libraries hold: no part of a training step's figure
        seconds: list[float] = []
        with self.meter.timed(seconds):
            compute_dtype = getattr(torch, self.settings.compute_dtype)
            self.model = build_model(
                self.settings.shape, self.device, compute_dtype=compute_dtype, seed=self.settings.seed
            )
        self.result["build_seconds"] = seconds[0]
        self._measure_preparing()
        if self.settings.step:
            self._prepare()
            self._measure_step(self._adapt(), baseline)

    def _measure_preparing(self) -> None:
        prepare: list[float] = []
        restore: list[float] = []
        loaded_bytes = live_bytes(self.model, _is_base)
        for repeat in range(self.settings.repeats):
            undo = _undo_of_peft(self.model) if self.name == PEFT else None
            self.meter.start()
            reserved = self.meter.reserved()
            with self.meter.timed(prepare):
                self._prepare()
            after = self.meter.reserved()
            peak = self.meter.peak()
            adapted = None
            if self.name == Precision.ADAPTED.value:
                adapted = self._adapt()
                prepare[-1] += self.result["adopt_seconds"]
            if repeat == 0:
                self.result["transient_peak_bytes"] = peak
                self.result["added_bytes"] = live_bytes(self.model, _is_base) - loaded_bytes
                self.result["reserved_bytes"] = None if after is None or reserved is None else after - reserved
            if adapted is not None:
                adapted.unload()
            if undo is not None:
                undo()
            else:
                assert self._wrapper is not None
                with self.meter.timed(restore):
                    self._wrapper.restore()
        left = live_bytes(self.model, _is_base) - loaded_bytes
        self.result |= {"prepare_seconds": prepare, "restore_seconds": restore, "left_bytes": left}

    def _prepare(self) -> None:
        checkpointing = {"use_reentrant": self.settings.reentrant}
        if self.name == PEFT:
            prepare_model_for_kbit_training(self.model, gradient_checkpointing_kwargs=checkpointing)
            return
        chunk = self.settings.head_chunk_bytes if self.name == Precision.COMPUTE.value else None
        self._wrapper = KbitPreparedModel(
            self.model, precision=self.name, gradient_checkpointing_kwargs=checkpointing, head_chunk_bytes=chunk
        ).prepare()

    def _adapt(self) -> PeftModel:
        """Put a LoRA on the prepared model."""
        torch.manual_seed(self.settings.seed)
        num_layers = self.settings.shape.num_layers
        layers = None
        if not self.settings.step:
            layers = list(range(max(0, num_layers - _ADAPTED_LAYERS), num_layers))
        config = LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules=list(LINEARS),
            layers_to_transform=layers,
            init_lora_weights=False,  # both factors random: otherwise the gradient of the first is zero
            modules_to_save=["lm_head"] if self.settings.step and self.settings.modules_to_save else None,
        )
        adapted = get_peft_model(self.model, config)
        if self._wrapper is not None:
            seconds: list[float] = []
            with self.meter.timed(seconds):
                self._wrapper.adopt(adapted)
            self.result["adopt_seconds"] = seconds[0]
        return adapted

    def _measure_step(self, model: PeftModel, baseline: int) -> None:
        settings = self.settings
        model.train()
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(settings.shape.vocab_size, (1, settings.tokens), generator=generator).to(self.device)
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=settings.autocast)
        self.meter.start()
        seconds: list[float] = []
        for repeat in range(1 + settings.repeats):
            model.zero_grad(set_to_none=True)
            with self.meter.timed(seconds):
                with autocast:
                    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
                loss.backward()
            if repeat == 0:
                self.result["step_peak_bytes"] = self.meter.absolute_peak() - baseline
                self.result["step_reserved_bytes"] = self.meter.reserved()
                self.result["loss"] = loss.item()
                self._compare(model)
        # The first step also pays for what is set up once.
        self.result["step_seconds"] = seconds[1:]

    def _compare(self, model: nn.Module) -> None:
        gradients = {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}
        self.result["num_gradients"] = len(gradients)
        path = self.folder / _GRADIENTS
        if self.name == PEFT:
            torch.save(gradients, path)
        if not path.exists():
            return
        expected = torch.load(path, mmap=True)
        if expected.keys() != gradients.keys():
            raise RuntimeError(f"other parameters have a gradient: {sorted(expected.keys() ^ gradients.keys())[:3]}")
        self.result["largest_gradient"] = max(float(g.abs().max()) for g in expected.values())
        self.result["largest_gradient_difference"] = max(
            float((gradients[name].double() - g.double()).abs().max()) for name, g in expected.items()
        )


def _is_base(name: str) -> bool:
    return "lora_" not in name and "modules_to_save" not in name


def _undo_of_peft(model: PreTrainedModel) -> Callable[[], None]:
    """What puts the model back so that PEFT's function, which nothing undoes, can be timed once more."""
    states = [(parameter, parameter.dtype, parameter.requires_grad) for parameter in model.parameters()]
    hooks = {id(module): list(module._forward_hooks) for module in model.modules()}

    def undo() -> None:
        for parameter, dtype, requires_grad in states:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(requires_grad)
        model.gradient_checkpointing_disable()
        for module in model.modules():
            for key in set(module._forward_hooks) - set(hooks[id(module)]):
                del module._forward_hooks[key]

    return undo


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the libraries warn of here is theirs, or is what the benchmark is there to do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main(request_path: str, result_path: str) -> None:
    """Measure what a request asks for.

    Args:
        request_path: A JSON file: ``{"case": ..., "settings": ...}``.
        result_path: Where to write the figures, as JSON. PEFT's gradients are kept in the same folder.
    """
    request = json.loads(Path(request_path).read_text())
    case = Case(request["case"], Settings.from_dict(request["settings"]), Path(result_path).parent)
    Path(result_path).write_text(json.dumps(case.run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
