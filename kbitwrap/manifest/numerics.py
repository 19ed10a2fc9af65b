"""The fingerprint of the numerics: a digest of what the base computes for a few tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..edits.base import Attributes
from ..edits.journal import Call, Journal, Undoing
from ..edits.kept import ForwardState
from ..edits.training import RuntimeState, runtime_states
from ..model.bitsandbytes_layers import state_owners
from ..model.quantization import is_rewritten, keep_kernels_of_training
from ..model.records import key_of
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
from ..tensors.upcast import written_arguments
from .contents import versions
from .manifest import VERSIONS, Manifest

_NUM_TOKENS = 16
_ABSENT = "(not installed)"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
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
    off, it does not compute logits of tokens alone, or it writes into its weights when it
    runs, as RWKV does in eval mode.

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

    weights = []
    for node in tree.modules:
        weights += [*node.module._parameters.values(), *node.module._buffers.values()]
    for tensor in tree.all_tensors:
        for owner in state_owners(tensor.module, tensor.parameter):
            weights += owner.fields().values()

    with plain_mode(), _as_it_is(tree), _ReadOnly(weights):
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


class _ReadOnly(TorchDispatchMode):
    """Refuses operations that write into the memory of some values, those that are tensors."""

    def __init__(self, values: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        self._memory = {key_of(tensor) for tensor in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in written_arguments(func, args, kwargs):
            if isinstance(one, torch.Tensor) and key_of(one) in self._memory:
                raise RuntimeError(f"{func} writes into a weight")
        return func(*args, **kwargs)


@contextmanager
def _as_it_is(tree: ModelTree) -> Iterator[None]:
    """Put back what a forward in another mode changes: random numbers, modes, and what it leaves on layers.

    Hooks are off meanwhile: they are others'. Children, parameters and attributes that
    the forward sets are those from before again; transformers notes in one that its
    hooks are there.
    """
    biases = []
    for tensor in tree.all_tensors:
        if is_rewritten(tensor.module, tensor.name):
            biases.append((tensor.parameter, tensor.parameter.data))

    modules = [node.module for node in tree.modules]
    members: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in modules:
        for place in (module._modules, module._parameters, vars(module)):
            members.append((place, dict(place)))

    def put_back() -> None:
        for place, found in members:
            for name in place.keys() - found.keys():
                del place[name]
            place.update(found)
        for parameter, data in biases:
            parameter.data = data

    journal = Journal()
    journal.save(
        Call(random_state(devices_of(tree))),
        ForwardState(tree),
        *runtime_states(tree),
        Attributes(["training", _SWITCH, *_HOOKS], modules),
        Call(put_back),
    )
    try:
        for module in modules:
            vars(module).update({name: OrderedDict() for name in _HOOKS})
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
