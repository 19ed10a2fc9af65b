"""The edits of storage dtypes: a parameter is cast to float32 and exactly back, also if it is trained or shares memory.

Half values survive the cast in every bit except NaN payloads, which are recorded
sparsely. A value is untrained if it is exactly representable in the original dtype and
its bits there have the recorded digest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
    """Values of parameters changed while they were stored upcast, and the caller asked for that to be an error."""

    def __init__(self, fqns: Sequence[str]) -> None:
        super().__init__(
            "; ".join(
                f"{fqn} was trained while it was stored in {torch.float32}"
                for fqn in fqns
            )
        )
        self.fqns = tuple(fqns)


class _Found(NamedTuple):
    """The value to put back of a parameter, and what training did to the one that it has."""

    original: torch.Tensor
    is_trained: bool
    is_altered: bool  # whether the value to put back is another than the original
    is_exact: bool  # whether the current value can be made of it again


class StorageChange(HeldOriginal):
    """The storage of a parameter before a cast; with ``keep`` the original itself, on the CPU or ``on_device``."""

    def __init__(
        self,
        record: ParameterRecord,
        parameter: nn.Parameter,
        keep: bool = False,
        on_device: bool = False,
        is_seen: bool = False,
    ) -> None:
        data = parameter.detach()
        self.record = record
        self.dtype = data.dtype
        self.kept = (
            (data if on_device or is_seen else data.cpu()) if keep or is_seen else None
        )
        # whether `undo` found another shape; such a value is not counted as trained
        self.was_resized = False
        # where other parameters lie over the same memory
        self.group: SharingChange | None = None
        self.layout = Layout.of(data)
        self._is_rewritten, self._is_seen = on_device, is_seen
        self._policy: TrainedPolicy = "keep"
        self._payloads: NanPayloads | None = None
        self._digest: Callable[[], int] | None = None
        if self.kept is None and not data.is_meta:  # which has no bits
            self._digest = begin_digest(data)
            self._payloads = NanPayloads.find(data)
        self._is_undone = False
        self._ready: tuple[torch.Tensor, _Found] | None = None

    def _rounded(self, current: torch.Tensor) -> torch.Tensor:
        """The current value in the original dtype, NaN payloads included."""
        # A value in the original dtype already is live memory, and payloads are written
        # into a copy only.
        rounded = current.detach().to(self.dtype, copy=self._payloads is not None)
        if self._payloads is not None and tuple(rounded.shape) == self.layout.shape:
            self._payloads.write(rounded)
        return rounded

    def against_kept(self, current: torch.Tensor) -> torch.Tensor:
        """Whether a value is not the original held: in any dtype, in its own, and in the original's, without a sync."""
        assert self.kept is not None
        if tuple(current.shape) != self.layout.shape:
            return torch.ones(3, dtype=torch.bool, device=current.device)
        kept = self.kept.to(current.device)
        is_other = differ(current, kept)
        # bitsandbytes casts a bias to the dtype of its input, which may have rounded it
        # on the way.
        steps = [
            step
            for step in HALF_DTYPES
            if self._is_rewritten and step not in (self.dtype, current.dtype)
        ]
        is_changed = torch.stack(
            [is_other, *(differ(current, kept.to(step)) for step in steps)]
        ).all()
        return torch.stack([is_changed, is_other, differ(kept, current)])

    def _find_original(self, current: torch.Tensor) -> _Found:
        """Find the value to put back. An untrained value is in the original layout."""
        is_resized = tuple(current.shape) != self.layout.shape
        rounded = self._rounded(current) if self.kept is None else None
        if rounded is not None:
            is_altered = is_resized
            is_other = is_resized
            if self._digest is not None and not is_resized:
                is_altered = content_digest(rounded) != self._digest()
                is_other = is_altered or bool(differ(current, rounded))
            is_trained = is_other
        else:
            is_trained, is_other, is_altered = self.against_kept(current).tolist()
        if self.kept is not None and (
            not is_trained or (self._policy == "discard" and not is_resized)
        ):
            rounded, is_altered = self.kept.to(current.device), False
        original = self._rounded(current) if rounded is None else rounded
        if not is_trained and original.stride() != self.layout.stride:
            original = Layout.place([(original, self.layout)])[0]
        return _Found(original, is_trained, is_altered, not is_other)

    def original_of(self, current: torch.Tensor) -> torch.Tensor:
        """The value that ``restore(trained="keep")`` would put back of a parameter that stores ``current``."""
        if self.kept is None:
            return self._rounded(current)
        return (
            current
            if _is_same_tensor(current, self.kept)
            else self._find_original(current).original
        )

    def converts(self, parameter: torch.Tensor) -> bool:
        """Whether the original is to be computed from what the parameter stores."""
        return parameter.dtype != self.dtype or not (
            self.kept is None or _is_same_tensor(parameter, self.kept)
        )

    def decide(self, policy: TrainedPolicy) -> None:
        """Set what ``undo`` does with a value that changed while it was stored upcast."""
        self._policy = policy

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The original of the live parameter, computed when it is used; see ``HeldOriginal``."""
        if not self.converts(parameter):
            return parameter

        # never live memory, if another dtype was given to the parameter since
        def compute() -> torch.Tensor:
            return self.original_of(
                parameter.data if self.converts(parameter) else parameter.data.clone()
            )

        pieces = functools.partial(self._pieces, parameter)
        return LazyTensor(
            parameter.shape, self.dtype, compute, pieces, is_own=self.kept is None
        )

    def _pieces(self, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
        """The original's values in flat pieces, so that not all of them are in memory at once."""
        if (
            self.kept is not None
            or self._payloads is not None
            or not parameter.is_contiguous()
        ):
            yield self.original_of(parameter.data).reshape(-1)
            return
        for piece in parameter.detach().view(-1).split(_PIECE):
            yield piece.to(self.dtype)

    def _current(self) -> nn.Parameter | None:
        """The parameter, or ``None`` where it is gone or stores the original that this change holds."""
        parameter = self.record.live()
        is_original = (
            parameter is not None
            and self.kept is not None
            and _is_same_tensor(parameter, self.kept)
        )
        return None if is_original else parameter

    def undo(self, tree: ModelTree) -> None:
        """Put the original storage back, exactly where nothing was trained, else by the policy."""
        parameter = self._current()
        if parameter is None or self._is_undone:
            return
        ready, self._ready = self._ready, None
        is_ready = ready is not None and _is_same_tensor(ready[0], parameter.data)
        found = (
            ready[1]
            if ready is not None and is_ready
            else self._find_original(parameter.data)
        )
        is_trained = found.is_trained and self.converts(parameter)
        if is_trained and self._policy == "error":
            raise TrainedError([self.record.fqn])
        self.was_resized = tuple(parameter.shape) != self.layout.shape
        self.was_trained = is_trained and not self.was_resized
        self.was_altered = self.was_trained and found.is_altered
        # by others, who see the value too
        if self._is_seen and self.was_trained and self.group is None:
            assert self.kept is not None
            found = found._replace(original=self.kept.copy_(found.original))
        self.write(parameter, found.original)
        self._is_undone = True

    def now(self, tree: ModelTree) -> WayBack:
        """Record the current storage, bit for bit."""
        parameter = self._current()
        if parameter is None:
            return Call(lambda: None)
        current = parameter.data
        dtype = current.dtype
        found = self._find_original(current)
        bits = self.kept.clone() if self.kept is not None and self._is_seen else None
        if (
            self.kept is not None
            and _is_same_tensor(found.original, self.kept)
            and not self._is_seen
        ):
            # What is written into it meanwhile is not what is kept.
            found = found._replace(
                original=Layout.place([(found.original, self.layout)])[0]
            )
        self._ready = current, found
        # A value that the original gives exactly is made from it again; only others are
        # held twice.
        saved = None if dtype == torch.float32 and found.is_exact else current

        def resume() -> None:
            live = self.record.live()
            self._is_undone = False
            self._ready = None
            if live is not None and saved is None:
                self.write(live, live.data.to(dtype))
            elif live is not None and saved is not None:
                self.resume(live, saved, self._rounded(saved))
            if bits is not None and self.kept is not None:
                self.kept.copy_(bits)

        return Call(resume)


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    first, second = (
        (t.dtype, t.data_ptr(), t.device, t.shape, t.stride()) for t in (a, b)
    )
    return first == second


