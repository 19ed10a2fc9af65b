"""The edit of adapters' dtypes.

Adapters that were trained stay in the dtype that they were trained in: rounding them
would lose what was learned. Those that were not go back exactly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..model.records import ParameterRecord, TensorRef
from ..model.roles import Role
from ..model.tree import ModelTree, NamedTensor
from ..model.wrappers import is_sharded_tensor
from ..tensors.bits import differ
from ..tensors.dtypes import HALF_DTYPES
from .base import EditBase
from .journal import Lasting
from .storage import StorageChange, recorded


def _is_exact(original: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether a cast from one dtype to another keeps every value."""
    return original in HALF_DTYPES and dtype == torch.float32


class AdaptersChange(Lasting):
    """Adapters as they were before they were cast.

    They go back together, unless one of them was trained. A suspension leaves them
    alone: it computes with the dtype that they are trained in.

    Args:
        changes: The storage of each of their parameters before the cast.
        dtype: The dtype that they are cast to.

    Attributes:
        changes: The same.
        kept: The records of what the last undo left in another dtype than it had.
    """

    def __init__(self, changes: Sequence[StorageChange], dtype: torch.dtype) -> None:
        self.changes = changes
        self.kept: tuple[ParameterRecord, ...] = ()
        self._dtype = dtype

    def undo(self, tree: ModelTree) -> None:
        """Put the dtypes back where nothing was trained.

        Where something was, all are in the dtype of the cast, also those that others
        cast since.
        """
        there = []
        for change in self.changes:
            parameter = change.record.there()
            if parameter is not None:
                there.append((change, parameter))

        if any(self._was_trained(*pair) for pair in there):
            self.kept = tuple(filter(None, (self._keep(*pair) for pair in there)))
            return
        self.kept = ()
        for change, parameter in there:
            self._put_back(change, parameter, tree)

    def _was_trained(self, change: StorageChange, parameter: nn.Parameter) -> bool:
        """Whether a parameter has another value than the cast gave it.

        A cast by others that is exact gives it none. What was sharded since is taken to
        have one: its values are on several ranks.
        """
        if is_sharded_tensor(parameter):
            return True
        if not change.converts(parameter):
            return change.find_value(parameter.data).is_trained
        stored = parameter.data.to(self._dtype)
        is_other = bool(differ(parameter.data, stored))
        return change.find_value(parameter.data if is_other else stored).is_trained

    def _keep(
        self, change: StorageChange, parameter: nn.Parameter
    ) -> ParameterRecord | None:
        """Leave a parameter in the dtype of the cast.

        Returns:
            Its record, where that is not the dtype that it had.
        """
        is_cast_since = parameter.dtype != self._dtype
        if is_cast_since and not is_sharded_tensor(parameter):
            change.write(parameter, parameter.data.to(self._dtype))
        return change.record if parameter.dtype != change.dtype else None

    def _put_back(
        self, change: StorageChange, parameter: nn.Parameter, tree: ModelTree
    ) -> None:
        """Give a parameter, which was not trained, its original storage."""
        if not change.converts(parameter):
            return
        if parameter.dtype == self._dtype:
            change.record.saw(parameter)  # others may have given it other memory
        else:
            change.write(parameter, parameter.data.to(self._dtype))
        change.undo(tree)


@dataclass(frozen=True, kw_only=True)
class CastAdapters(EditBase):
    """Cast the parameters of adapters to the dtype that they are to be trained in.

    Attributes:
        refs: The places of the parameters.
        dtype: The dtype.
        record_bytes: The bytes of the originals that are held on the host, beside the
            cast ones. Half parameters that become float32 are not held.
    """

    refs: tuple[TensorRef, ...] = field(repr=False)
    dtype: torch.dtype
    record_bytes: int = 0

    @classmethod
    def of(cls, tensors: Sequence[NamedTensor], dtype: torch.dtype) -> CastAdapters:
        """Make the edit of some parameters, and count what it takes.

        Args:
            tensors: The parameters, each once, none of them of this dtype.
            dtype: The dtype to cast them to.

        Returns:
            The edit.
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
        return cls(
            "cast",
            tuple(tensor.fqn for tensor in tensors),
            role=Role.ADAPTER,
            added_bytes=live,
            transient_bytes=most,
            refs=tuple(TensorRef(weakref.ref(t.module), t.name) for t in tensors),
            dtype=dtype,
            record_bytes=record_bytes,
        )

    def capture(self, tree: ModelTree) -> list[AdaptersChange]:
        """Record the storage of each parameter, or the original itself."""
        changes = []
        for record, parameter in recorded(tree, self.fqns, self.refs):
            is_held = not parameter.is_meta
            is_held &= not _is_exact(parameter.dtype, self.dtype)
            changes.append(StorageChange(record, parameter, keep=is_held))

        return [AdaptersChange(changes, self.dtype)]

    def apply(self, changes: list[AdaptersChange], tree: ModelTree) -> None:
        """Cast by ``.data``: each parameter stays the same object, for its optimizer."""
        for change in changes[0].changes:
            parameter = change.record.live()
            assert parameter is not None
            change.write(parameter, parameter.data.to(self.dtype))
