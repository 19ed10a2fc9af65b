"""PEFT's way and ours on the same bits: what each costs, computes and leaves. Every figure is measured."""

from __future__ import annotations

import contextlib
import gc
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn

from .. import KbitPreparedModel, RestoreError, StepTracker, predict_step
from .base_state import BaseState
from .console import InputError, Result, first_line
from .loading import load_builtin, load_named, save_builtin, tokens_of
from .losses import batch, block_losses
from .text import Blocks, ByteTokens, Tokens, read_blocks
from .usage import BUILT_IN

PEFT = "peft"
_LENGTH = 65  # tokens in a block: 64 to predict
_NUM_HELD_OUT = 16
_RANK = 32


class Subject:
    """The model, the adapter and the text that all sides are measured on: with the same bits at each call.

    The built-in model has a random head, so that is trained beside its LoRA: PEFT
    copies it, which preparation has to cope with.

    Args:
        model: What ``from_pretrained`` takes, or ``None`` for the built-in model.
        quant: ``"nf4"`` or ``"int8"``.
        device: The device.
        seed: Seed of the weights, the adapter and the text.
        trust_remote_code: Run the code that the model brings along.
        folder: Where the built-in model is saved.

    Attributes:
        name: What to call the model.
        base: The folder of the built-in model; ``None`` of another.
        device: The device.
        quant: How it is quantized.
        tokens: Its tokens.
        learning_rate: The learning rate for a LoRA on it.
        modules_to_save: What to train beside the LoRA.
        blocks: The text, on the device.

    Raises:
        InputError: The model cannot be loaded, or its tokens are too few.
    """

    def __init__(
        self,
        model: str | None,
        quant: str,
        device: torch.device,
        seed: int,
        trust_remote_code: bool,
        folder: Path,
    ) -> None:
        self._model = model
        self.quant = quant
        self.device = device
        self._seed = seed
        self._trust_remote_code = trust_remote_code
        self.name = model or BUILT_IN
        self.base: Path | None = None
        self.learning_rate = 2e-4
        self.modules_to_save: list[str] | None = None
        if model is None:
            self.base = folder / "base"
            self.learning_rate = 1e-4
            self.modules_to_save = ["lm_head"]
            self.tokens: Tokens = ByteTokens()
            torch.manual_seed(seed)
            save_builtin(self.base)
        else:
            self.tokens = tokens_of(model, self.load(), trust_remote_code)
        blocks = read_blocks(
            self.tokens, length=_LENGTH, num_held_out=_NUM_HELD_OUT, seed=seed
        )
        self.blocks = Blocks(blocks.training.to(device), blocks.held_out.to(device))

    def load(self) -> Any:
        """Load the model."""
        torch.manual_seed(self._seed)
        if self.base is not None:
            return load_builtin(self.base, self.quant, self.device)
        assert self._model is not None
        return load_named(self._model, self.quant, self.device, self._trust_remote_code)

    def lora(self, modules_to_save: list[str] | None = None) -> LoraConfig:
        """The config of the adapter.

        Args:
            modules_to_save: What to train a copy of beside the LoRA.

        Returns:
            The config.
        """
        return LoraConfig(
            r=_RANK,
            lora_alpha=2 * _RANK,
            target_modules="all-linear",
            modules_to_save=modules_to_save,
            task_type="CAUSAL_LM",
        )

    def adapt(self, model: Any, modules_to_save: list[str] | None = None) -> PeftModel:
        """Put an adapter on it.

        Args:
            model: The loaded model.
            modules_to_save: What to train a copy of beside the LoRA.

        Returns:
            PEFT's wrapper.
        """
        torch.manual_seed(self._seed)
        try:
            adapted: Any = get_peft_model(model, self.lora(modules_to_save))
        except ValueError as error:
            raise InputError(
                f"PEFT cannot put a LoRA on {self.name}: {first_line(error)}"
            ) from error
        return adapted  # type: ignore[no-any-return]

    def inputs(self) -> dict[str, Tensor]:
        """The inputs of a training step, labels among them: each ``(batch_size, length)``, int64."""
        input_ids = batch(self.blocks, 0)[:, :-1].contiguous()
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def loss(self, model: nn.Module, step: int) -> Tensor:
        """The loss of a training step."""
        return block_losses(model, batch(self.blocks, step)).mean()