class SharingChange(ChangeBase):
    """Parameters that are different objects over the same memory, to be undone after the change of each of them."""

    def __init__(self, changes: Sequence[StorageChange]) -> None:
        self.changes = changes
        for change in changes:
            change.group = self

    def undo(self, tree: ModelTree) -> None:
        """Let them share memory again where no value was trained."""
        live = [
            (change, p)
            for change in self.changes
            if (p := change.record.live()) is not None
        ]
        is_shared = len({p.untyped_storage().data_ptr() for _, p in live}) < 2
        if is_shared or any(
            c.was_trained or c.was_resized or p.dtype != c.dtype for c, p in live
        ):
            return
        views = Layout.place([(p.data, change.layout) for change, p in live])
        for (change, parameter), view in zip(live, views, strict=True):
            change.write(parameter, view)

    def now(self, tree: ModelTree) -> WayBack:
        """Record nothing: the parameters are put back one by one."""
        return Call(lambda: None)


@dataclass(frozen=True, kw_only=True)
class Store(EditBase):
    """Store a parameter, or several over the same memory, in another dtype, and record the original storage."""

    refs: tuple[TensorRef, ...] = field(repr=False)
    dtype: torch.dtype | None = None  # `None`: record only
    keep: bool = False
    # by bitsandbytes (a quantized layer's bias): the originals are held on their device
    is_rewritten: bool = False
    # in its memory, by what is no parameter: it goes back to that memory
    is_seen: bool = False
    record_bytes: int = 0

    def capture(self, tree: ModelTree) -> Together:
        """Record dtype, layout, NaN payloads and digest, or the originals themselves."""
        changes = []
        for fqn, ref in zip(self.fqns, self.refs, strict=True):
            module, parameter = ref.owner(), ref()
            assert module is not None
            assert parameter is not None
            record = tree.record(NamedTensor(fqn, module, ref.name, parameter, fqn))
            keep = self.keep or self.is_rewritten
            changes.append(
                StorageChange(record, parameter, keep, self.is_rewritten, self.is_seen)
            )
        return Together(
            tree.records,
            *changes,
            *([SharingChange(changes)] if len(changes) > 1 else []),
        )

    def apply(self, change: Together) -> None:
        """Cast by ``.data``: the parameter stays the same object."""
        if self.dtype is not None:
            for one in change.parts()[: len(self.refs)]:
                parameter = one.record.live()
                assert parameter is not None
                for owner, name in one.record.refs:
                    if (module := owner()) is not None:
                        change.records.mark(module).dtypes[name] = one.dtype
                one.write(parameter, parameter.data.to(self.dtype))


@dataclass(eq=False)
class CopyChange(HeldOriginal):
    """PEFT's copy of an upcast parameter, or a base parameter that others cast (``is_base``): undo rounds it."""

    record: ParameterRecord
    parameter: nn.Parameter
    dtype: torch.dtype
    is_base: bool = False
    is_resized: bool = False
    policy: TrainedPolicy = "keep"

    def decide(self, policy: TrainedPolicy) -> None:
        """Set whether ``undo`` is to refuse, because the copy was made to be trained."""
        self.policy = policy

    def undo(self, tree: ModelTree) -> None:
        """Round the value to the original dtype; the Parameter object stays."""
        if self.policy == "error":
            raise TrainedError([self.fqn])
        self.write(self.parameter, self.parameter.data.to(self.dtype))

    def now(self, tree: ModelTree) -> WayBack:
        """Record the exact float32 value."""
        saved = self.parameter.data
        return Call(lambda: self.resume(self.parameter, saved, saved.to(self.dtype)))

    def read(self, parameter: torch.Tensor) -> torch.Tensor:
        """The live parameter rounded to the original dtype when it is used; see ``HeldOriginal``."""
        return LazyTensor(
            parameter.shape, self.dtype, lambda: parameter.data.to(self.dtype)
        )
