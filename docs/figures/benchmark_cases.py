"""Measures one way to prepare a model, PEFT's or a precision: what preparing, a training step or an export takes."""

from __future__ import annotations

import filecmp
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file, save_file

from drawn import LINEARS, MISTRAL, build_model
from kbitwrap import KbitPreparedModel
from kbitwrap.cli.console import quiet_libraries
from measuring import clock, held_bytes, reset_resident_peak, resident, resident_peak, summary, tensor_peak

PEFT = "peft"
CHUNKED = "compute-chunked"  # "compute" with `head_chunk_bytes`
MERGED = "merged"  # "norms", with a LoRA on every linear layer that an export merges
PRECISIONS = {CHUNKED: "compute", MERGED: "norms"}  # of the cases that are not named after theirs
HEAD_CHUNK_BYTES = 8 << 20
RANK = 16
MEMORY_RUNS = 4  # the first also pages in the code that runs, which counts in a resident set


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        cases: The ways to prepare.
        shape: The fields of the model's config.
        tokens: Tokens in the batch of a training step, which is taken for each number; none is taken without.
        repeats: How often each timing is taken; with 0 only loss and gradients of a step are computed.
        autocast: Take the steps under bfloat16 autocast.
        reentrant: Checkpoint activations in the reentrant way.
        modules_to_save: Train a copy of the output head beside the LoRA.
    """

    cases: tuple[str, ...]
    shape: dict[str, Any] = field(default_factory=lambda: MISTRAL)
    tokens: tuple[int, ...] = ()
    repeats: int = 3
    autocast: bool = False
    reentrant: bool = False
    modules_to_save: bool = False


class Case:
    """A model that is prepared in one way, and undone, as often as it is measured."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.model = build_model(settings.shape, compute_dtype=torch.float32)
        self.base = [*self.model.parameters(), *self.model.buffers()]  # the same objects while it is prepared
        self.prepared: KbitPreparedModel | None = None

    def prepare(self) -> None:
        """Prepare the model."""
        checkpointing = {"use_reentrant": self.settings.reentrant}
        if self.name == PEFT:
            self._dtypes = [parameter.dtype for parameter in self.model.parameters()]
            prepare_model_for_kbit_training(self.model, gradient_checkpointing_kwargs=checkpointing)
            return
        self.prepared = KbitPreparedModel(
            self.model,
            precision=PRECISIONS.get(self.name, self.name),
            gradient_checkpointing_kwargs=checkpointing,
            head_chunk_bytes=HEAD_CHUNK_BYTES if self.name == CHUNKED else None,
        ).prepare()

    def undo(self) -> None:
        """Restore the model; after PEFT's function, which nothing undoes, what decides the time of the next call."""
        if self.prepared is not None:
            self.prepared.restore()
            return
        for parameter, dtype in zip(self.model.parameters(), self._dtypes, strict=True):
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(dtype.is_floating_point)
        self.model.gradient_checkpointing_disable()
        self.model.get_input_embeddings()._forward_hooks.clear()

    def adapt(self) -> tuple[Any, float]:
        """Put a LoRA on the prepared model; both factors are random: else the gradient of the first is zero.

        Returns:
            The model with it, and the seconds of telling the preparation of it. Where no step is taken, the LoRA is on
            the last two layers.
        """
        torch.manual_seed(0)
        num_layers = self.settings.shape["num_hidden_layers"]
        is_trained = self.settings.tokens or self.name == MERGED
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=list(LINEARS),
            layers_to_transform=None if is_trained else list(range(num_layers))[-2:],
            init_lora_weights=False,
            modules_to_save=["lm_head"] if self.settings.modules_to_save else None,
        )
        adapted: Any = get_peft_model(self.model, config)
        prepared = self.prepared
        seconds = clock(lambda: prepared.adopt(adapted)).seconds if prepared is not None else 0.0
        return adapted, seconds


