"""The trainers whose steps are planned by name, and their arguments: their own defaults, and what was asked for."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from .console import InputError, first_line

TrainerName = Literal["sft", "dpo", "grpo", "reward", "trainer"]
_CONFIGS = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "grpo": ("trl", "GRPOConfig"),
    "reward": ("trl", "RewardConfig"),
    "trainer": ("transformers", "TrainingArguments"),
}


def arguments(
    trainer: str,
    *,
    optimizer: str | None = None,
    autocast: str | None = None,
    accumulate: int | None = None,
) -> Any:
    """Make the arguments of a trainer.

    Args:
        trainer: A `TrainerName`.
        optimizer: A name of ``TrainingArguments.optim``; ``None`` for the default of
            the trainer, as for all that follow.
        autocast: The dtype of autocast.
        accumulate: Batches whose gradients are accumulated.

    Returns:
        The arguments.

    Raises:
        InputError: The library is not installed, or refuses a setting.
    """
    settings = {
        "output_dir": "unused",
        "use_cpu": True,  # no device is asked for; its kernels are followed all the same
        "report_to": "none",
    }
    if optimizer is not None:
        settings["optim"] = optimizer
    if autocast is not None:
        settings["bf16"] = autocast == "bfloat16"
        settings["fp16"] = autocast == "float16"
    if accumulate is not None:
        settings["gradient_accumulation_steps"] = accumulate
    library, name = _CONFIGS[trainer]
    try:
        return getattr(importlib.import_module(library), name)(**settings)
    except (ValueError, ImportError) as error:
        raise InputError(f"--trainer {trainer}: {first_line(error)}") from error