@dataclass
class Side:
    """One way to prepare.

    Attributes:
        name: A precision, or ``"peft"``.
        digest: Of the bits that it began with.
        added_bytes: What the parameters hold more while prepared.
        peak_bytes: The most that tensors held while preparing, above the start.
        predicted_bytes: The most that a training step takes, predicted before it.
        step_bytes: The same, measured.
        seconds: The time that preparing took.
        loss: Of the first step.
        gradients: Of the first step, by name.
        left: What differs once it is undone, or, with PEFT, once the adapter is
            unloaded: parameters of another dtype, modules with other hooks, parameters
            and modules with other flags.
        merged_bytes: The bytes of the model after ``merge_and_unload``; ``None`` where
            it was not merged.
    """

    name: str
    digest: str
    added_bytes: int
    peak_bytes: int
    predicted_bytes: int
    step_bytes: int
    seconds: float
    loss: float
    gradients: dict[str, Tensor]
    left: dict[str, int] = field(default_factory=dict)
    merged_bytes: int | None = None

    def distances(self, peft: Side) -> dict[str, float]:
        """The distances from PEFT's numbers: of the loss, and the largest of the gradients, relative to the largest.

        0 is bit for bit.
        """
        loss = abs(self.loss - peft.loss)
        if self.gradients.keys() != peft.gradients.keys():
            return {"loss": loss, "gradients": float("inf")}
        largest = max(_largest(gradient) for gradient in peft.gradients.values())
        farthest = 0.0
        for name, gradient in peft.gradients.items():
            difference = gradient.double() - self.gradients[name].double()
            farthest = max(farthest, _largest(difference))
        return {"loss": loss, "gradients": farthest / largest}

    def to_dict(self, peft: Side) -> Result:
        """The figures as plain values, ready for JSON, with the distances from PEFT's."""
        figures = {**vars(self), "difference_from_peft": self.distances(peft)}
        del figures["name"], figures["gradients"]
        return figures


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


def measure(name: str, subject: Subject) -> Side:
    """Prepare, take two steps, and put everything back.

    PEFT's function has no way back: only the adapter is unloaded.

    Args:
        name: A precision, or ``"peft"``.
        subject: What is measured.

    Returns:
        What was measured.
    """
    peak_bytes = _peak_bytes(name, subject.load())
    model = subject.load()
    predicted_bytes = _predicted_bytes(name, model, subject)
    base = BaseState.of(dict(model.named_modules()))
    prepared = None if name == PEFT else KbitPreparedModel(model, precision=name)
    started = time.perf_counter()
    if prepared is None:
        prepare_model_for_kbit_training(model)
    else:
        prepared.prepare()
    seconds = time.perf_counter() - started
    added_bytes = base.again().parameter_bytes - base.parameter_bytes
    adapted = subject.adapt(model)
    if prepared is not None:
        prepared.adopt(adapted)
    loss, gradients = _first_step(adapted, subject)
    step_bytes = _step_bytes(adapted, subject)
    adapted.unload()
    if prepared is not None:
        with contextlib.suppress(RestoreError):  # what is left is counted
            prepared.restore()
    return Side(
        name=name,
        digest=base.digest(),
        added_bytes=added_bytes,
        peak_bytes=peak_bytes,
        predicted_bytes=predicted_bytes,
        step_bytes=step_bytes,
        seconds=seconds,
        loss=loss,
        gradients=gradients,
        left=_left_behind(base),
    )


def _peak_bytes(name: str, model: nn.Module) -> int:
    """The most bytes that tensors hold while a model is prepared, above the start."""
    gc.collect()
    with StepTracker(model) as tracker:
        if name == PEFT:
            prepare_model_for_kbit_training(model)
        else:
            KbitPreparedModel(model, precision=name).prepare()
    return tracker.peak_bytes - tracker.static_bytes


def _predicted_bytes(name: str, model: nn.Module, subject: Subject) -> int:
    """The most bytes that a training step is predicted to take."""
    batch_size, length = subject.inputs()["input_ids"].shape
    kernels = "cpu" if subject.device.type == "cpu" else "cuda"
    step = predict_step(
        model,
        precision=name,
        batch_size=batch_size,
        seq_len=length,
        lora=subject.lora(),
        kernels=kernels,
    )
    return step.peak_bytes


def _step_bytes(model: PeftModel, subject: Subject) -> int:
    """The most bytes that a training step takes, the optimizer's state being there."""
    inputs = subject.inputs()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=subject.learning_rate)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with StepTracker(model, optimizer, inputs) as tracker:
        step()
    return tracker.peak_bytes


def _left_behind(base: BaseState) -> dict[str, int]:
    """Count what differs now from the state in which a model was loaded."""
    now = base.again()

    def count(aspect: str) -> int:
        return len(base.differences(now, aspect))

    flags = count("requires_grad") + count("attributes")
    return {"dtypes": count("dtypes"), "hooks": count("hooks"), "flags": flags}


def stored_bytes(model: nn.Module) -> int:
    """Sum the memory that a model's state holds, a quantized weight's scales included, shared memory once."""
    storages = {}
    for value in model.state_dict().values():
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def in_float32(model: Any) -> nn.Module:
    """Dequantize a model, and compute in float32 from then on.

    Args:
        model: The model of transformers; changed in place.

    Returns:
        It, in evaluation mode.
    """
    plain: nn.Module = model
    if getattr(model, "is_quantized", False):  # only quantized ones have it
        plain = model.dequantize()
    return plain.float().eval()


def _first_step(model: PeftModel, subject: Subject) -> tuple[float, dict[str, Tensor]]:
    model.train()
    loss = subject.loss(model, 0)
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.cpu()
            parameter.grad = None
    return loss.item(), gradients
