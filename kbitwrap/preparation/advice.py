"""The warnings of a plan.

Each function names what it found, and returns at most one warning for each thing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from ..config import Precision, format_bytes
from ..edits.norms import can_rebind_forward, computes_in_float32
from ..model.quantization import (
    STACKS_QUANTIZED_BY,
    is_quantized_parameter,
    is_rewritten,
    rounds_activations,
)
from ..model.roles import Role, loses_gradients, returns_float32
from ..model.tree import ModelTree, Node
from ..reports import first_of
from ..tensors.bits import is_composed
from ..tensors.dtypes import HALF_DTYPES, find_dtype
from .casts import Casts
from .process import mixed_precision

Warnings = list[str]


def of_unquantized(casts: Casts) -> Warnings:
    """Say that a model is not quantized."""
    if casts.quantization.is_quantized:
        return []
    return [
        f"{type(casts.tree.model).__name__} has neither a quantization attribute nor a "
        "quantized layer: it is frozen and cast as asked, but not checkpointed"
    ]


def of_upcast_before(casts: Casts) -> Warnings:
    """Say that a model was frozen and upcast before, which its config contradicts."""
    model = casts.tree.model
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    if not casts.quantization.is_quantized or dtype not in HALF_DTYPES:
        return []
    num_bytes = 0
    for tensor in casts.base:
        parameter = tensor.parameter
        is_float32 = parameter.dtype == torch.float32
        # A quantized layer rounds its bias when it runs.
        rewrites = not is_float32 and is_rewritten(tensor.module, tensor.name)
        if rewrites or is_quantized_parameter(parameter):
            continue
        is_upcast = is_float32 and not parameter.requires_grad
        if parameter.is_floating_point() and not is_upcast:
            return []  # nobody has prepared the model
        num_bytes += parameter.nbytes
    if not num_bytes:
        return []
    return [
        f"{type(model).__name__} was upcast before, as "
        "peft.prepare_model_for_kbit_training does it: its config says "
        f"{dtype}, and all that is not quantized, {format_bytes(num_bytes)}, is frozen "
        "and float32; nothing is left to cast, and restore() returns to this state; "
        "prepare a model as from_pretrained returned it"
    ]


def of_norms(casts: Casts) -> Warnings:
    """Name the norms whose forward cannot be replaced."""
    found = []
    for node in casts.norms:
        if not (can_rebind_forward(node.module) or computes_in_float32(node.module)):
            found.append(
                f"{node.fqn} computes as loaded: it has buffers, as norms with "
                "statistics do, or its forward was replaced by a function that is "
                "not its method"
            )
    return found


def of_head(casts: Casts) -> Warnings:
    """Say that a head was asked for that cannot compute in float32."""
    is_asked_for = casts.config.head is not None
    can_compute = any(can_rebind_forward(node.module) for node in casts.heads)
    if not is_asked_for or can_compute or casts.config.precision.upcasts_all:
        return []
    return [
        "head='float32' changes nothing: no output head was found that is an "
        "unquantized linear layer with a half weight and its own forward, in a model "
        "whose quantization method permits casts"
    ]


def of_lost_gradients(tree: ModelTree) -> Warnings:
    """Say which layers let no gradient through to their input: nothing else would."""
    answers: dict[Any, bool] = {}  # by the kind of weight: each is tried once
    found = [node.fqn for node in tree.base if rounds_activations(node.module)]
    for node in tree.of_class(lambda cls: cls is nn.Linear):
        weight = node.module._parameters.get("weight")
        if weight is None or weight.is_meta or not node.is_base:
            continue
        if not is_composed(type(weight)):
            continue
        kind = type(weight), repr(weight.__tensor_flatten__()[1])  # type: ignore[attr-defined]
        if kind not in answers:
            answers[kind] = loses_gradients(weight)
        if answers[kind]:
            found.append(node.fqn)
    if not found:
        return []
    return [
        f"{len(found)} layers, {found[0]} the first, let no gradient through to their "
        "input, so adapters in front of them are trained by what goes around them, or "
        "not at all: activations that are quantized as they are used have no "
        "backward; quantize weights only"
    ]


def of_unquantized_stacks(casts: Casts) -> Warnings:
    """Name the stacks of experts in a model that bitsandbytes quantizes.

    Loading leaves them as they are, because they are no linear layers.
    """
    if not (casts.quantization.is_quantized and casts.quantization.casts):
        return []
    experts = [t for t in casts.tree.tensors if casts.role(t) is Role.EXPERT]
    stacks = [tensor for tensor in experts if tensor.parameter.dim() > 2]
    if not stacks:
        return []
    num_bytes = format_bytes(sum(tensor.parameter.nbytes for tensor in stacks))
    return [
        f"{len(stacks)} stacks of experts are not quantized, {stacks[0].fqn} the "
        f"first: {num_bytes}; {STACKS_QUANTIZED_BY} quantizes them"
    ]


def of_precision(casts: Casts) -> Warnings:
    """Say that the precision changes nothing, or what it costs beside its bytes."""
    precision = casts.config.precision
    if casts.quantization.casts:
        return _of_upcasts(casts) if precision.upcasts_all else []
    if precision is Precision.NONE:
        return []
    return [
        f"{casts.quantization.method} manages its own precision: precision "
        f"{precision.value!r} changes nothing"
    ]


def _of_upcasts(casts: Casts) -> Warnings:
    """Say what it costs to store or use half parameters as float32.

    Their bytes are in the plan's table; these are the consequences beside them.
    """
    found = []
    roles = {casts.role(tensor) for tensor in casts.castable}
    if Role.INPUT_EMBEDDINGS in roles or Role.NORM in roles:
        found.append(
            "float32 embeddings and norms make the residual stream float32 in most "
            "models: activations take twice the bytes, and FlashAttention refuses "
            "float32 queries, keys and values"
        )
    found += _of_mixed_precision(casts)
    experts = [store for store in casts.stores if store.role is Role.EXPERT]
    parameters = [ref() for store in experts for ref in store.refs]
    if parameters:
        num_bytes = sum(p.nbytes for p in parameters if p is not None)
        found.append(f"unquantized experts are doubled: {format_bytes(num_bytes)} more")
    return found


def _of_mixed_precision(casts: Casts) -> Warnings:
    """Say where a policy computes in half what is cast.

    The bytes of the cast are spent, and the numbers are still not those of float32.
    """
    policy = mixed_precision(casts.base)
    if policy is None or not casts.castable:
        return []
    if policy.casts_parameters:
        return [
            "the mixed-precision policy of FSDP casts every parameter to "
            f"{policy.dtype} before it is used, which nullifies the upcast: precision "
            "'norms' or 'none' computes the same from half the bytes"
        ]
    if not any(isinstance(tensor.module, nn.Linear) for tensor in casts.castable):
        return []
    return [
        f"under {policy.dtype} autocast linear layers, the head among them, are "
        f"computed in {policy.dtype} whatever they store: their upcast is nullified, "
        "as it is in PEFT"
    ]


def of_adapters(casts: Casts, *, is_suspended: bool = False) -> Warnings:
    """Name the adapters whose float32 output breaks the half model, prepared or not."""
    can_be_float32 = casts.quantization.casts
    is_float32 = casts.config.precision.upcasts_all and can_be_float32
    if is_float32 and not is_suspended:
        return []
    if not casts.half or mixed_precision(casts.base) is not None:
        return []
    dtype = casts.half[0].parameter.dtype  # which the model computes in
    kinds: defaultdict[Any, list[Node]] = defaultdict(list)  # of a kind, one is tried
    for node in casts.tree.adapters:
        if "base_layer" in node.module._modules:
            active = str(getattr(node.module, "active_adapters", ""))
            kinds[type(node.module), active].append(node)
    names: list[str] = []
    adapter_dtype = find_dtype(casts.config.adapter_dtype)
    for nodes in kinds.values():
        if returns_float32(nodes[0].module, dtype, adapter_dtype):
            names += [node.fqn for node in nodes]
    if not names:
        return []
    others = ""
    if can_be_float32 and not is_float32:
        others = " or prepare with precision 'full' or 'compute'"
    return [
        f"the adapters on {first_of(names, 1)} return float32 where the model computes "
        f"in {dtype}: attention, or the head, will raise that dtypes differ, as in the "
        "unprepared model; run it under autocast (torch.autocast, "
        f"Trainer(bf16=True)){others}"
    ]
