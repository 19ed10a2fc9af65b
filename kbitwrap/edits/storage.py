"""The edits of storage dtypes.

A parameter is cast to float32 and exactly back, also if it is trained or shares memory.

Half values survive the cast in every bit except NaN payloads, which are recorded
sparsely. A value is untrained if it is exactly representable in the original dtype and
its bits there have the recorded digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model.records import ParameterRecord, TensorRef
from ..model.tree import ModelTree, NamedTensor
from ..tensors.bits import (
    Layout,
    NanPayloads,
    content_digest,
    differ,
    digest_and,
    has_nan,
)
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import LazyTensor
from .base import Apply, OriginalSlot
from .journal import Journal, Slot, Undoing

# elements cast at once: few enough for an allocator to use their memory again
_PIECE = 4 << 20


class ValueToPutBack(NamedTuple):
    """The value to put back of a parameter, and what is known of it.

    Attributes:
        value: The original, or what training made of it, rounded.
        is_trained: Whether the stored value is not the original, upcast.
        is_altered: Whether the value to put back is not the original.
        is_exact: Whether upcasting the value to put back gives the stored value.
    """

    value: Tensor
    is_trained: bool
    is_altered: bool
    is_exact: bool


def recorded(
    tree: ModelTree, fqns: Sequence[str], refs: Sequence[TensorRef]
) -> Iterator[tuple[ParameterRecord, nn.Parameter]]:
    """Yield the parameters of an edit that is being applied, each with its record."""
    for fqn, ref in zip(fqns, refs, strict=True):
        module, parameter = ref.owner(), ref()
        assert module is not None
        assert parameter is not None
        yield tree.record(NamedTensor(fqn, module, ref.name, parameter, fqn)), parameter


class ParameterStorage(OriginalSlot):
    """The storage of a parameter, which a cast replaces.

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
        is_shared: Whether other parameters lie over the same memory.

    Attributes:
        layout: The original's layout.
        kept: The original, where it is held.
    """

    def __init__(
        self,
        record: ParameterRecord,
        parameter: nn.Parameter,
        *,
        keep: bool = False,
        is_rewritten: bool = False,
        is_viewed: bool = False,
        is_shared: bool = False,
    ) -> None:
        data = parameter.detach()
        self.record = record
        self.dtype = data.dtype
        self.layout = Layout.of(data)
        self._is_rewritten = is_rewritten
        self._is_viewed = is_viewed
        self._is_shared = is_shared
        self.kept: Tensor | None = None
        self._payloads = None
        self._digest = None
        if is_rewritten or is_viewed:
            self.kept = data
        elif keep:
            self.kept = data.cpu()
        elif not data.is_meta:  # which has no bits
            self._digest, holds_nan = digest_and(data, has_nan(data))
            self._payloads = NanPayloads.find(data) if holds_nan else None

    def cast(self, dtype: torch.dtype | None) -> None:
        """Give the parameter, which is there, its value in another dtype."""
        parameter = self.record.live()
        assert parameter is not None
        self.give(parameter, parameter.data.to(dtype))

    def is_resized(self, current: Tensor) -> bool:
        """Whether others gave a value another shape; it is not counted as trained."""
        return tuple(current.shape) != self.layout.shape

    def _round(self, current: Tensor) -> Tensor:
        """Round a value to the original dtype, NaN payloads included, in new memory."""
        rounded = current.detach().to(self.dtype, copy=True)
        if self._payloads is not None and not self.is_resized(rounded):
            self._payloads.write(rounded)

        return rounded

    def compare(self, current: Tensor) -> Tensor:
        """Compare a value with the original that is held; does not wait for the device.

        Returns:
            Two booleans: whether the value was trained, that is, differs from the
                original and from whatever its layer may have rounded that to; and
                whether it is the original's cast.
        """
        assert self.kept is not None
        if self.is_resized(current):
            return torch.tensor([True, False], device=current.device)

        kept = self.kept.to(current.device)
        is_other = differ(current, kept)  # compared in float32
        is_trained = is_other
        if self._is_rewritten:
            # bitsandbytes may have rounded a bias to the dtype of its input
            for half in HALF_DTYPES:
                is_trained = is_trained & differ(current, kept.to(half))

        return torch.stack([is_trained, ~is_other])

    def find(self, current: Tensor, *, discards: bool = False) -> ValueToPutBack:
        """Find the value to put back: the original, or else what training made of it.

        The original tells the two apart where it is held, elsewhere the digest of the
        rounded value. With ``discards``, which needs that all originals are held, the
        original is put back whatever was trained, unless others resized it. An untrained
        value is in the original layout.
        """
        is_resized = self.is_resized(current)
        if self.kept is None:
            value = self._round(current)
            is_altered = is_resized
            if self._digest is not None and not is_resized:
                is_altered = content_digest(value) != self._digest
            # Training may leave a value that rounds to the original.
            is_trained = is_altered or bool(differ(current, value))
            is_exact = not is_trained
        else:
            is_trained, is_exact = self.compare(current).tolist()
            original = self.kept.to(current.device)
            value, is_altered = original, False
            if is_trained and (is_resized or not discards):
                value = self._round(current)
                is_altered = is_resized or bool(differ(value, original))

        if not is_trained and value.stride() != self.layout.stride:
            value = self._lay_out(value)
        return ValueToPutBack(value, is_trained, is_altered, is_exact)

    def _lay_out(self, value: Tensor) -> Tensor:
        """Copy a value into the original layout."""
        return Layout.place([(value, self.layout)])[0]

    def original_of(self, current: Tensor) -> Tensor:
        """Return the original by what the parameter stores, as ``original`` does."""
        if self.kept is None:
            return self._round(current)
        return current if self._is_kept(current) else self.find(current).value

    def stores_other(self, parameter: Tensor) -> bool:
        """Whether the parameter stores something else than its original."""
        is_other_memory = self.kept is not None and not self._is_kept(parameter)
        return is_other_memory or parameter.dtype != self.dtype

    def _is_kept(self, tensor: Tensor) -> bool:
        """Whether a tensor is the original that is held: its memory, seen in the same way."""
        kept = self.kept
        if kept is None or (tensor.device, tensor.dtype) != (kept.device, kept.dtype):
            return False
        is_same_memory = tensor.data_ptr() == kept.data_ptr()
        return is_same_memory and Layout.of(tensor) == Layout.of(kept)

    def original(self, parameter: Tensor) -> Tensor:
        """Return the original of the live parameter, computed when it is used."""
        if not self.stores_other(parameter):
            return parameter

        def pieces() -> Iterator[Tensor]:
            """Yield its values in flat pieces, so that not all are in memory at once."""
            is_rounded = self.kept is None and self._payloads is None
            if is_rounded and parameter.is_contiguous():
                for piece in parameter.detach().view(-1).split(_PIECE):
                    yield piece.to(self.dtype)
            else:
                yield self.original_of(parameter.data).reshape(-1)

        return LazyTensor(
            parameter.shape,
            self.dtype,
            compute=lambda: self.original_of(parameter.data),
            pieces=pieces,
            is_own=self.kept is None,
        )

    def cast_parameter(self) -> nn.Parameter | None:
        """Return the parameter; ``None`` if it is gone, or stores its original."""
        parameter = self.record.live()
        if parameter is not None and self.stores_other(parameter):
            return parameter
        return None

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Put the original storage back.

        It is exact where nothing was trained; else the policy says what is put back.
        """
        parameter = self.cast_parameter()
        if parameter is None:
            return

        if undoing.now is not None:
            # `Suspended.value` is the same dict: the value is taken out, so that it is freed.
            found: ValueToPutBack = undoing.now.pop("found")
        else:
            discards = undoing.policy == "discard"
            found = self.find(parameter.data, discards=discards)
        if found.is_trained and undoing.policy == "error":
            raise self.trained_error()

        is_resized = self.is_resized(parameter)
        if found.is_trained and not is_resized:
            if parameter.requires_grad:
                undoing.trained.append(self.record.fqn)
            elif found.is_altered:
                undoing.replaced.append(self.record.fqn)
        value = found.value
        fits_there = not (self._is_shared or is_resized)
        if self.kept is not None and self._is_viewed and fits_there:
            # into the memory that is viewed: the views show what was trained too
            value = self.kept.copy_(value)

        self.give(parameter, value)

    def read(self, tree: ModelTree) -> Any:
        """Return what ``undo`` is to put back, and the current storage, bit for bit.

        Where upcasting what is put back gives the current value, that is not held. With
        it are the bits of the original that is held, where ``undo`` and others write it.
        """
        parameter = self.cast_parameter()
        if parameter is None:
            return None

        current = parameter.data
        found = self.find(current)
        kept_bits = None
        if self.kept is not None and self._is_viewed:
            kept_bits = self.kept.clone()
        elif self.kept is not None and self._is_kept(found.value):
            # What others write into the parameter meanwhile must not be what is kept.
            found = found._replace(value=self._lay_out(self.kept))

        is_made = current.dtype == torch.float32 and found.is_exact
        saved = None if is_made else current
        return {"found": found, "saved": saved, "kept_bits": kept_bits}

    def resume(self, tree: ModelTree, value: Any) -> None:
        """Store what was stored before, but for what others wrote."""
        if value is None:
            return

        saved, kept_bits = value["saved"], value["kept_bits"]
        parameter = self.record.live()
        if parameter is not None and saved is None:
            self.give(parameter, parameter.data.to(torch.float32))
        elif parameter is not None:
            self.give_again(parameter, saved, self._round(saved))

        if self.kept is not None and kept_bits is not None:
            self.kept.copy_(kept_bits)


