"""The edits of storage dtypes.

A parameter is cast to float32 and exactly back, also if it is trained or shares memory.

Half values survive the cast in every bit except NaN payloads, which are recorded
sparsely. A value is untrained if it is exactly representable in the original dtype and
its bits there have the recorded digest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..model.records import ParameterRecord, TensorRef
from ..model.tree import ModelTree, NamedTensor
from ..tensors.bits import (
    Layout,
    NanPayloads,
    content_digest,
    differ,
)
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import LazyTensor
from .base import EditBase, HeldOriginal
from .journal import Call, WayBack

# elements cast at once: few enough for an allocator to use their memory again
_PIECE = 4 << 20


class TrainedError(RuntimeError):
    """The value of a parameter changed while it was stored upcast.

    The caller asked for that to be an error.
    """

    def __init__(self, fqn: str) -> None:
        super().__init__(f"{fqn} was trained while it was stored in {torch.float32}")


@dataclass
class Found:
    """The value to put back of a parameter, and how it was told."""

    value: torch.Tensor
    # whether what the parameter has differs from the original's cast
    is_trained: bool
    # whether the value to put back differs from the original
    is_altered: bool
    # whether upcasting the value to put back is known to give what the parameter has
    is_exact: bool


@dataclass
class Comparison:
    """A stored value against the original that is held.

    Each answer is a boolean scalar on the value's device.
    """

    # it differs from the original, and from whatever its layer may have rounded that to
    is_trained: torch.Tensor
    # it differs from the original cast to its dtype
    is_inexact: torch.Tensor
    # rounded to the original's dtype, it differs from the original
    is_altered: torch.Tensor


def recorded(
    tree: ModelTree, fqns: Sequence[str], refs: Sequence[TensorRef]
) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
    """The parameters of an edit that is being captured, each with its record."""
    for fqn, ref in zip(fqns, refs, strict=True):
        module, parameter = ref.owner(), ref()
        assert module is not None
        assert parameter is not None
        record = tree.record(NamedTensor(fqn, module, ref.name, parameter, fqn))
        yield record, parameter


class StorageChange(HeldOriginal):
    """The storage of a parameter before a cast.

    The original itself is held in three cases only, which are arguments. Else all its
    bits come from the cast value, but for the payloads of NaNs, and its digest tells
    whether they did.

    Args:
        record: The record of the parameter.
        parameter: The parameter, which still stores the original.
        keep: Hold the original on the CPU, because that was asked for.
        is_rewritten: Hold it on its device, because its layer rewrites it.
        is_viewed: Hold it in its memory, of which others have views. It goes back
            there.

    Attributes:
        layout: The original's layout.
        kept: The original, where it is held.
        group: The parameters that lie over the same memory, where there are others.
    """

    def __init__(
        self,
        record: ParameterRecord,
        parameter: nn.Parameter,
        *,
        keep: bool = False,
        is_rewritten: bool = False,
        is_viewed: bool = False,
    ) -> None:
        data = parameter.detach()
        self.record = record
        self.dtype = data.dtype
        self.layout = Layout.of(data)
        self.group: SharingChange | None = None
        self._is_rewritten = is_rewritten
        self._is_viewed = is_viewed
        self.kept: torch.Tensor | None = None
        self._payloads: NanPayloads | None = None
        self._digest: int | None = None
        if is_rewritten or is_viewed:
            self.kept = data
        elif keep:
            self.kept = data.cpu()
        elif not data.is_meta:  # which has no bits
            self._digest = content_digest(data)
            self._payloads = NanPayloads.find(data)

        # what a suspension puts back, from `now` to `undo`
        self._ready: Found | None = None

    def is_resized(self, current: torch.Tensor) -> bool:
        """Whether others gave a value another shape; it is not counted as trained."""
        return tuple(current.shape) != self.layout.shape

    def _rounded(self, current: torch.Tensor) -> torch.Tensor:
        """The current value in the original dtype, NaN payloads included.

        It is in memory of its own.
        """
        rounded = current.detach().to(self.dtype, copy=True)
        if self._payloads is not None and not self.is_resized(rounded):
            self._payloads.write(rounded)

        return rounded

    def against_kept(self, current: torch.Tensor) -> Comparison:
        """Compare a value with the original held, without a sync."""
        assert self.kept is not None
        if self.is_resized(current):
            differs = torch.ones((), dtype=torch.bool, device=current.device)
            return Comparison(differs, differs, differs)

        kept = self.kept.to(current.device)
        is_inexact = is_trained = differ(current, kept)
        # bitsandbytes casts a bias to the dtype of its input, which may have rounded it
        # on the way.
        for step in HALF_DTYPES if self._is_rewritten else ():
            is_trained = is_trained & differ(current, kept.to(step))

        return Comparison(is_trained, is_inexact, is_altered=differ(kept, current))

    def find_value(self, current: torch.Tensor) -> Found:
        """Find the value to put back. An untrained value is in the original layout.

        What is rounded has the layout of the current value.
        """
        found = self._find_in_any_layout(current)
        if not found.is_trained and found.value.stride() != self.layout.stride:
            found.value = self._own(found.value)

        return found

    def _find_in_any_layout(self, current: torch.Tensor) -> Found:
        """Find the value to put back, in whatever layout."""
        if self.kept is not None:
            return self._find_by_kept(self.kept, current)

        rounded = self._rounded(current)
        if self.is_resized(current):
            return Found(rounded, is_trained=True, is_altered=True, is_exact=False)

        is_altered = False
        if self._digest is not None:
            is_altered = content_digest(rounded) != self._digest
        # Training may leave a value that rounds to the original.
        is_trained = is_altered or bool(differ(current, rounded))
        return Found(rounded, is_trained, is_altered, is_exact=not is_trained)

    def _find_by_kept(self, kept: torch.Tensor, current: torch.Tensor) -> Found:
        """Find the value to put back where the original is held."""
        compared = self.against_kept(current)
        answers = [compared.is_trained, compared.is_inexact, compared.is_altered]
        is_trained, is_inexact, is_altered = torch.stack(answers).tolist()
        # A value that others resized is not the original's to discard.
        is_discarded = self.policy == "discard" and not self.is_resized(current)
        if is_trained and not is_discarded:
            rounded = self._rounded(current)
            return Found(rounded, True, is_altered, is_exact=not is_inexact)

        original = kept.to(current.device)
        return Found(original, is_trained, is_altered=False, is_exact=not is_inexact)

    def _own(self, original: torch.Tensor) -> torch.Tensor:
        """A copy of a value in the original layout."""
        return Layout.place([(original, self.layout)])[0]

    def original_of(self, current: torch.Tensor) -> torch.Tensor:
        """The value that ``restore(trained="keep")`` would put back.

        ``current`` is what the parameter stores.
        """
        if self.kept is None:
            return self._rounded(current)

        if _is_same_tensor(current, self.kept):
            return current

        return self.find_value(current).value

    def converts(self, parameter: torch.Tensor) -> bool:
        """Whether the original is to be computed from what the parameter stores."""
        if self.kept is None or parameter.dtype != self.dtype:
            return parameter.dtype != self.dtype
        return not _is_same_tensor(parameter, self.kept)

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The original of the live parameter, computed when it is used."""
        if not self.converts(parameter):
            return parameter
        return LazyTensor(
            parameter.shape,
            self.dtype,
            compute=lambda: self.original_of(parameter.data),
            pieces=lambda: self._pieces(parameter),
            is_own=self.kept is None,
        )

    def _pieces(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """The original's values in flat pieces.

        So not all of them are in memory at once.
        """
        is_rounded = self.kept is None and self._payloads is None
        if is_rounded and parameter.is_contiguous():
            for piece in parameter.detach().view(-1).split(_PIECE):
                yield piece.to(self.dtype)
        else:
            yield self.original_of(parameter.data).reshape(-1)

    def current(self) -> nn.Parameter | None:
        """The parameter; ``None`` where it is gone, or stores its original."""
        parameter = self.record.live()
        if parameter is None or not self.converts(parameter):
            return None

        return parameter

    def undo(self, tree: ModelTree) -> None:
        """Put the original storage back.

        It is exact where nothing was trained; else the policy says what is put back.
        """
        parameter = self.current()
        if parameter is None:
            return

        found = self._ready or self.find_value(parameter.data)
        self._ready = None
        if found.is_trained and self.policy == "error":
            raise TrainedError(self.fqn)

        is_resized = self.is_resized(parameter)
        self.was_trained = found.is_trained and not is_resized
        self.was_altered = self.was_trained and found.is_altered
        value = found.value
        is_alone = self.group is None and not is_resized
        if self.kept is not None and self._is_viewed and is_alone:
            # into the memory that is viewed: the views show what was trained too
            value = self.kept.copy_(value)

        self.write(parameter, value)

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current storage, bit for bit."""
        parameter = self.current()
        if parameter is None:
            return Call(lambda: None)

        current = parameter.data
        found = self.find_value(current)
        kept_bits = None
        if self.kept is not None and self._is_viewed:
            # `undo` writes into the original itself, and so may others meanwhile.
            kept_bits = self.kept.clone()
        elif self.kept is not None and _is_same_tensor(found.value, self.kept):
            # What others write into the parameter meanwhile must not be what is kept.
            found.value = self._own(self.kept)

        self._ready = found
        # Where upcasting what is put back gives the current value, it is made so again,
        # and not held meanwhile.
        is_made = current.dtype == torch.float32 and found.is_exact
        saved = None if is_made else current
        return Call(functools.partial(self._store_again, saved, kept_bits))

    def _store_again(
        self, saved: torch.Tensor | None, kept_bits: torch.Tensor | None
    ) -> None:
        """End a suspension.

        Args:
            saved: What the parameter stored before; ``None`` to upcast what it stores.
            kept_bits: What the original that is held was, where others may write it.
        """
        self._ready = None
        parameter = self.record.live()
        if parameter is not None and saved is None:
            self.write(parameter, parameter.data.to(torch.float32))
        elif parameter is not None and saved is not None:
            self.resume(parameter, saved, self._rounded(saved))

        if self.kept is not None and kept_bits is not None:
            self.kept.copy_(kept_bits)


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    is_same_memory = a.device == b.device and a.data_ptr() == b.data_ptr()
    return is_same_memory and a.dtype == b.dtype and Layout.of(a) == Layout.of(b)


class SharingChange:
    """Parameters that are different objects over the same memory.

    This is undone after the change of each of them.
    """

    def __init__(self, changes: Sequence[StorageChange]) -> None:
        self.changes = changes
        for change in changes:
            change.group = self

    def undo(self, tree: ModelTree) -> None:
        """Let them share memory again, unless one has another value than it had."""
        changes, parameters = [], []
        for change in self.changes:
            parameter = change.record.live()
            if parameter is None:
                continue
            is_other = change.was_trained or change.is_resized(parameter)
            if is_other or parameter.dtype != change.dtype:
                return
            changes.append(change)
            parameters.append(parameter)

        memories = {one.data.untyped_storage().data_ptr() for one in parameters}
        if len(memories) < 2:
            return  # they share it already, or one alone is left

        layouts = [change.layout for change in changes]
        values = [one.data for one in parameters]
        views = Layout.place([*zip(values, layouts, strict=True)])
        for change, parameter, view in zip(changes, parameters, views, strict=True):
            change.write(parameter, view)

    def now(self, tree: ModelTree) -> WayBack:
        """Record nothing: the parameters are put back one by one."""
        return Call(lambda: None)


@dataclass(frozen=True, kw_only=True)
class Store(EditBase):
    """Store a parameter in another dtype, and record the original storage.

    Several over the same memory are stored by one edit.

    Attributes:
        refs: The places of the parameters.
        dtype: The dtype to store; ``None`` records only.
        keep: Whether the originals are held, on the CPU.
        is_rewritten: Whether bitsandbytes rewrites them, as a quantized layer's bias.
            Then they are held on their device.
        is_viewed: Whether a plain tensor or a buffer views their memory. Then they go
            back to that very memory.
        record_bytes: The bytes of the originals that are held beside the cast ones.
        digest_bytes: The most bytes that the digests of the originals hold.
    """

    refs: tuple[TensorRef, ...] = field(repr=False)
    dtype: torch.dtype | None = None
    keep: bool = False
    is_rewritten: bool = False
    is_viewed: bool = False
    record_bytes: int = 0
    digest_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Of the originals that are held, what stays on their device."""
        return self.record_bytes if self.is_rewritten else 0

    def capture(self, tree: ModelTree) -> list[Any]:
        """Record the original storage, or the originals themselves.

        Of the storage, these are dtype, layout, NaN payloads and digest.
        """
        changes = []
        for record, parameter in recorded(tree, self.fqns, self.refs):
            change = StorageChange(
                record,
                parameter,
                keep=self.keep,
                is_rewritten=self.is_rewritten,
                is_viewed=self.is_viewed,
            )
            changes.append(change)

        return changes if len(changes) == 1 else [*changes, SharingChange(changes)]

    def apply(self, changes: list[Any], tree: ModelTree) -> None:
        """Cast by ``.data``: the parameter stays the same object."""
        if self.dtype is None:
            return
        # A `SharingChange` may follow these, which has no parameter of its own.
        for change in changes[: len(self.refs)]:
            parameter = change.record.live()
            for owner, name in change.record.refs:
                module = owner()
                if module is not None:
                    tree.records.mark(module).dtypes[name] = change.dtype
            change.write(parameter, parameter.data.to(self.dtype))


@dataclass(eq=False)
class CopyChange(HeldOriginal):
    """PEFT's copy of an upcast parameter, which undoing rounds.

    With ``is_base`` it is a parameter of the base that others cast.
    """

    record: ParameterRecord
    parameter: nn.Parameter
    dtype: torch.dtype
    is_base: bool = False
    is_resized: bool = False

    def undo(self, tree: ModelTree) -> None:
        """Round the value to the original dtype; the Parameter object stays."""
        if self.policy == "error":
            raise TrainedError(self.fqn)
        self.write(self.parameter, self.parameter.data.to(self.dtype))

    def now(self, tree: ModelTree) -> WayBack:
        """Record the exact float32 value."""
        saved = self.parameter.data
        return Call(lambda: self.resume(self.parameter, saved, saved.to(self.dtype)))

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The live parameter, rounded to the original dtype when it is used."""
        shape, dtype = parameter.shape, self.dtype
        return LazyTensor(shape, dtype, lambda: parameter.data.to(dtype))
