"""The warnings of a plan.

Each function names what it found, and yields at most one warning for each thing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ..config import Precision
from ..edits.norms import can_rebind_forward, computes_in_float32
from ..model.quantization import (
    STACKS_QUANTIZED_BY,
    is_rewritten,
    rounds_activations,
)
from ..model.roles import Role, loses_gradients, returns_float32
from ..model.tree import ModelTree
from ..tensors.bits import is_composed
from ..tensors.dtypes import HALF_DTYPES, find_dtype
from .casts import Casts
from .process import is_autocast

Warnings = Iterator[str]


def of_unquantized(casts: Casts) -> Warnings:
    """Say that a model is not quantized."""
    if not casts.quantization.is_quantized:
        yield (
            f"{type(casts.tree.model).__name__} has neither a quantization attribute nor a "
            "quantized layer: it is frozen and cast as asked, but not checkpointed"
        )


def of_upcast_before(casts: Casts) -> Warnings:
    """Say that a model was frozen and upcast before, which its config contradicts."""
    model = casts.tree.model
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    # PEFT's function may be called on what it prepared.
    is_expected = casts.freeze_adapters or not casts.quantization.is_quantized
    if is_expected or dtype not in HALF_DTYPES:
        return
    # but for biases, which quantized layers round when they run
    half = [one for one in casts.half if not is_rewritten(one.module, one.name)]
    frozen = [one.parameter for one in casts.base if not one.parameter.requires_grad]
    if not half and any(parameter.dtype == torch.float32 for parameter in frozen):
        yield (
            f"{type(model).__name__} was upcast before, as "
            "peft.prepare_model_for_kbit_training does it: its config says "
            f"{dtype}, and all that is not quantized is frozen and float32; nothing is left "
            "to cast, and restore() returns to this state; prepare a model as "
            "from_pretrained returned it"
        )


def of_norms(casts: Casts) -> Warnings:
    """Name the norms whose forward cannot be replaced."""
    for node in casts.norms:
        if not (can_rebind_forward(node.module) or computes_in_float32(node.module)):
            yield (
                f"{node.fqn} computes as loaded: it has buffers, as norms with "
                "statistics do, or its forward was replaced by a function that is "
                "not its method"
            )


def of_head(casts: Casts) -> Warnings:
    """Say that a head was asked for that cannot compute in float32."""
    if casts.config.head is None or casts.config.precision.upcasts_all:
        return
    if not any(can_rebind_forward(node.module) for node in casts.heads):
        yield (
            "head='float32' changes nothing: no output head was found that is an "
            "unquantized linear layer with a 16-bit weight and its own forward, in a model "
            "whose quantization method permits casts"
        )


def of_lost_gradients(tree: ModelTree) -> Warnings:
    """Say which layers let no gradient through to their input: nothing else would."""
    tried = set()  # kinds of weights
    for node in tree.base:
        module = node.module
        loses = rounds_activations(module)
        weight = module._parameters.get("weight") if type(module) is nn.Linear else None
        if weight is not None and is_composed(type(weight)) and not weight.is_meta:
            kind = type(weight), repr(weight.__tensor_flatten__()[1])  # type: ignore[attr-defined]
            if kind not in tried:
                tried.add(kind)
                loses = loses_gradients(weight)
        if loses:
            yield (
                f"{node.fqn}, and layers like it, let no gradient through to their "
                "input, so adapters in front of them are trained by what goes around "
                "them, or not at all: activations that are quantized as they are used "
                "have no backward; quantize weights only"
            )
            return


def of_unquantized_stacks(casts: Casts) -> Warnings:
    """Name the stacks of experts in a model that bitsandbytes quantizes.

    Loading leaves them as they are, because they are no linear layers.
    """
    if not (casts.quantization.is_quantized and casts.quantization.casts):
        return
    for tensor in casts.tree.tensors:
        if casts.role(tensor) is Role.EXPERT and tensor.parameter.dim() > 2:
            yield (
                f"stacks of experts are not quantized, {tensor.fqn} the first; "
                f"{STACKS_QUANTIZED_BY} quantizes them"
            )
            return


def of_precision(casts: Casts) -> Warnings:
    """Say that the precision changes nothing, or what it costs beside its bytes."""
    precision = casts.config.precision
    if not casts.quantization.casts and precision is not Precision.NONE:
        yield (
            f"{casts.quantization.method} manages its own precision: precision "
            f"{precision.value!r} changes nothing"
        )
    roles = {casts.role(tensor) for tensor in casts.castable}
    is_stream = Role.INPUT_EMBEDDINGS in roles or Role.NORM in roles
    if precision.upcasts_all and is_stream:
        yield (
            "float32 embeddings and norms make the residual stream float32 in most models: "
            "activations take twice the bytes, and FlashAttention refuses float32 queries, "
            "keys and values"
        )


def of_adapters(casts: Casts) -> Warnings:
    """Name an adapter whose float32 output breaks the half model, prepared or not."""
    is_float32 = casts.config.precision.upcasts_all and casts.quantization.casts
    if is_float32 or not casts.half or is_autocast(casts.base):
        return
    dtype = casts.half[0].parameter.dtype  # which the model computes in
    adapter_dtype = find_dtype(casts.config.adapter_dtype)
    tried = set()  # kinds of adapters
    for node in casts.tree.adapters:
        kind = type(node.module), str(getattr(node.module, "active_adapters", ""))
        if "base_layer" not in node.module._modules or kind in tried:
            continue
        tried.add(kind)
        if returns_float32(node.module, dtype, adapter_dtype):
            yield (
                f"the adapter on {node.fqn} returns float32 where the model computes in "
                f"{dtype}, and others may: attention, or the head, will raise that "
                "dtypes differ, as in the unprepared model; run it under autocast "
                "(torch.autocast, Trainer(bf16=True)), or prepare with precision 'full' "
                "or 'compute' where the quantization method permits casts"
            )
            return
