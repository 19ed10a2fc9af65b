"""Runs of transformers' Trainer on a small llama, told apart bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from kbitwrap import KbitPreparedModel, ManifestMismatchError
from kbitwrap.integrations import KbitTrainerCallback
from support import zoo
from support.snapshot import tensor_digest

NUM_STEPS = 3
NAME = "kbitwrap.json"
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


class RecordingTrainer(Trainer):
    """Keeps each step's loss as it is: the log's is rounded to four digits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class CallAtStepEnd(TrainerCallback):
    def __init__(self, call: Callable[[nn.Module], object]) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.call(model)


def load_base(quant: str | None = "nf4", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A llama of one layer: a training goes through a second one as through the first."""
    return zoo.load("llama", quant, dtype, num_hidden_layers=1)


def dataset(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    batches = [zoo.inputs("llama", model, seed=seed) for seed in range(NUM_STEPS)]
    return [{name: tensor[row] for name, tensor in batch.items()} for batch in batches for row in (0, 1)]


def prompt(model: nn.Module) -> dict[str, torch.Tensor]:
    # One row without padding: generation wants padding on the left.
    batch = zoo.inputs("llama", model, seed=100)
    return {name: batch[name][:1, :6] for name in ("input_ids", "attention_mask")}


def adapt(model: nn.Module, **kwargs: Any) -> peft.PeftModel:
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "lora_dropout": 0.1}
    return peft.get_peft_model(model, zoo.lora_config("llama", **options | kwargs))


def trainer_for(
    model: nn.Module,
    folder: Path,
    *,
    at_step_end: Callable[[nn.Module], object] = lambda model: None,
    callbacks: Sequence[TrainerCallback] = (),
    cls: type[RecordingTrainer] = RecordingTrainer,
    eval_dataset: Any = None,
    **kwargs: Any,
) -> RecordingTrainer:
    settings: dict[str, Any] = {
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "per_device_train_batch_size": 2,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
    }
    args = TrainingArguments(output_dir=str(folder), **settings | kwargs)
    every = [CallAtStepEnd(at_step_end), *callbacks]
    return cls(model=model, args=args, train_dataset=dataset(model), eval_dataset=eval_dataset, callbacks=every)


def trained_weights(model: nn.Module) -> dict[str, object]:
    """What an adapter holds, and what `modules_to_save` does."""
    kinds = ("lora_", "modules_to_save")
    return {fqn: tensor_digest(p) for fqn, p in model.named_parameters() if any(kind in fqn for kind in kinds)}


def save_run(model: nn.Module, folder: Path, **options: Any) -> RecordingTrainer:
    """Train with the callback that saves manifests, with two checkpoints and the adapter itself in the folder."""
    settings = {"save_strategy": "steps", "save_steps": 2, **options}
    trainer = trainer_for(model, folder, callbacks=[KbitTrainerCallback()], **settings)
    trainer.train()
    trainer.save_model(str(folder))
    return trainer


def prepare(precision: str = "norms", quant: str = "nf4", **fields: Any) -> KbitPreparedModel:
    return KbitPreparedModel(load_base(quant), precision=precision, **fields).prepare()


def trainer_with_callback(
    prepared: KbitPreparedModel, folder: Path, *, adapter: dict[str, Any] | None = None, **kwargs: Any
) -> RecordingTrainer:
    peft_model = adapt(prepared.model, **adapter or {})
    return trainer_for(peft_model, folder, callbacks=[KbitTrainerCallback(prepared)], **kwargs)


def resume(prepared: KbitPreparedModel | nn.Module, checkpoint: Path, folder: Path, **kwargs: Any) -> RecordingTrainer:
    model, wrapper = (prepared, None) if isinstance(prepared, nn.Module) else (prepared.model, prepared)
    trainer = trainer_for(adapt(model), folder, callbacks=[KbitTrainerCallback(wrapper)], **kwargs)
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except ManifestMismatchError:
        assert trainer.losses == []
        raise
    return trainer


def train(model: nn.Module, folder: Path, *, modules_to_save: bool = False, **kwargs: Any) -> RecordingTrainer:
    """Adapt a prepared model and train it."""
    trainer = trainer_for(adapt(model, modules_to_save=modules_to_save), folder, **kwargs)
    trainer.train()
    assert len(set(trainer.losses)) == NUM_STEPS
    return trainer


def train_prepared(folder: Path, precision: str, **kwargs: Any) -> RecordingTrainer:
    return train(KbitPreparedModel(load_base(), precision=precision).prepare().model, folder, **kwargs)


def outcome(trainer: RecordingTrainer) -> tuple[list[float], dict[str, object]]:
    """The losses of a training, and its weights."""
    return trainer.losses, trained_weights(trainer.model)
