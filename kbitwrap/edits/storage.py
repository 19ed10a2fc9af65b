"""The edits of storage dtypes.

A parameter is cast to float32 and exactly back, also if it is trained or shares memory.

Half values survive the cast in every bit except NaN payloads, which are recorded
sparsely. A value is untrained if it is exactly representable in the original dtype and
its bits there have the recorded digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ..model.records import ParameterRecord, TensorRef
from ..model.tree import ModelTree, NamedTensor
from ..tensors.bits import Layout, NanPayloads, begin_digest, content_digest, differ
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import LazyTensor
from .base import ChangeBase, EditBase, HeldOriginal, Together, TrainedPolicy
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
class _Found:
    """The value to put back of a parameter.

    With it is what training did to the value that the parameter has.
    """

    original: torch.Tensor
    is_trained: bool
    # whether the value to put back is another than the original
    is_altered: bool
    # whether the current value can be made of it again
    is_exact: bool


class StorageChange(HeldOriginal):
    """The storage of a parameter before a cast.

    The original itself is held where it is asked to be kept, on the CPU; on its device
    where its layer rewrites it (``is_rewritten``); and in its memory, which it goes
    back to, where others see that (``is_seen``). Of another, all bits come from the
    cast value but for the payloads of NaNs, and its digest tells whether they did.
    """

    def __init__(
        self,
        record: ParameterRecord,
        parameter: nn.Parameter,
        *,
        keep: bool = False,
        is_rewritten: bool = False,
        is_seen: bool = False,
    ) -> None:
        data = parameter.detach()
        self.record = record
        self.dtype = data.dtype
        self.layout = Layout.of(data)
        # where other parameters lie over the same memory
        self.group: SharingChange | None = None
        self._is_rewritten, self._is_seen = is_rewritten, is_seen
        self._policy: TrainedPolicy = "keep"
        self.kept: torch.Tensor | None = None
        self._payloads: NanPayloads | None = None
        self._digest: Callable[[], int] | None = None
        if is_rewritten or is_seen:
            self.kept = data
        elif keep:
            self.kept = data.cpu()
        elif not data.is_meta:  # which has no bits
            self._digest = begin_digest(data)
            self._payloads = NanPayloads.find(data)
        # what a suspension puts back, from `now` to `undo`
        self._ready: _Found | None = None

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

    def against_kept(self, current: torch.Tensor) -> torch.Tensor:
        """Whether a value is not the original held, without a sync.

        The three answers are by any dtype that it was cast to on the way, by its own,
        and by the original's.
        """
        assert self.kept is not None
        if self.is_resized(current):
            return torch.ones(3, dtype=torch.bool, device=current.device)
        kept = self.kept.to(current.device)
        is_other = differ(current, kept)
        is_changed = is_other
        # bitsandbytes casts a bias to the dtype of its input, which may have rounded it
        # on the way.
        for step in HALF_DTYPES if self._is_rewritten else ():
            is_changed = is_changed & differ(current, kept.to(step))
        return torch.stack([is_changed, is_other, differ(kept, current)])

    def _find_original(self, current: torch.Tensor) -> _Found:
        """Find the value to put back. An untrained value is in the original layout."""
        found = self._compared(current)
        if not found.is_trained and found.original.stride() != self.layout.stride:
            found.original = self._own(found.original)
        return found

    def _compared(self, current: torch.Tensor) -> _Found:
        """Find the value to put back, in whatever layout."""
        if self.kept is not None:
            return self._compared_with(self.kept, current)
        rounded = self._rounded(current)
        is_altered = is_other = self.is_resized(current)
        if self._digest is not None and not is_altered:
            is_altered = content_digest(rounded) != self._digest()
            is_other = is_altered or bool(differ(current, rounded))
        return _Found(rounded, is_other, is_altered, not is_other)

    def _compared_with(self, kept: torch.Tensor, current: torch.Tensor) -> _Found:
        is_trained, is_other, is_altered = self.against_kept(current).tolist()
        is_discarded = self._policy == "discard" and not self.is_resized(current)
        if is_trained and not is_discarded:
            return _Found(self._rounded(current), True, is_altered, not is_other)
        return _Found(kept.to(current.device), is_trained, False, not is_other)

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
        return self._find_original(current).original

    def converts(self, parameter: torch.Tensor) -> bool:
        """Whether the original is to be computed from what the parameter stores."""
        if self.kept is None or parameter.dtype != self.dtype:
            return parameter.dtype != self.dtype
        return not _is_same_tensor(parameter, self.kept)

    def decide(self, policy: TrainedPolicy) -> None:
        """Set what ``undo`` does with a value that changed since."""
        self._policy = policy

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The original of the live parameter, computed when it is used."""
        if not self.converts(parameter):
            return parameter
        return LazyTensor(
            parameter.shape,
            self.dtype,
            lambda: self.original_of(parameter.data),
            lambda: self._pieces(parameter),
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

    def _current(self) -> nn.Parameter | None:
        """The parameter; ``None`` where it is gone, or stores its original."""
        parameter = self.record.live()
        if parameter is None or not self.converts(parameter):
            return None
        return parameter

    def undo(self, tree: ModelTree) -> None:
        """Put the original storage back.

        It is exact where nothing was trained; else the policy says what is put back.
        """
        parameter = self._current()
        if parameter is None:
            return
        found = self._ready or self._find_original(parameter.data)
        self._ready = None
        if found.is_trained and self._policy == "error":
            raise TrainedError(self.fqn)
        is_resized = self.is_resized(parameter)
        self.was_trained = found.is_trained and not is_resized
        self.was_altered = self.was_trained and found.is_altered
        original = found.original
        if self.kept is not None and self._is_seen and self.group is None:
            # by others, who see what was trained too
            original = original if is_resized else self.kept.copy_(original)
        self.write(parameter, original)

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current storage, bit for bit."""
        parameter = self._current()
        if parameter is None:
            return Call(lambda: None)
        current = parameter.data
        found = self._find_original(current)
        kept, bits = self.kept, None
        if kept is not None and self._is_seen:
            bits = kept.clone()
        elif kept is not None and _is_same_tensor(found.original, kept):
            # What is written into it meanwhile is not what is kept.
            found.original = self._own(kept)
        self._ready = found
        # A value that the original gives exactly is made from it again; only others are
        # held twice.
        is_made = current.dtype == torch.float32 and found.is_exact
        saved = None if is_made else current

        def resume() -> None:
            self._ready = None
            live = self.record.live()
            if live is not None and saved is None:
                self.write(live, live.data.to(torch.float32))
            elif live is not None and saved is not None:
                self.resume(live, saved, self._rounded(saved))
            if kept is not None and bits is not None:
                kept.copy_(bits)

        return Call(resume)


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    is_same_memory = a.device == b.device and a.data_ptr() == b.data_ptr()
    return is_same_memory and a.dtype == b.dtype and Layout.of(a) == Layout.of(b)


class SharingChange(ChangeBase):
    """Parameters that are different objects over the same memory.

    This is undone after the change of each of them.
    """

    def __init__(self, changes: Sequence[StorageChange]) -> None:
        self.changes = changes
        for change in changes:
            change.group = self

    def undo(self, tree: ModelTree) -> None:
        """Let them share memory again where no value was trained."""
        placed, live = [], []
        for change in self.changes:
            parameter = change.record.live()
            if parameter is None:
                continue
            is_other = change.was_trained or change.is_resized(parameter)
            if is_other or parameter.dtype != change.dtype:
                return
            live.append((change, parameter))
            placed.append((parameter.data, change.layout))
        memories = {value.untyped_storage().data_ptr() for value, _ in placed}
        if len(memories) < 2:
            return
        views = Layout.place(placed)
        for (change, parameter), view in zip(live, views, strict=True):
            change.write(parameter, view)

    def now(self, tree: ModelTree) -> WayBack:
        """Record nothing: the parameters are put back one by one."""
        return Call(lambda: None)


@dataclass(frozen=True, kw_only=True)
class Store(EditBase):
    """Store a parameter in another dtype, and record the original storage.

    Several over the same memory are stored by one edit.
    """

    refs: tuple[TensorRef, ...] = field(repr=False)
    dtype: torch.dtype | None = None  # `None`: record only
    keep: bool = False
    # by bitsandbytes (a quantized layer's bias): the originals are held on their device
    is_rewritten: bool = False
    # in its memory, by what is no parameter: it goes back to that memory
    is_seen: bool = False
    record_bytes: int = 0

    def capture(self, tree: ModelTree) -> Together:
        """Record the original storage, or the originals themselves.

        Of the storage, these are dtype, layout, NaN payloads and digest.
        """
        changes = []
        for fqn, ref in zip(self.fqns, self.refs, strict=True):
            module, parameter = ref.owner(), ref()
            assert module is not None
            assert parameter is not None
            record = tree.record(NamedTensor(fqn, module, ref.name, parameter, fqn))
            changes.append(
                StorageChange(
                    record,
                    parameter,
                    keep=self.keep,
                    is_rewritten=self.is_rewritten,
                    is_seen=self.is_seen,
                )
            )
        sharing = [SharingChange(changes)] if len(changes) > 1 else []
        return Together(tree.records, *changes, *sharing)

    def apply(self, change: Together) -> None:
        """Cast by ``.data``: the parameter stays the same object."""
        for one in change.parts():
            if self.dtype is None or not isinstance(one, StorageChange):
                continue
            parameter = one.record.live()
            assert parameter is not None
            for owner, name in one.record.refs:
                module = owner()
                if module is not None:
                    change.records.mark(module).dtypes[name] = one.dtype
            one.write(parameter, parameter.data.to(self.dtype))


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
    policy: TrainedPolicy = "keep"

    def decide(self, policy: TrainedPolicy) -> None:
        """Set whether ``undo`` is to refuse.

        There is no other choice: the copy was made to be trained.
        """
        self.policy = policy

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
