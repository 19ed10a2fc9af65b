"""Measures one case, in a process that does nothing else: ``python -m kbitwrap.bench.case REQUEST RESULT``.

The request and the result are JSON files. PEFT's gradients are left in a file beside them, which the other cases
compare theirs with.
"""

from __future__ import annotations

import contextlib
import filecmp
import gc
import inspect
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from .. import KbitPreparedModel, Precision, StepMemory, StepTracker, predict_step
from .memory import MemoryMeter, live_bytes, stored_bytes
from .models import LINEARS, build_model
from .settings import CHUNKED, MERGED, PEFT, PEFT_UNCLEARED, Settings

# Where only preparing is measured, the adapter that "adapted" is told of sits on this many layers, the last ones.
_ADAPTED_LAYERS = 2
# Memory is measured first: what is freed for a clean start has to be got again, which takes time.
_MEMORY_RUNS = 4
_RANK = 16
_NO_SHARDS = "1TB"
_COSTS = ("system_peak_bytes", "seconds", "peak_bytes")
_NUMBERS = ("loss", "num_gradients", "largest_gradient_difference")


class Case:
    """One way to prepare, measured.

    Args:
        name: One of ``CASES``.
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
        baseline = self.meter.system_held()  # what the libraries hold: no part of a training step's figure
        seconds: list[float] = []
        with self.meter.timed(seconds):
            compute_dtype = getattr(torch, self.settings.compute_dtype)
            self.model = build_model(
                self.settings.shape, self.device, compute_dtype=compute_dtype, seed=self.settings.seed
            )
        self.result["build_seconds"] = seconds[0]
        if self.settings.export:
            self._prepare()
            self._measure_export()
            return
        predicted = [self._predict(tokens) for tokens in self.settings.tokens] if self.settings.predict else []
        self._measure_preparing()
        if self.settings.step:
            self._prepare()
            adapted = self._adapt().train()
            self.result["steps"] = [self._measure_step(adapted, tokens, baseline) for tokens in self.settings.tokens]
            for step, prediction in zip(self.result["steps"], predicted, strict=False):
                step["predicted"] = prediction.to_dict()

    def _measure_export(self) -> None:
        """Export, in turn with the library's way to write the same bytes, which has them at hand, and with merging."""
        assert self._wrapper is not None
        adapted = self._adapt() if self.name == MERGED else None
        host = MemoryMeter(torch.device("cpu"))
        exported, saved = self.folder / "exported", self.folder / "saved.safetensors"
        save: tuple[list[float], list[float]] = ([], [])
        export: tuple[list[float], list[float]] = ([], [])
        merge: tuple[list[float], list[float]] = ([], [])
        peaks: list[int] = []
        tensors: dict[str, torch.Tensor] = {}
        for _ in range(1 + self.settings.repeats):
            _settle_disk()
            host.start()
            with self.meter.timed(*export):
                report = self._wrapper.export(
                    exported, merge_adapters=adapted is not None, model=adapted, max_shard_size=_NO_SHARDS
                )
            peaks.append(host.peak())
            (file,) = exported.glob("*.safetensors")
            tensors = tensors or {name: tensor.clone() for name, tensor in load_file(file).items()}
            _settle_disk()
            with self.meter.timed(*save):
                save_file(tensors, saved, metadata={"format": "pt"})
            if adapted is not None:
                _settle_disk()
                with self.meter.timed(*merge):
                    _merge(adapted)
            is_identical = filecmp.cmp(file, saved, shallow=False)
            shutil.rmtree(exported)
            saved.unlink()
        timings = {"export": export, "save": save, "merge": merge}
        self.result |= {
            # The first also sets things up.
            **{f"{name}_seconds": wall[1:] for name, (wall, _) in timings.items()},
            **{f"{name}_cpu_seconds": cpu[1:] for name, (_, cpu) in timings.items()},
            "export_peak_bytes": min(peaks),
            "export_bytes": report.num_bytes,
            "largest_bytes": max(tensor.nbytes for tensor in tensors.values()),
            "is_identical": is_identical,
        }

    def _measure_preparing(self) -> None:
        prepare: list[float] = []
        restore: list[float] = []
        peaks: list[int] = []
        loaded_bytes = live_bytes(self.model, _is_base)
        memory_runs = _MEMORY_RUNS if self.settings.repeats else 0
        for run in range(memory_runs + self.settings.repeats):
            measures_memory = run < memory_runs
            undo = _undo_of_peft(self.model) if self.name in (PEFT, PEFT_UNCLEARED) else None
            gc.collect()  # garbage of the previous run must not cost time in this one
            if measures_memory:
                self.meter.start()
            before = self.meter.allocator()
            with self.meter.timed(prepare):
                self._prepare()
            after = self.meter.allocator()
            if measures_memory:
                peaks.append(self.meter.peak())
            adapted = None
            if self.name == Precision.ADAPTED.value:
                adapted = self._adapt()
                prepare[-1] += self.result["adopt_seconds"]
            if run == 0:
                self.result["added_bytes"] = live_bytes(self.model, _is_base) - loaded_bytes
                self.result["allocator"] = None if after is None else {"before": before, "after": after}
            if adapted is not None:
                adapted.unload()
            if undo is not None:
                undo()
            else:
                assert self._wrapper is not None
                with self.meter.timed(restore):
                    self._wrapper.restore()
        left = live_bytes(self.model, _is_base) - loaded_bytes
        self.result |= {
            "prepare_seconds": prepare[memory_runs:],
            "restore_seconds": restore[memory_runs:],
            "left_bytes": left,
        }
        if peaks:
            # The first also pages in the code that runs, which counts in a resident set.
            self.result["transient_peak_bytes"] = min(peaks)

    def _prepare(self) -> None:
        checkpointing = {"use_reentrant": self.settings.reentrant}
        if self.name in (PEFT, PEFT_UNCLEARED):
            # Versions that do not take it never clear the cache.
            takes_it = "auto_clear_cache" in inspect.signature(prepare_model_for_kbit_training).parameters
            cache = {"auto_clear_cache": False} if takes_it and self.name == PEFT_UNCLEARED else {}
            prepare_model_for_kbit_training(self.model, gradient_checkpointing_kwargs=checkpointing, **cache)
            return
        self._wrapper = KbitPreparedModel(self.model, **self._fields()).prepare()

    def _fields(self) -> dict[str, Any]:
        """The settings of the preparation."""
        fields: dict[str, Any] = {
            "precision": {CHUNKED: "compute", MERGED: "norms", PEFT_UNCLEARED: PEFT}.get(self.name, self.name),
            "gradient_checkpointing_kwargs": {"use_reentrant": self.settings.reentrant},
        }
        if self.name == CHUNKED:
            fields["head_chunk_bytes"] = self.settings.head_chunk_bytes
        return fields

    def _predict(self, tokens: int) -> StepMemory:
        """The memory of a step, before there is one."""
        ids = self._tokens(tokens)
        return predict_step(
            self.model,
            batch_size=1,
            seq_len=tokens,
            inputs={"input_ids": ids, "labels": ids},
            lora=self._lora(),
            optimizer=None,
            autocast=torch.bfloat16 if self.settings.autocast else None,
            kernels="cuda" if self.device.type == "cuda" else "cpu",
            **self._fields(),
        )

    def _tokens(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.settings.seed)
        return torch.randint(self.settings.shape.vocab_size, (1, number), generator=generator)

    def _lora(self) -> LoraConfig:
        num_layers = self.settings.shape.num_layers
        layers = None
        if not self.settings.step and not self.settings.export:
            layers = list(range(max(0, num_layers - _ADAPTED_LAYERS), num_layers))
        return LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules=list(LINEARS),
            layers_to_transform=layers,
            init_lora_weights=False,  # both factors random: otherwise the gradient of the first is zero
            modules_to_save=["lm_head"] if self.settings.step and self.settings.modules_to_save else None,
        )

    def _adapt(self) -> PeftModel:
        """Put a LoRA on the prepared model."""
        torch.manual_seed(self.settings.seed)
        adapted = get_peft_model(self.model, self._lora())
        if self._wrapper is not None:
            seconds: list[float] = []
            with self.meter.timed(seconds):
                self._wrapper.adopt(adapted)
            self.result["adopt_seconds"] = seconds[0]
        return adapted

    def _measure_step(self, model: PeftModel, tokens: int, baseline: int) -> dict[str, Any]:
        """The cost of a step, and its numbers; ``None`` for figures that the device has too little memory for."""
        settings = self.settings
        ids = self._tokens(tokens).to(self.device)

        def step() -> torch.Tensor:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=settings.autocast):
                loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            return loss.detach()

        def costs() -> dict[str, Any]:
            # The first step also pays for what is set up once.
            self.meter.start()
            step()
            system_peak = self.meter.system_peak() - baseline
            seconds: list[float] = []
            for _ in range(settings.repeats):
                model.zero_grad(set_to_none=True)
                with self.meter.timed(seconds):
                    step()
            model.zero_grad(set_to_none=True)
            peak = self.meter.tensor_peak(lambda: stored_bytes(model), step)
            found = {"system_peak_bytes": system_peak, "seconds": seconds, "peak_bytes": peak}
            if settings.predict:
                model.zero_grad(set_to_none=True)
                with StepTracker(model, inputs=[ids]) as tracker:
                    step()
                found["tracked_bytes"] = tracker.peak_bytes
            return found

        def numbers() -> dict[str, Any]:
            with _deterministic(self.device):
                loss = step().item()
            return {"loss": loss, **self._compare(model, tokens)}

        result: dict[str, Any] = {"tokens": tokens}
        for measure, figures in ((costs, _COSTS), (numbers, _NUMBERS)) if settings.repeats else ((numbers, _NUMBERS),):
            try:
                result |= measure()
            except torch.OutOfMemoryError:
                result |= dict.fromkeys(figures)
            model.zero_grad(set_to_none=True)
        return result

    def _compare(self, model: nn.Module, tokens: int) -> dict[str, Any]:
        gradients = {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}
        path = self.folder / f"gradients-{tokens}.pt"
        if self.name == PEFT:
            torch.save(gradients, path)
        if not path.exists():
            return {"num_gradients": len(gradients)}
        expected = torch.load(path, mmap=True)
        if expected.keys() != gradients.keys():
            raise RuntimeError(f"other parameters have a gradient: {sorted(expected.keys() ^ gradients.keys())[:3]}")
        return {
            "num_gradients": len(gradients),
            "largest_gradient": max(float(g.abs().max()) for g in expected.values()),
            "largest_gradient_difference": max(
                float((gradients[name].double() - g.double()).abs().max()) for name, g in expected.items()
            ),
        }


