"""The refusals of models that cannot be edited parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import UnsupportedModelError
from .bitsandbytes_layers import has_transposed_scales
from .quantization import has_kernel_without_backward, is_rewritten
from .tree import ModelTree, Node
from .wrappers import (
    is_d_tensor,
    is_flattened,
    is_partition,
    is_sharded_tensor,
    loaded_class,
)

_BEFORE = "no dtype of a sharded parameter can be changed safely; prepare the model before it is sharded"


def tree_of(model: Any) -> ModelTree:
    """Walk a model at the start of an operation.

    ``UnsupportedModelError`` for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            "expected a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained(...), "
            f"found {type(model).__name__}"
        )
    return ModelTree(model)


def _refuse(place: str, reason: str) -> NoReturn:
    """Raise for what is at a place of a model."""
    raise UnsupportedModelError(f"{place or 'the model'} {reason}", fqn=place)


def refuse_unsupported_tensors(
    tree: ModelTree, *, allow_meta: bool, allow_sharded: bool = False
) -> None:
    """Raise for a model without parameters, or with any that cannot be edited.

    Such are parameters that are not dense, and, unless it is allowed, those that are
    sharded or on the meta device.
    """
    if not tree.tensors:
        raise UnsupportedModelError(
            f"{type(tree.model).__name__} has no parameters: there is nothing to prepare"
        )

    _refuse_sharded(tree, allow_sharded)
    for tensor in tree.tensors:
        parameter = tensor.parameter
        if is_lazy(parameter):
            _refuse(
                tensor.path,
                "is not initialized yet: run the model once, or load its weights, before it is prepared",
            )
        if parameter.layout is not torch.strided or parameter.is_nested:
            kind = "nested" if parameter.is_nested else f"of layout {parameter.layout}"
            _refuse(
                tensor.path,
                f"is {kind}: only dense parameters can be recorded and put back",
            )
        if parameter.is_meta and not allow_meta:
            remedy = "load its weights first; build_plan works on the meta device"
            if getattr(tensor.module, "_hf_hook", None) is not None:
                remedy = (
                    "its values are offloaded by accelerate; load the model without offloading "
                    "(device_map={'': device})"
                )
            _refuse(tensor.path, f"is on the meta device: {remedy}")


def _refuse_sharded(tree: ModelTree, allow_sharded: bool = False) -> None:
    for tensor in tree.tensors:
        parameter = tensor.parameter
        sharding = ""
        if is_d_tensor(type(parameter)):
            sharding = "a DTensor (FSDP2 or tensor parallelism)"
        elif vars(parameter).get("_is_flat_param", False):
            sharding = "an FSDP1 flat parameter (use_orig_params=False)"
        elif is_partition(parameter):
            sharding = "a ZeRO-3 partition"
        elif is_flattened(parameter):
            sharding = "a shard of FSDP1"
        if sharding and not (allow_sharded and is_sharded_tensor(parameter)):
            _refuse(tensor.path, f"is {sharding}: {_BEFORE}")

    fsdp1 = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for node in tree.modules:
        if isinstance(node.module, fsdp1) and not allow_sharded:
            _refuse(node.path, f"is wrapped by FSDP1: {_BEFORE}")

    refuse_flat(tree)


def refuse_sharded_since(tree: ModelTree, *, changes_dtypes: bool) -> None:
    """Raise where a model was sharded since and cannot be put back for a while."""
    refuse_flat(tree)
    if not changes_dtypes:
        return

    try:
        _refuse_sharded(tree)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"the model was sharded after it was prepared, and no dtype of a sharded parameter can be changed safely "
            f"({error.fqn}); call export() on every rank, which writes the exact base, or restore(), which leaves the "
            "dtypes of what is sharded and names them",
            fqn=error.fqn,
        ) from error


def refuse_flat(tree: ModelTree) -> None:
    """Raise where FSDP1 took parameters off their modules."""
    for node in tree.modules:
        # FSDP1 sets it on all that it wraps
        if vars(node.module).get("_fsdp_use_orig_params") is False:
            _refuse(
                node.path,
                "is wrapped by FSDP1 with use_orig_params=False, which takes parameters off their modules; wrap it "
                "with use_orig_params=True, or restore and export before sharding",
            )


def refuse_unreadable(
    tree: ModelTree,
    *,
    allow_sharded: bool,
    remedy: str = "Export before sharding, or load the base again",
) -> None:
    """Raise for a model whose tensors cannot be read."""
    try:
        refuse_unsupported_tensors(tree, allow_meta=False, allow_sharded=allow_sharded)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"expected loaded tensors, whole or sharded by FSDP or ZeRO-3 after the preparation: {error}. {remedy}",
            fqn=error.fqn,
        ) from error


TRANSPOSED_SCALES = (
    "the scales lie in the order of a weight that is repacked for a CPU, and the weight "
    "is not, so what it computes is wrong: bitsandbytes leaves them so where a model is "
    "saved, or its state dict read, after a forward in eval mode on a CPU with "
    "AVX512-BF16; load the base again, and not what was saved then"
)


def refuse_transposed_scales(nodes: Iterable[Node]) -> None:
    """Raise for a 4-bit layer whose values are wrong."""
    for node in nodes:
        if has_transposed_scales(node.module):
            raise UnsupportedModelError(
                f"{node.fqn}: {TRANSPOSED_SCALES}", fqn=node.fqn
            )


def refuse_without_backward(tree: ModelTree, nodes: Iterable[Node]) -> None:
    """Raise for tensors made in inference mode, and for nodes whose kernel has no backward."""
    for tensor in tree.tensors:
        is_kept = not is_rewritten(tensor.module, tensor.name)
        if tensor.parameter.is_inference() and is_kept:
            _refuse(
                tensor.path,
                "was made under torch.inference_mode(): no adapter can be trained on it, and its dtype cannot be "
                "changed; load the model outside of inference mode",
            )
    for node in nodes:
        if has_kernel_without_backward(node.module):
            _refuse(
                node.fqn,
                "repacked its weight when it ran in eval mode, for a kernel that has no backward: adapters would get "
                "wrong gradients; load the model again, and prepare it before it runs",
            )
