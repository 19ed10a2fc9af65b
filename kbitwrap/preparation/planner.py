"""The planner: which edits a preparation takes, and what each of them costs.

Read-only; works on the meta device.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn

from ..config import Precision, format_bytes
from ..edits.base import Edit
from ..edits.checkpointing import (
    checkpoint,
    refuse_without_checkpointing,
    refuse_without_embeddings,
)
from ..edits.flags import freeze
from ..edits.norms import (
    Float32Forward,
    can_rebind_forward,
    compute_in_float32,
    computes_in_float32,
)
from ..edits.stand_ins import HeadForward
from ..edits.training import record
from ..model.checks import refuse_transposed_scales, refuse_without_backward
from ..model.pretrained import ASSUMED
from ..model.quantization import (
    has_runtime_state,
    is_quantized_parameter,
    is_rewritten,
)
from ..model.roles import Role, heads, is_norm
from ..model.tree import Node
from ..tensors.dtypes import HALF_DTYPES
from . import advice
from .casts import Casts


def plan_edits(casts: Casts, warnings: list[str], alarms: list[str]) -> list[Edit]:
    """Write the edits down, in the order in which they are applied.

    Args:
        casts: What is cast.
        warnings: Consequences that need attention, which are added to; those of what
            the model is come first.
        alarms: Those of them that nobody may miss.

    Returns:
        The edits.
    """
    tree, config = casts.tree, casts.config
    _warn_of_what_it_is(casts, warnings, alarms)
    layers = [node for node in tree.modules if has_runtime_state(node.module)]
    refuse_without_backward(tree, layers)
    refuse_transposed_scales(layers)
    freezes = functools.partial(
        freeze, is_frozen=config.freeze, freeze_adapters=casts.freeze_adapters
    )
    edits = [
        Edit("record", tuple(node.fqn for node in layers), record),
        Edit("freeze", tuple(tensor.fqn for tensor in casts.base), freezes),
        *casts.stores,
        *casts.upcasts,
        *edits_of_adapters(casts, casts, warnings, alarms),
        _checkpoint(casts),
    ]
    lost = advice.of_lost_gradients(tree)
    alarms += lost
    warnings += lost
    warnings += advice.of_adapters(casts)
    warnings += advice.of_unquantized_stacks(casts)
    warnings += advice.of_precision(casts)
    warnings += vars(tree.model).get(ASSUMED, ())
    return edits


def edits_of_adapters(
    casts: Casts, around: Casts, warnings: list[str], alarms: list[str]
) -> list[Edit]:
    """Return the edits that depend on adapters, which may be made later.

    Args:
        casts: The casts of the model.
        around: Those of what was made of it: adapters of prompt learning lie outside.
        warnings: Consequences that need attention, which are added to.
        alarms: Those of them that nobody may miss.

    Returns:
        Those that are not made yet.
    """
    computes = _compute_norms(casts, warnings)
    chunk_bytes = casts.config.head_chunk_bytes
    if casts.config.head is not None and not casts.config.precision.upcasts_all:
        found = [node for node in heads(casts.tree) if can_rebind_forward(node.module)]
        if not found or not casts.quantization.casts:
            alarm = (
                "head='float32' changes nothing: no output head was found that is an "
                "unquantized linear layer with a half weight and its own forward, in "
                "a model whose quantization method permits casts"
            )
            alarms.append(alarm)
            warnings.append(alarm)
            found = []
        forward = functools.partial(HeadForward, chunk_bytes=chunk_bytes)
        computes += _compute(found, Role.OUTPUT_EMBEDDINGS, forward)
    return [*computes, *around.cast_adapters]


def _warn_of_what_it_is(casts: Casts, warnings: list[str], alarms: list[str]) -> None:
    """Warn of a model that is not quantized, or was upcast before."""
    name = type(casts.tree.model).__name__
    if not casts.quantization.is_quantized:
        warnings.append(
            f"{name} has neither a quantization attribute nor a quantized layer: "
            "it is frozen and cast as asked, but not checkpointed"
        )
        return
    dtype = getattr(getattr(casts.tree.model, "config", None), "dtype", None)
    if dtype not in HALF_DTYPES:
        return

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
            return  # nobody has prepared the model
        num_bytes += parameter.nbytes
    if num_bytes:
        warning = (
            f"{name} was upcast before, as peft.prepare_model_for_kbit_training does "
            f"it: its config says {dtype}, and all that is not quantized, "
            f"{format_bytes(num_bytes)}, is frozen and float32; nothing is left to "
            "cast, and restore() returns to this state; prepare a model as "
            "from_pretrained returned it"
        )
        warnings.append(warning)
        if not casts.freeze_adapters:
            alarms.append(warning)


def _compute_norms(casts: Casts, warnings: list[str]) -> list[Edit]:
    """Return the edit of the norms that are to compute in float32, if there are any."""
    precision = casts.config.precision
    if precision is Precision.NORMS:
        blocks: tuple[str, ...] = ("",)
    elif precision is Precision.ADAPTED:
        blocks = tuple(casts.tree.adapted_blocks)
    else:
        return []
    halves: set[nn.Module] = set()  # which have something to cast
    for tensor in casts.castable:
        halves.update(module for module, _ in casts.tree.places(tensor))
    found: dict[nn.Module, Node] = {}
    for node in casts.tree.base:
        module = node.module
        is_half = module in halves and node.fqn.startswith(blocks)
        if is_half and is_norm(module, casts.config.norm_modules):
            found.setdefault(module, node)
    nodes = []
    for module, node in found.items():
        if can_rebind_forward(module) or computes_in_float32(module):
            nodes.append(node)
        else:
            warnings.append(
                f"{node.fqn} computes as loaded: it has buffers, as norms with "
                "statistics do, or its forward was replaced by a function that is "
                "not its method"
            )
    return _compute(nodes, Role.NORM, Float32Forward)


def _compute(
    nodes: list[Node], role: Role, forward: Callable[[nn.Module], Float32Forward]
) -> list[Edit]:
    """Return the edit that replaces the forwards of modules, if there are any.

    Those that compute so already are left out: adapters may be new, and the rest not.
    """
    new = [node for node in nodes if not computes_in_float32(node.module)]
    if not new:
        return []
    modules = [weakref.ref(node.module) for node in new]
    apply = functools.partial(compute_in_float32, modules=modules, forward=forward)
    return [Edit("compute", tuple(node.fqn for node in new), apply, role=role)]


def _checkpoint(casts: Casts) -> Edit:
    """Return the edit that enables checkpointing, and hooks what that needs hooked.

    Reentrant checkpointing of a frozen model needs inputs that require grad. The other
    kind needs none, but its blocks are hooked for backward hooks of others.
    """
    config, quantization = casts.config, casts.quantization
    enable = config.gradient_checkpointing and quantization.is_quantized
    if enable:
        refuse_without_checkpointing(casts.tree)
    kwargs = dict(config.gradient_checkpointing_kwargs)
    hook_inputs, hook_blocks = config.input_require_grads, False
    if hook_inputs is None:
        # torch's own default is reentrant, also where None is given.
        use_reentrant = kwargs.get("use_reentrant")
        is_reentrant = use_reentrant is None or bool(use_reentrant)
        hook_inputs = enable and is_reentrant
        hook_blocks = enable and not is_reentrant
    if hook_inputs:
        refuse_without_embeddings(casts.tree.model)
    apply = functools.partial(
        checkpoint,
        enable=enable,
        kwargs=kwargs,
        hook_inputs=hook_inputs,
        hook_blocks=hook_blocks,
        hook_model=config.precision.upcasts_all and quantization.casts,
    )
    return Edit("checkpoint", ("",), apply)
