"""Copies of base parameters, and what others cast.

PEFT makes copies for ``modules_to_save``; its own function for preparing casts.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..edits.storage import CopyChange
from ..model.quantization import is_quantized_parameter
from ..model.records import ParameterRecord
from ..model.tree import ModelTree, NamedTensor
from ..model.wrappers import is_sharded_tensor
from ..tensors.dtypes import HALF_DTYPES
from .original import Original


class Copies:
    """Finds what is to be rounded, beside what the preparation itself stores upcast.

    Args:
        original: The record of the base.
        tree: The live model, in which the recorded parameters were found again.
    """

    def __init__(self, original: Original, tree: ModelTree) -> None:
        self._original = original
        self._tree = tree
        self._base = set(original.parameters)
        resized = tree.resized(self._base)
        self._resized = {id(tensor.parameter): record for record, tensor in resized}
        # by record, the parameter itself, or what resizing made of it
        self._there = dict(tree.live)
        for record, tensor in resized:
            self._there[record] = tensor.parameter

    def changes(self, ours: Collection[ParameterRecord]) -> list[CopyChange]:
        """Find casts by others, and copies of parameters that they or we cast.

        Args:
            ours: The records of parameters of which the journal holds the originals.

        Returns:
            A change for each parameter, none of them applied.
        """
        found = []
        for tensor in self._tree.tensors:
            if is_sharded_tensor(tensor.parameter):
                continue  # no dtype of such can be changed
            own = self._tree.known.get(id(tensor.parameter))
            if own is not None and own not in self._base:
                continue  # of an adapter that was there before
            # Where a shared parameter is at new places only, undoing other changes may
            # free the one it is known by.
            at = self._original.records.at(tensor.module, tensor.name)
            if own in ours and at is own:
                continue
            change = self._change(tensor, own)
            if change is not None:
                found.append(change)
        return found

    def _change(
        self, tensor: NamedTensor, own: ParameterRecord | None
    ) -> CopyChange | None:
        """The change that rounds a parameter; ``None`` if it was not cast.

        ``own`` is its record, which a copy does not have.
        """
        parameter = tensor.parameter
        original = own or self._resized.get(id(parameter)) or self._stood_for(tensor)
        dtype = self._dtype_before(tensor, original)
        if dtype is None or dtype == parameter.dtype:
            return None
        if own is None and dtype not in HALF_DTYPES:
            return None
        if not (parameter.is_floating_point() and dtype.is_floating_point):
            return None
        is_trained = parameter.requires_grad or self._is_adapters(tensor)
        named = original or self._original.base.get(tensor.fqn)
        return CopyChange(
            own or self._tree.record(tensor),
            parameter,
            dtype,
            is_base=own is not None or not is_trained,
            is_resized=named is not None and parameter.shape != named.shape,
        )

    def _stood_for(self, tensor: NamedTensor) -> ParameterRecord | None:
        """The record of the base's parameter whose dtype a copy of its name is to have.

        It is ``None`` for what a user put there, whatever its dtype.
        """
        named = self._original.base.get(tensor.fqn)
        if named is None:
            return None
        if named in self._there:
            # An adapter's copy beside the original: who cast the one cast the other.
            is_cast_alike = self._there[named].dtype == tensor.parameter.dtype
            return named if is_cast_alike and self._is_adapters(tensor) else None
        if self._is_adapters(tensor) or named in self._tree.sharded.values():
            return None
        # In the place of the original: a copy has its mark, a user's module none.
        is_copy = self._original.records.mark_of(tensor.module) is not None
        return named if is_copy else None

    def _is_adapters(self, tensor: NamedTensor) -> bool:
        """Whether a parameter belongs to an adapter, as those of ``modules_to_save`` do."""
        return id(tensor.parameter) in self._tree.adapter_ids

    def _dtype_before(
        self, tensor: NamedTensor, original: ParameterRecord | None
    ) -> torch.dtype | None:
        """The dtype that a parameter, or the one that it is a copy of, had before.

        ``None`` where nothing was cast, and of quantized storage.
        """
        if original is None:
            return self._original.records.dtype_before(tensor.module, tensor.name)
        if original.quantized_class is not None:
            return None
        return original.dtype


def half_copies(original: Original, tree: ModelTree) -> list[NamedTensor]:
    """The copies of half parameters that are stored in half too.

    They stand, by name, for parameters of the base. Those made while a model is
    prepared are in float32; these were made while it was suspended.
    """
    found = []
    for tensor in tree.tensors:
        parameter = tensor.parameter
        named = original.base.get(tensor.fqn)
        if named is None or id(parameter) in tree.known:
            continue
        is_half = parameter.dtype in HALF_DTYPES and named.dtype in HALF_DTYPES
        if is_half and not is_quantized_parameter(parameter):
            found.append(tensor)
    return found
