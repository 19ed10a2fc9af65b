"""The trainers whose steps are planned by name, and their arguments: their own defaults, and what was asked for."""

from __future__ import annotations

import importlib
from typing import Any

from .console import InputError, expect_installed, first_line

_CONFIGS = {
    "sft": ("trl", "SFTConfig"),
    "dpo": ("trl", "DPOConfig"),
    "grpo": ("trl", "GRPOConfig"),
    "reward": ("trl", "RewardConfig"),
    "trainer": ("transformers", "TrainingArguments"),
}
TRAINERS = tuple(_CONFIGS)
"""The trainers by the words for them."""


def called(trainer: str) -> str:
    """The name of a trainer, for people.

    Args:
        trainer: One of ``TRAINERS``.
    """
    library, config = _CONFIGS[trainer]
    if library == "transformers":
        return "transformers' Trainer"
    return f"TRL's {config.removesuffix('Config')}Trainer"


def adapters(trainer: str | None, rank: int) -> Any:
    """LoRA on every linear layer, for the kind of model that a trainer trains.

    Args:
        trainer: One of ``TRAINERS``, or ``None`` for a step without a trainer.
        rank: The rank.

    Returns:
        The config of PEFT.
    """
    from peft import LoraConfig

    task = "SEQ_CLS" if trainer == "reward" else None
    return LoraConfig(r=rank, target_modules="all-linear", task_type=task)


def arguments(
    trainer: str,
    *,
    optimizer: str | None,
    autocast: str | None,
    accumulate: int | None,
    has_liger: bool,
) -> Any:
    """Make the arguments of a trainer.

    Args:
        trainer: One of ``TRAINERS``.
        optimizer: A name of ``TrainingArguments.optim``; ``None`` for the default of
            the trainer, as for all that follow.
        autocast: The dtype of autocast.
        accumulate: Batches whose gradients are accumulated.
        has_liger: Whether it trains with Liger's kernels.

    Returns:
        The arguments.

    Raises:
        InputError: The library is not installed, or refuses a setting.
    """
    library, name = _CONFIGS[trainer]
    expect_installed(f"the step of {called(trainer)}", library)
    settings: dict[str, Any] = {
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
    if has_liger:
        settings["use_liger_kernel"] = True
    config = getattr(importlib.import_module(library), name)
    try:
        return config(**settings)
    except (ValueError, ImportError) as error:
        raise InputError(f"{called(trainer)}: {first_line(error)}") from error
