"""Integration with TRL's trainers that generate with vLLM, such as ``GRPOTrainer``."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from kbitwrap import (
    ExportError,
    LifecycleState,
    StateError,
    UnsupportedModelError,
    prepared_of,
)

from ..model.wrappers import is_sharded_tensor


def sync_merged_weights() -> Callable[[], None]:
    """Let TRL's trainers send vLLM the merged weights of a prepared model, and merge nothing in the model itself.

    For every weight sync, TRL merges the adapters into the quantized base and unmerges
    them, which rounds the base to its 4 or 8 bits twice and never returns to it. It
    also sends the quantized storage, without its statistics. From here on it sends what
    ``prepared.merged_weights()`` hands out: half weights, under the names of the
    checkpoint.

    Call it once, before the trainer is made; the engine in the trainer's process
    (``vllm_mode="colocate"``) then loads the model in half precision, not quantized. A
    server has to be started so: ``trl vllm-serve --model BASE``. This concerns all
    trainers that use ``trl.generation.vllm_generation``: GRPO, RLOO and distillation.

    Returns:
        A call that undoes it. A second call of this function changes nothing, and
            neither does its undo.

    Raises:
        StateError: When weights are sent: the trainer's model is not prepared.
        UnsupportedModelError: When weights are sent: the model is sharded, and each
            process has an engine of its own (``vllm_mode="colocate"``).
        ExportError: When weights are sent: the adapters took weights apart that the
            engine's model ties.

    Example:
        >>> from kbitwrap.integrations.trl import sync_merged_weights  # doctest: +SKIP
        >>> sync_merged_weights()  # doctest: +SKIP
        >>> with KbitPreparedModel(model) as prepared:  # doctest: +SKIP
        ...     GRPOTrainer(prepared.model, reward_funcs, args=args, peft_config=lora_config, ...).train()
    """
    from trl.generation.vllm_generation import VLLMGeneration

    original: Any = VLLMGeneration._init_vllm

    def init_vllm(self: Any) -> None:
        """Make the engine as TRL does for a model that is not quantized."""
        names = {**original.__globals__, "is_bitsandbytes_available": lambda: False}
        init = types.FunctionType(
            original.__code__, names, closure=original.__closure__
        )
        init(self)

    ours = {"_iter_named_params": _merged_weights, "_init_vllm": init_vllm}
    changes = contextlib.ExitStack()
    for name, method in ours.items():
        if getattr(VLLMGeneration, name).__module__ != __name__:
            changes.enter_context(mock.patch.object(VLLMGeneration, name, method))
    return changes.close  # a second call of which changes nothing


def _merged_weights(self: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the merged weights: the method in the place of the one that merges, reads and unmerges."""
    prepared = prepared_of(self.model)
    if prepared is None:
        raise StateError(
            f"sync_merged_weights() sends the weights of prepared models; this {type(self.model).__name__} is not "
            "prepared: prepare it before the trainer is made, or call what sync_merged_weights() returned, and TRL "
            "merges into the model itself again",
            expected=(LifecycleState.PREPARED, LifecycleState.SUSPENDED),
        )
    is_sharded = any(map(is_sharded_tensor, prepared.model.parameters()))
    if self.mode == "colocate" and is_sharded:
        raise UnsupportedModelError(
            f"this {type(prepared.model).__name__} is sharded, and its merged weights are handed out on rank 0 alone, "
            'while each rank has an engine of its own: generate with vllm_mode="server", or do not shard the model'
        )
    tied = getattr(prepared.model, "all_tied_weights_keys", ())
    for fqn, tensor in prepared.merged_weights():
        if fqn in tied:
            raise ExportError(
                f"{fqn} is tied in the engine, which does not load it, and the adapters gave it other values than "
                "the weight that it is tied to: adapt neither of the two, or train both as one "
                "(modules_to_save with ensure_weight_tying=True)",
                fqn=fqn,
            )
        yield fqn, tensor