class SharedMemory(Slot):
    """The memory that several parameters lay over, each a different object.

    It is undone after the storage of each of them.
    """

    def __init__(self, storages: Sequence[ParameterStorage]) -> None:
        self.storages = storages

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Let them share memory again, unless that would change a value of one."""
        there = []
        for storage in self.storages:
            parameter = storage.record.live()
            if parameter is None:
                continue
            if storage.is_resized(parameter) or parameter.dtype != storage.dtype:
                return
            there.append((storage, parameter))

        memories = {one.data.untyped_storage().data_ptr() for _, one in there}
        if len(memories) < 2:
            return  # they share it already, or one alone is left

        values = [one.data for _, one in there]
        layouts = [storage.layout for storage, _ in there]
        views = Layout.place([*zip(values, layouts, strict=True)])
        if any(map(differ, views, values)):
            return
        for (storage, parameter), view in zip(there, views, strict=True):
            storage.give(parameter, view)


def store(
    fqns: Sequence[str],
    refs: Sequence[TensorRef],
    dtype: torch.dtype | None,
    held: Mapping[str, bool],
) -> Apply:
    """Store parameters of one memory in another dtype, and record the original storage.

    The cast is by ``.data``: each parameter stays the same object.

    Args:
        fqns: The names of the parameters.
        refs: Their places.
        dtype: The dtype; ``None`` records only.
        held: The cases in which `ParameterStorage` holds the originals.
    """

    def apply(journal: Journal, tree: ModelTree) -> None:
        is_shared = len(refs) > 1
        storages = []
        for record, parameter in recorded(tree, fqns, refs):
            storage = ParameterStorage(record, parameter, is_shared=is_shared, **held)
            storages.append(storage)

        if is_shared:
            journal.save(SharedMemory(storages))
        journal.save(*reversed(storages))
        for storage in storages if dtype is not None else ():
            for owner, name in storage.record.refs:
                module = owner()
                if module is not None:
                    tree.records.mark(module).dtypes[name] = storage.dtype
            storage.cast(dtype)

    return apply


@dataclass(eq=False)
class Copy(OriginalSlot):
    """PEFT's copy of an upcast parameter, which undoing rounds.

    Attributes:
        record: The record of the copy.
        dtype: The dtype of the original.
        parameter: The copy.
        is_base: Whether it is a parameter of the base, which others cast.
        is_resized: Whether it has another shape than the original.
    """

    record: ParameterRecord
    dtype: torch.dtype
    parameter: nn.Parameter
    is_base: bool
    is_resized: bool

    def undo(self, tree: ModelTree, undoing: Undoing) -> None:
        """Round the value to the original dtype; the Parameter object stays."""
        is_unchanged = self.is_base and self.record.fqn not in undoing.changed
        if undoing.policy == "error" and not is_unchanged:
            raise self.trained_error()
        self.give(self.parameter, self.parameter.data.to(self.dtype))

    def read(self, tree: ModelTree) -> Tensor:
        """Return the exact float32 value."""
        return self.parameter.data

    def resume(self, tree: ModelTree, value: Tensor) -> None:
        """Store the float32 value, but for what others wrote."""
        self.give_again(self.parameter, value, value.to(self.dtype))

    def original(self, parameter: Tensor) -> Tensor:
        """Return the live parameter, rounded to the original dtype when it is used."""
        shape, dtype = parameter.shape, self.dtype
        return LazyTensor(shape, dtype, lambda: parameter.data.to(dtype))
