"""Measures one case, in a process that does nothing else: ``python -m kbitwrap.bench.case REQUEST RESULT``.

The request and the result are JSON files. PEFT's gradients are left in a file beside
them, which the other cases compare theirs with.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import PreTrainedModel

from .. import KbitPreparedModel, Precision, StepMemory, predict_step
from .exports import ExportMeasurement
from .memory import MemoryMeter, Timings, live_bytes
from .models import LINEARS, build_model
from .settings import CHUNKED, MERGED, PEFT, PEFT_UNCLEARED, Figures, Settings
from .steps import StepMeasurement

# Where only preparing is measured, the adapter that "adapted" is told of sits on this
# many layers, the last ones.
_ADAPTED_LAYERS = 2
# Memory is measured first: what is freed for a clean start has to be got again, which
# takes time.
_MEMORY_RUNS = 4
_RANK = 16
# The precisions of the cases that are not named after theirs.
_PRECISIONS = {PEFT_UNCLEARED: PEFT, CHUNKED: "compute", MERGED: "norms"}


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
        self.result: Figures = {"case": name, "memory_method": self.meter.method}
        self._is_peft = name in (PEFT, PEFT_UNCLEARED)
        self._wrapper: KbitPreparedModel | None = None

    def run(self) -> Figures:
        """Build the model and measure.

        Returns:
            The figures.
        """
        with _quiet():
            self._measure()
        return self.result

    def _measure(self) -> None:
        self.meter.start()
        # what the libraries hold: no part of a training step's figure
        baseline = self.meter.system_held()
        self._build()
        if self.settings.export:
            self._measure_export()
            return
        predictions = []
        if self.settings.predict:
            predictions = [self._predict(number) for number in self.settings.tokens]
        self._measure_preparing()
        if self.settings.step:
            self._measure_steps(baseline, predictions)

    def _build(self) -> None:
        timings = Timings()
        compute_dtype = getattr(torch, self.settings.compute_dtype)
        with self.meter.timed(timings):
            self.model = build_model(
                self.settings.shape,
                self.device,
                compute_dtype=compute_dtype,
                seed=self.settings.seed,
            )
        self.result["build_seconds"] = timings.seconds[0]

    def _measure_export(self) -> None:
        wrapper = self._prepare_by_wrapper()
        adapted = self._adapt() if self.name == MERGED else None
        measurement = ExportMeasurement(
            wrapper,
            adapted,
            self.meter,
            self.folder,
        )
        self.result |= measurement.run(self.settings.repeats)

    def _measure_preparing(self) -> None:
        repeats = self.settings.repeats
        loaded_bytes = live_bytes(self.model, _is_base)
        if repeats:
            peaks = [self._measure_memory(loaded_bytes) for _ in range(_MEMORY_RUNS)]
            # The first also pages in the code that runs, which counts in a resident
            # set.
            self.result["transient_peak_bytes"] = min(peaks)
        prepare = Timings()
        restore = Timings()
        for _ in range(repeats):
            self._time(prepare, restore)
        self.result["prepare_seconds"] = prepare.seconds
        self.result["restore_seconds"] = restore.seconds
        self.result["left_bytes"] = live_bytes(self.model, _is_base) - loaded_bytes

    def _measure_memory(self, loaded_bytes: int) -> int:
        """Prepare once, and note the memory that it takes.

        Args:
            loaded_bytes: What the base held before.

        Returns:
            The most memory held meanwhile, above the start.
        """
        meter = self.meter
        with self._taken_back(Timings()):
            meter.start()
            before = meter.allocator()
            self._prepare()
            after = meter.allocator()
            peak = meter.peak()
            with self._told_of_adapter():
                added_bytes = live_bytes(self.model, _is_base) - loaded_bytes
        held = None if after is None else {"before": before, "after": after}
        self.result.setdefault("allocator", held)
        self.result["added_bytes"] = added_bytes
        return peak

    def _time(self, prepare: Timings, restore: Timings) -> None:
        """Time preparing and, under ``"adapted"``, adopting; and restoring, which PEFT's function has none of."""
        with self._taken_back(restore):
            with self.meter.timed(prepare):
                self._prepare()
            with self._told_of_adapter():
                prepare.seconds[-1] += self.result.get("adopt_seconds", 0)

    @contextlib.contextmanager
    def _taken_back(self, restore: Timings) -> Iterator[None]:
        """Take the preparation that is made inside back, so that another one can be measured."""
        undo_peft = _undo_of_peft(self.model) if self._is_peft else None
        gc.collect()  # garbage of the previous run must not cost time in this one
        yield
        if undo_peft is not None:
            undo_peft()
        if self._wrapper is not None:
            with self.meter.timed(restore):
                self._wrapper.restore()

    @contextlib.contextmanager
    def _told_of_adapter(self) -> Iterator[None]:
        """Under ``"adapted"``, which prepares the adapted blocks alone, have an adapter meanwhile."""
        if self.name != Precision.ADAPTED.value:
            yield
            return
        adapted = self._adapt()
        yield
        adapted.unload()

    def _measure_steps(self, baseline: int, predictions: list[StepMemory]) -> None:
        self._prepare()
        adapted = self._adapt().train()
        measurement = StepMeasurement(
            self.name, adapted, self.settings, self.meter, baseline, self.folder
        )
        steps = [
            measurement.measure(self._tokens(number)) for number in self.settings.tokens
        ]
        self.result["steps"] = steps
        # Without --predict there are none.
        for step, prediction in zip(steps, predictions, strict=False):
            step["predicted"] = prediction.to_dict()

    def _prepare(self) -> None:
        if self._is_peft:
            self._prepare_by_peft()
        else:
            self._prepare_by_wrapper()

    def _prepare_by_peft(self) -> None:
        options: Figures = {
            "gradient_checkpointing_kwargs": {"use_reentrant": self.settings.reentrant}
        }
        # Versions that do not take it never clear the cache.
        takes_it = (
            "auto_clear_cache"
            in inspect.signature(prepare_model_for_kbit_training).parameters
        )
        if takes_it and self.name == PEFT_UNCLEARED:
            options["auto_clear_cache"] = False
        prepare_model_for_kbit_training(self.model, **options)

    def _prepare_by_wrapper(self) -> KbitPreparedModel:
        self._wrapper = KbitPreparedModel(self.model, **self._fields()).prepare()
        return self._wrapper

    def _fields(self) -> Figures:
        """The settings of the preparation."""
        fields: Figures = {
            "precision": _PRECISIONS.get(self.name, self.name),
            "gradient_checkpointing_kwargs": {"use_reentrant": self.settings.reentrant},
        }
        if self.name == CHUNKED:
            fields["head_chunk_bytes"] = self.settings.head_chunk_bytes
        return fields

    def _predict(self, num_tokens: int) -> StepMemory:
        """The memory of a step, before there is one."""
        ids = self._tokens(num_tokens)
        return predict_step(
            self.model,
            batch_size=1,
            seq_len=num_tokens,
            inputs={"input_ids": ids, "labels": ids},
            lora=self._lora(),
            optimizer=None,
            autocast=torch.bfloat16 if self.settings.autocast else None,
            kernels="cuda" if self.device.type == "cuda" else "cpu",
            **self._fields(),
        )

    def _tokens(self, number: int) -> torch.Tensor:
        """A batch of one row, ``(1, number)``, int64, on the host."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        return torch.randint(
            self.settings.shape.vocab_size, (1, number), generator=generator
        )

    def _lora(self) -> LoraConfig:
        settings = self.settings
        layers = None
        if not settings.step and not settings.export:
            num_layers = settings.shape.num_layers
            layers = list(range(num_layers))[-_ADAPTED_LAYERS:]
        return LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules=list(LINEARS),
            layers_to_transform=layers,
            # both factors random: otherwise the gradient of the first is zero
            init_lora_weights=False,
            modules_to_save=["lm_head"]
            if settings.step and settings.modules_to_save
            else None,
        )

    def _adapt(self) -> PeftModel:
        """Put a LoRA on the prepared model."""
        torch.manual_seed(self.settings.seed)
        adapted = get_peft_model(self.model, self._lora())
        if self._wrapper is not None:
            timings = Timings()
            with self.meter.timed(timings):
                self._wrapper.adopt(adapted)
            self.result["adopt_seconds"] = timings.seconds[0]
        return adapted


def _is_base(name: str) -> bool:
    return "lora_" not in name and "modules_to_save" not in name


def _undo_of_peft(model: PreTrainedModel) -> Callable[[], None]:
    """A call that puts the model back so that PEFT's function, which nothing undoes, can be timed once more."""
    states = [
        (parameter, parameter.dtype, parameter.requires_grad)
        for parameter in model.parameters()
    ]
    hooks = {id(module): set(module._forward_hooks) for module in model.modules()}

    def undo() -> None:
        for parameter, dtype, requires_grad in states:
            if parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(requires_grad)
        model.gradient_checkpointing_disable()
        for module in model.modules():
            added = set(module._forward_hooks) - hooks[id(module)]
            for key in added:
                del module._forward_hooks[key]

    return undo


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
        result_path: Where to write the figures, as JSON. PEFT's gradients are kept in
            the same folder.
    """
    request = json.loads(Path(request_path).read_text())
    settings = Settings.from_dict(request["settings"])
    result = Path(result_path)
    case = Case(
        request["case"],
        settings,
        result.parent,
    )
    result.write_text(json.dumps(case.run()))


if __name__ == "__main__":
    main(*sys.argv[1:])
