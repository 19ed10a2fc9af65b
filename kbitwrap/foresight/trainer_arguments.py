"""The arguments that a trainer gets: which trainer that is, and what a step of it takes from them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from typing import Any

from ..errors import ConfigError
from .optimizer_names import refuse_unpredicted

# Settings that a step does not depend on, and that would write, print, or ask for a
# device that is not there.
_QUIET: dict[str, Any] = {
    "report_to": [],
    "logging_strategy": "no",
    "logging_first_step": False,
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_start": False,
    "do_eval": False,
    "load_best_model_at_end": False,
    "push_to_hub": False,
    "disable_tqdm": True,
    "log_level": "error",
    "use_cpu": True,
    "dataloader_num_workers": 0,
    "dataloader_pin_memory": False,
    "dataloader_persistent_workers": False,
    "dataloader_prefetch_factor": None,
    "auto_find_batch_size": False,
    "resume_from_checkpoint": None,
    "full_determinism": False,
    "enable_jit_checkpoint": False,
    "skip_memory_metrics": True,
    "max_steps": 1,
    "warmup_steps": 0,
    "dataset_num_proc": None,
    "log_completions": False,
    "use_vllm": False,
}
# Settings that are refused, and why.
_REFUSED = {
    "deepspeed": "what DeepSpeed holds is not predicted",
    "fsdp": "shards are predicted for engine='fsdp2', and not from args",
    "torch_compile": "what a compiled model holds is not predicted",
    "use_liger_kernel": "what Liger's kernels hold is not predicted",
}


def trainer_class(args: Any) -> Any:
    """Return the class of the trainer that takes an arguments object.

    It is ``XTrainer`` of the module beside the one of ``XConfig``, and transformers'
    own for ``TrainingArguments``; for a derived class, that of the nearest.

    Args:
        args: The arguments object.

    Returns:
        The class.

    Raises:
        ConfigError: No library has a trainer for it.
    """
    for cls in type(args).__mro__:
        if cls.__name__ == "TrainingArguments":
            return importlib.import_module("transformers").Trainer
        name = cls.__name__.removesuffix("Config") + "Trainer"
        module = cls.__module__.removesuffix("_config") + "_trainer"
        if name == cls.__name__ + "Trainer" or cls.__module__ not in sys.modules:
            continue
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ConfigError(
        "args: expected transformers' TrainingArguments or a config of TRL such as SFTConfig, "
        f"found a {type(args).__name__}"
    )


def quiet_copy(args: Any, on_cuda: bool) -> Any:
    """Copy the arguments of a trainer for a step that does not log, save, evaluate or report, and has no device.

    Raises:
        ConfigError: They ask for what is not predicted.
    """
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            raise ConfigError(f"args.{name}: {reason}: leave it out")
    loading = getattr(args, "model_init_kwargs", None) or {}
    attention = str(loading.get("attn_implementation", ""))
    if "/" in attention or loading.get("use_kernels"):
        raise ConfigError(
            "args.model_init_kwargs: what kernels of the hub hold is not known: leave out "
            "use_kernels, and an attn_implementation of the hub"
        )
    checkpointing = getattr(args, "activation_checkpointing_kwargs", None) or {}
    is_offloaded = getattr(args, "activation_offloading", False)
    if on_cuda and (is_offloaded or checkpointing.get("offload")):
        raise ConfigError(
            "args.activation_offloading: what stays on a CUDA device with it is not "
            "predicted: leave it out for the most that the step holds"
        )
    refuse_unpredicted(str(getattr(args.optim, "value", args.optim)))
    copied = copy.copy(args)
    fields = vars(copied)
    if copied.fp16:  # which no accelerator takes on a CPU
        fields.update({"fp16": False, "bf16": True})
    for name, value in fields.items():
        if isinstance(value, (dict, list)):
            fields[name] = copy.deepcopy(value)
    for name, value in _QUIET.items():
        if hasattr(copied, name):
            fields[name] = value
    for name in [name for name in fields if name.endswith("_setup_devices")]:
        del fields[name]  # a cached device
    return copied


def check_alone(args: Any, optimizer: Any, autocast: Any, inputs: Any) -> None:
    """Refuse settings of ``predict_step`` that the arguments of a trainer say already.

    Raises:
        ConfigError: One was given.
    """
    own = str(getattr(args.optim, "value", args.optim))
    if optimizer not in ("adamw_torch", own):
        raise ConfigError(f"optimizer: it is args.optim, {own!r}: leave it out")
    if autocast is not None:
        raise ConfigError(
            "autocast: it is what args say of bf16 and fp16: leave it out"
        )
    if inputs is not None:
        raise ConfigError(
            "inputs: the batch is the one that the trainer's collator makes: leave them out"
        )


def checkpointing_of(args: Any) -> dict[str, Any]:
    """Return the fields of ``PrepareConfig`` that say of checkpointing what the arguments say."""
    fields = {}
    for name in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        # transformers 5.23 reads the new name, and drops the old one in 6.
        new_name = name.replace("gradient", "activation")
        value = getattr(args, new_name, getattr(args, name, None))
        if value is not None:
            fields[name] = value
    return fields


PROMPT = 512
"""Tokens of a prompt, where no argument says it."""


def batch_of(args: Any, batch_size: int | None, seq_len: int | None) -> tuple[int, int]:
    """Return the sequences in a batch of one micro-step and the tokens in each: those given, or else of the arguments.

    Raises:
        ConfigError: The arguments say no length, and none is given.
    """
    if batch_size is None:
        batch_size = args.per_device_train_batch_size
    if seq_len is None:
        seq_len = getattr(args, "max_length", None)
    completion = getattr(args, "max_completion_length", None)
    if seq_len is None and completion is not None:
        seq_len = PROMPT + completion
    if seq_len is None:
        raise ConfigError(f"seq_len: {type(args).__name__} says no length: give one")
    return batch_size, seq_len
