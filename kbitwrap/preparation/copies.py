"""Copies of base parameters, and what others cast.

PEFT makes copies for ``modules_to_save``; its own function for preparing casts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from ..edits.storage import Copy
from ..model.quantization import is_quantized_parameter
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor
from ..model.wrappers import is_sharded_tensor
from ..tensors.dtypes import HALF_DTYPES
from .state import Original


def copies_of(
    before: Original, tree: ModelTree, ours: Collection[ParameterRecord]
) -> list[Copy]:
    """Find casts by others, and copies of parameters that they or we cast.

    Args:
        before: The record of the base.
        tree: The live model, in which the recorded parameters were found again.
        ours: The records of parameters of which the journal holds the originals.

    Returns:
        A slot for each parameter that is to be rounded, none of them written.
    """
    base = set(before.base.values())
    resized = {}  # by the ``id`` of what resizing made of them
    there = dict(tree.live)
    for record, tensor in tree.resized(base):
        resized[id(tensor.parameter)] = record
        there[record] = tensor.parameter

    found = []
    for tensor in tree.tensors:
        parameter = tensor.parameter
        own = tree.known.get(id(parameter))
        # Where a shared parameter is at new places only, undoing other slots may free
        # the one it is known by.
        at = before.records.at(tensor.module, tensor.name)
        is_ours = own in ours and at is own
        # No dtype of a shard can be changed.
        if is_ours or is_sharded_tensor(parameter):
            continue
        if own is not None and own not in base:
            continue  # an adapter's

        named = before.base.get(tensor.fqn)
        is_adapters = id(parameter) in tree.adapter_ids
        original = own or resized.get(id(parameter))
        if original is None and is_adapters and named in there:
            # A copy beside the original: who cast the one cast the other.
            if there[named].dtype == parameter.dtype:
                original = named
        elif original is None and named not in there and not is_adapters:
            # In the place of the original, which is gone: what others cast after it was
            # trained, and a copy, have a mark on their module; a user's module has none.
            is_shard = named in tree.sharded.values()
            if before.records.mark_of(tensor.module) is not None and not is_shard:
                original = named
        dtype = before.records.dtype_before(tensor.module, tensor.name)
        if original is not None:
            dtype = None if original.quantized_class is not None else original.dtype
        if dtype is None or dtype == parameter.dtype:
            continue
        if own is None and dtype not in HALF_DTYPES:
            continue
        if not (parameter.is_floating_point() and dtype.is_floating_point):
            continue
        is_trained = parameter.requires_grad or is_adapters
        like = original or named
        is_base = own is not None or not is_trained
        is_resized = like is not None and parameter.shape != like.shape
        record = own or tree.record(tensor)
        found.append(Copy(record, dtype, parameter, is_base, is_resized))
    return found


def casts_by_others(
    tree: ModelTree, meta: nn.Module
) -> Iterator[tuple[NamedTensor, torch.dtype]]:
    """Yield the float32 parameters that were loaded in half, and that dtype: PEFT's own function leaves them so.

    ``meta`` is the model as its config loads it.
    """
    loaded = dict(meta.named_parameters(remove_duplicate=False))
    for tensor in tree.base_tensors:
        dtype = getattr(loaded.get(tensor.fqn), "dtype", None)
        if tensor.parameter.dtype == torch.float32 and dtype in HALF_DTYPES:
            yield tensor, dtype


def upcast_copies(before: Original, tree: ModelTree) -> None:
    """Store copies in float32 that were made of base modules while suspended.

    They stand, by name, for parameters of the base. Copies made while the model is
    prepared are in float32, and so are its activations. A copy that was there, and kept
    in half by somebody, stays so.
    """
    for tensor in tree.tensors:
        parameter = tensor.parameter
        named = before.base.get(tensor.fqn)
        recorded = before.records.at(tensor.module, tensor.name)
        was_there = recorded is not None and recorded.is_seen(parameter)
        if named is None or was_there or id(parameter) in tree.known:
            continue
        is_half = parameter.dtype in HALF_DTYPES and named.dtype in HALF_DTYPES
        if is_half and not is_quantized_parameter(parameter):
            before.records.mark(tensor.module).dtypes[tensor.name] = parameter.dtype
            parameter.data = parameter.data.float()
