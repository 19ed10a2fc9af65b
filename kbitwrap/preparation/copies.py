"""Copies of base parameters, and what others cast.

PEFT makes copies for ``modules_to_save``; its own function for preparing casts.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

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
    there: dict[ParameterRecord, torch.Tensor] = dict(tree.live)
    for record, tensor in tree.resized(base):
        resized[id(tensor.parameter)] = record
        there[record] = tensor.parameter

    def stood_for(tensor: NamedTensor) -> ParameterRecord | None:
        """Return the record of the parameter whose dtype a copy of its name is to have.

        It is ``None`` for what a user put there, whatever its dtype.
        """
        named = before.base.get(tensor.fqn)
        is_adapters = id(tensor.parameter) in tree.adapter_ids
        if named in there:
            # An adapter's copy beside the original: who cast the one cast the other.
            is_cast_alike = there[named].dtype == tensor.parameter.dtype
            return named if is_cast_alike and is_adapters else None
        if is_adapters or named in tree.sharded.values():
            return None
        # In the place of the original: a copy has its mark, a user's module none.
        is_copy = before.records.mark_of(tensor.module) is not None
        return named if is_copy else None

    found = []
    for tensor in tree.tensors:
        parameter = tensor.parameter
        own = tree.known.get(id(parameter))
        is_adapters = own is not None and own not in base
        # Where a shared parameter is at new places only, undoing other slots may free
        # the one it is known by.
        at = before.records.at(tensor.module, tensor.name)
        is_ours = own in ours and at is own
        # No dtype of a shard can be changed.
        if is_adapters or is_ours or is_sharded_tensor(parameter):
            continue

        original = own or resized.get(id(parameter)) or stood_for(tensor)
        if original is None:
            dtype = before.records.dtype_before(tensor.module, tensor.name)
        else:
            is_quantized = original.quantized_class is not None
            dtype = None if is_quantized else original.dtype
        if dtype is None or dtype == parameter.dtype:
            continue
        if own is None and dtype not in HALF_DTYPES:
            continue
        if not (parameter.is_floating_point() and dtype.is_floating_point):
            continue
        is_trained = parameter.requires_grad or id(parameter) in tree.adapter_ids
        named = original or before.base.get(tensor.fqn)
        copy = Copy(
            own or tree.record(tensor),
            parameter,
            dtype,
            is_base=own is not None or not is_trained,
            is_resized=named is not None and parameter.shape != named.shape,
        )
        found.append(copy)
    return found


def half_copies(before: Original, tree: ModelTree) -> list[NamedTensor]:
    """Return the copies of half parameters that are stored in half too.

    They stand, by name, for parameters of the base. Copies made while a model is
    prepared are in float32; these were made while it was suspended.
    """
    found = []
    for tensor in tree.tensors:
        parameter = tensor.parameter
        named = before.base.get(tensor.fqn)
        if named is None or id(parameter) in tree.known:
            continue
        is_half = parameter.dtype in HALF_DTYPES and named.dtype in HALF_DTYPES
        if is_half and not is_quantized_parameter(parameter):
            found.append(tensor)
    return found
