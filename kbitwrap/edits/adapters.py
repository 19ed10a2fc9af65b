"""The edit of adapters' dtypes.

Adapters that were trained stay in the dtype that they were trained in: rounding them
would lose what was learned. Untrained adapters go back exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..model.records import TensorRef
from ..model.roles import Role
from ..model.tree import ModelTree, NamedTensor
from ..model.wrappers import is_sharded_tensor
from ..tensors.bits import differ
from ..tensors.dtypes import HALF_DTYPES
from .base import Edit
from .journal import Journal, Slot, Undoing
from .storage import ParameterStorage, recorded


def _is_exact(original: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a cast from one dtype to another keeps every value."""
    return original in HALF_DTYPES and dtype == torch.float32


@dataclass(eq=False)
class Adapters(Slot):
    """The storage of adapters' parameters, which go back together.

    They stay cast where one of them was trained. A suspension computes with the dtype
    that they are trained in.

    Attributes:
        storages: The storage of each parameter before the cast.
        dtype: The dtype that they are cast to.
    """

    is_lasting = True

    storages: Sequence[ParameterStorage]
    dtype: torch.dtype

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Put the dtypes back where nothing was trained.

        Where something was, all are in the dtype of the cast, also those that others
        cast since.
        """
        there = []
        for storage in self.storages:
            parameter = storage.record.there()
            if parameter is not None:
                there.append((storage, parameter))

        is_trained = any(self._was_trained(*pair) for pair in there)
        for storage, parameter in there:
            if not (is_trained or storage.stores_other(parameter)):
                continue
            if parameter.dtype != self.dtype and not is_sharded_tensor(parameter):
                storage.give(parameter, parameter.data.to(self.dtype))
            if not is_trained:
                storage.record.saw(parameter)  # others may have given it other memory
                storage.undo(tree, Undoing())
            elif parameter.dtype != storage.dtype:
                undoing.kept_dtype.append(storage.record)

    def _was_trained(self, storage: ParameterStorage, parameter: nn.Parameter) -> bool:
        """Whether a parameter has another value than the cast gave it.

        An exact cast by others gives it none. A parameter that was sharded since is
        taken to have one: its values are on several ranks.
        """
        if is_sharded_tensor(parameter):
            return True
        value = parameter.data
        if storage.stores_other(parameter):
            stored = value.to(self.dtype)
            value = value if bool(differ(value, stored)) else stored
        return storage.find(value).is_trained


def cast_adapters(tensors: Sequence[NamedTensor], dtype: torch.dtype) -> Edit:
    """Make the edit that casts adapters' parameters to the dtype of their training.

    Half parameters that become float32 are not held; the originals of others are, on
    the host.

    Args:
        tensors: The parameters, each once, none of them of this dtype.
        dtype: The dtype to cast them to.

    Returns:
        The edit, and what it takes.
    """
    live = most = record_bytes = 0
    for tensor in tensors:
        parameter = tensor.parameter
        cast_bytes = parameter.numel() * dtype.itemsize
        most = max(most, live + cast_bytes)
        is_held = not _is_exact(parameter.dtype, dtype)
        # What is held of a parameter on the CPU is the original itself.
        stays = is_held and parameter.device.type == "cpu"
        live += cast_bytes if stays else cast_bytes - parameter.nbytes
        if is_held and not stays:
            record_bytes += parameter.nbytes

    fqns = tuple(tensor.fqn for tensor in tensors)
    refs = [TensorRef(weakref.ref(tensor.module), tensor.name) for tensor in tensors]

    def apply(journal: Journal, tree: ModelTree) -> None:
        storages = []
        for record, parameter in recorded(tree, fqns, refs):
            is_held = not (parameter.is_meta or _is_exact(parameter.dtype, dtype))
            storages.append(ParameterStorage(record, parameter, keep=is_held))

        journal.save(Adapters(storages, dtype))
        for storage in storages:
            storage.cast(dtype)  # the same object, for its optimizer

    return Edit(
        "cast",
        fqns,
        apply,
        role=Role.ADAPTER,
        added_bytes=live,
        transient_bytes=most,
        record_bytes=record_bytes,
    )