def measure(name: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Measure preparing and training steps of one case; memory and seconds are right in a fresh process alone.

    Args:
        name: The case.
        settings: What to measure of it.
        folder: Where PEFT's loss and gradients are kept, with which those of the other cases are compared.

    Returns:
        The figures, ready for JSON.
    """
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_libraries = resident()
        case = Case(name, settings)
        figures = {"case": name, **(_preparing(case) if settings.repeats else {})}
        if settings.tokens:
            case.prepare()
            adapted = case.adapt()[0].train()
            figures["steps"] = [
                _step(name, adapted, number, settings, of_libraries, folder) for number in settings.tokens
            ]
    return figures


def _preparing(case: Case) -> dict[str, Any]:
    """What preparing and restoring take."""
    loaded = held_bytes(case.base)
    peaks, added, prepare, restore = [], 0, [], []
    for _ in range(MEMORY_RUNS):
        peaks.append(resident_peak(case.prepare))
        if case.name == "adapted":  # which prepares the adapted blocks alone
            case.adapt()[0].unload()
        added = held_bytes(case.base) - loaded
        case.undo()
    for _ in range(case.settings.repeats):
        seconds = clock(case.prepare).seconds
        if case.name == "adapted":
            adapted, adopting = case.adapt()
            adapted.unload()
            seconds += adopting
        prepare.append(seconds)
        restore.append(clock(case.undo).seconds)
    return {
        "added_bytes": added,
        "transient_peak_bytes": min(peaks),
        "prepare_seconds": summary(prepare),
        "restore_seconds": None if case.prepared is None else summary(restore),
    }


def _step(name: str, model: Any, tokens: int, settings: Settings, of_libraries: int, folder: Path) -> dict[str, Any]:
    """What a training step takes, and its numbers."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(settings.shape["vocab_size"], (1, tokens), generator=generator)

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.autocast):
            loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def measured(measure: Callable[..., Any]) -> Any:
        found = measure(step)
        model.zero_grad(set_to_none=True)
        return found

    figures: dict[str, Any] = {"tokens": tokens}
    if settings.repeats:
        reset_resident_peak()
        measured(clock)  # the first sets things up
        figures["system_peak_bytes"] = resident("VmHWM") - of_libraries
        figures["seconds"] = summary([measured(clock).seconds for _ in range(settings.repeats)])
        held = held_bytes(model.state_dict().values())
        figures["peak_bytes"] = held + measured(tensor_peak)
    loss = step().item()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad(set_to_none=True)
    return {**figures, **_compared(loss, gradients, folder / f"peft-{tokens}.pt", is_peft=name == PEFT)}


def _compared(loss: float, gradients: dict[str, torch.Tensor], pefts: Path, *, is_peft: bool) -> dict[str, Any]:
    """A step's numbers, and their distances from PEFT's, which are in a file."""
    if is_peft:
        torch.save((loss, gradients), pefts)
    expected_loss, expected = torch.load(pefts)
    if expected.keys() != gradients.keys():
        raise RuntimeError(f"other parameters have a gradient: {sorted(expected.keys() ^ gradients.keys())[:3]}")
    distances = [(gradients[name].double() - one.double()).abs().max().item() for name, one in expected.items()]
    return {
        "loss": loss,
        "num_gradients": len(gradients),
        "loss_difference": abs(loss - expected_loss),
        "largest_gradient_difference": max(distances),
    }


def measure_export(name: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Export a prepared model, in turn with safetensors' `save_file` of the same bytes, and with merging alone.

    Args:
        name: The case; `MERGED` has the export merge a LoRA.
        settings: What to measure of it.
        folder: Where files are written, and deleted again.

    Returns:
        The figures, ready for JSON.
    """
    exported, saved = folder / "exported", folder / "saved.safetensors"
    seconds, peaks, figures = defaultdict(list), [], {}
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = Case(name, settings)
        case.prepare()
        adapted = case.adapt()[0] if name == MERGED else None

        def timed(part: str, call: Callable[[], Any]) -> None:
            os.sync()  # earlier writes do not slow this one
            seconds[part].append(clock(call))

        def export() -> None:
            case.prepared.export(  # type: ignore[union-attr]
                exported, merge_adapters=adapted is not None, model=adapted, max_shard_size="1TB"
            )

        for _ in range(1 + settings.repeats):
            peaks.append(resident_peak(lambda: timed("export", export)))
            (file,) = exported.glob("*.safetensors")
            # copies: reading a file again would be timed as writing
            tensors = {fqn: tensor.clone() for fqn, tensor in load_file(file).items()}
            timed("save", lambda tensors=tensors: save_file(tensors, saved, metadata={"format": "pt"}))
            if adapted is not None:
                timed("merge", lambda: _merge_weights(adapted))
            sizes = [tensor.nbytes for tensor in tensors.values()]
            is_identical = filecmp.cmp(file, saved, shallow=False)
            figures = {"export_bytes": sum(sizes), "largest_bytes": max(sizes), "is_identical": is_identical}
            shutil.rmtree(exported)
            saved.unlink()
    for part, taken in seconds.items():  # the first round sets things up
        figures[f"{part}_seconds"] = summary([one.seconds for one in taken[1:]])
        figures[f"{part}_cpu_seconds"] = summary([one.cpu_seconds for one in taken[1:]])
    return {"case": name, "export_peak_bytes": min(peaks), **figures}


@torch.no_grad()
def _merge_weights(adapted: Any) -> None:
    """Compute each merged weight by what it takes and nothing else, and drop it."""
    for layer in adapted.modules():
        if "lora_A" in layer._modules:
            weight = layer.get_base_layer().weight
            merged = dequantize_4bit(weight.data, weight.quant_state).float()
            merged += layer.get_delta_weight("default")
            merged.to(weight.quant_state.dtype)