@torch.no_grad()
def _merge(adapted: PeftModel) -> None:
    """Compute each merged weight by what it takes and nothing else, and drop it."""
    layers: list[Any] = [module for module in adapted.modules() if "lora_A" in module._modules]
    for layer in layers:
        weight = layer.get_base_layer().weight
        merged = dequantize_4bit(weight.data, weight.quant_state).float()
        merged += layer.get_delta_weight("default")
        merged.to(weight.quant_state.dtype)


def _settle_disk() -> None:
    """Wait until earlier writes are on the disk, so that they do not slow this one."""
    if hasattr(os, "sync"):
        os.sync()


def _is_base(name: str) -> bool:
    return "lora_" not in name and "modules_to_save" not in name


def _undo_of_peft(model: PreTrainedModel) -> Callable[[], None]:
    """A call that puts the model back so that PEFT's function, which nothing undoes, can be timed once more."""
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
def _deterministic(device: torch.device) -> Iterator[None]:
    """Where numbers are compared bit for bit, the same operations must give the same: not all of CUDA's kernels do.

    Those that only warn, as torch's fused attention does, are left out: attention is computed by its formula.
    """
    attention = sdpa_kernel(SDPBackend.MATH) if device.type == "cuda" else contextlib.nullcontext()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with attention:
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of libraries, about themselves or about what the benchmark does on purpose."""
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
