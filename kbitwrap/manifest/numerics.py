"""The fingerprint of the numerics: a digest of what the base computes for a few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..edits.base import Attributes
from ..edits.journal import Call, Journal, Undoing
from ..edits.kept import ForwardState
from ..edits.training import RuntimeState, runtime_states
from ..model.quantization import is_rewritten, keep_kernels_of_training
from ..model.tree import ModelTree
from ..model.wrappers import (
    is_adapter_class,
    is_sharded_tensor,
    loaded_class,
    unwrap,
    wrapped_children,
)
from ..preparation.preparation import Preparation
from ..preparation.process import devices_of, plain_mode
from ..tensors.bits import content_digest
from ..tensors.devices import random_state
from .contents import versions
from .manifest import VERSIONS, Manifest

_NUM_TOKENS = 16
_ABSENT = "(not installed)"
_SWITCH = "_disable_adapters"
"""The attribute of PEFT's layers; its own methods to set it write ``requires_grad`` flags too."""


def with_logits(
    manifest: Manifest,
    model: nn.Module,
    autocast: torch.dtype | None = None,
    recorded: Preparation | None = None,
) -> Manifest:
    """Return the manifest with the digest of what the base computes for the tokens 0 to 15; the model stays as it is.

    The base computes without adapters and dropout, and with the kernels of training. No
    digest is added where the base is sharded or trained, its adapters cannot be turned
    off, or it does not compute logits of tokens alone.

    Args:
        manifest: The manifest of the model.
        model: The model as it is to be trained.
        autocast: The dtype of the autocast that it is trained under; ``None`` without.
        recorded: The record of a model that nothing prepared: the base computes with
            the statistics in it, which an evaluation may have replaced.
    """
    base = unwrap(model)[0]
    if not isinstance(base, loaded_class("transformers", "PreTrainedModel")):
        return manifest
    tree, _ = Preparation.tree_of(model)
    for tensor in tree.tensors:
        if is_sharded_tensor(tensor.parameter):
            return manifest
    for tensor in tree.base_tensors:
        if tensor.parameter.requires_grad:
            return manifest
    adapters = []
    for module in base.modules():
        if is_adapter_class(type(module)) and wrapped_children(module):
            if not hasattr(module, _SWITCH):
                return manifest
            adapters.append(module)

    with plain_mode(), _as_it_is(tree):
        for state in recorded.journal.of(RuntimeState) if recorded else ():
            state.undo(tree, Undoing())
        keep_kernels_of_training(base)
        for module in adapters:
            vars(module)[_SWITCH] = True
        try:
            logits = _compute_logits(base, autocast)
            digest = f"{content_digest(logits):016x}"
        except Exception:  # of any model's own code, which wants images, say
            return manifest

    return manifest.model_copy(update={"version": VERSIONS[-1], "logits": digest})


@contextmanager
def _as_it_is(tree: ModelTree) -> Iterator[None]:
    """Put back what a forward in another mode changes: random numbers, modes, and what it leaves on layers."""
    biases = []
    for tensor in tree.all_tensors:
        if is_rewritten(tensor.module, tensor.name):
            biases.append((tensor.parameter, tensor.parameter.data))

    def put_back() -> None:
        for parameter, data in biases:
            parameter.data = data

    modules = [node.module for node in tree.modules]
    journal = Journal()
    journal.save(
        Call(random_state(devices_of(tree))),
        Call(put_back),
        ForwardState(tree),
        *runtime_states(tree),
        Attributes(["training", _SWITCH], modules),
    )
    try:
        yield
    finally:
        journal.undo_or_raise(tree)


def _compute_logits(base: Any, autocast: torch.dtype | None) -> torch.Tensor:
    """Compute the logits of the probe, as one sequence."""
    text = base.config.get_text_config()
    ids = torch.arange(_NUM_TOKENS, device=base.device)[None] % text.vocab_size
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if base.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    options = {"use_cache": False} if hasattr(text, "use_cache") else {}
    is_on = autocast is not None
    with (
        torch.autocast(base.device.type, autocast, enabled=is_on),
        torch.compiler.set_stance("force_eager"),
    ):
        return base(**inputs, **options).logits  # type: ignore[no-any-return]


def changed_versions(recorded: Mapping[str, Any]) -> list[str]:
    """Say of each library, but not of Python, that has another version than was recorded, which it was and is."""
    installed = versions()
    changed = []
    for name in sorted({*recorded, *installed} - {"python"}):
        was, now = recorded.get(name), installed.get(name)
        if was != now:
            changed.append(f"{name} {was or _ABSENT} became {now or _ABSENT}")
    return changed
