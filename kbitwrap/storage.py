"""What a parameter stores: cast to float32 and exactly back, NaN payloads, shared memory and trained values included.

float16 and bfloat16 survive the way to float32 and back in every bit, except the payloads of NaNs, which are recorded
sparsely. Whether training changed a value is told by rounding it back: it must be exactly representable in the
original dtype, and the bits must have the fingerprint that they had.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from .edits import EditBase
from .journal import Resume
from .quantization import HALF_DTYPES

_CHUNK = 1 << 20  # elements compared at once: bounds what a comparison holds beside the tensors compared
_PIECE = 4 << 20  # elements cast at once: few enough for an allocator to use their memory again
_ROW = 4096  # int64 words in a row of a fingerprint


class TrainedError(RuntimeError):
    """A parameter's value changed while it was stored upcast, and the caller asked for that to be an error.

    Attributes:
        fqns: The parameters' names.
    """

    def __init__(self, fqns: Sequence[str]) -> None:
        super().__init__("; ".join(f"{fqn} was trained while it was stored in {torch.float32}" for fqn in fqns))
        self.fqns = tuple(fqns)


def fingerprint(tensor: torch.Tensor) -> bytes:
    """A fingerprint of a half-precision tensor's bits, at the cost of two sums and no copy.

    The bits are read as int64 words, laid out in rows of 4096. What is hashed (SHA-256) are the sums of the rows and of
    the columns, modulo 2**64, and the words left over: of a tensor of less than a row, such as a norm's weight, all of
    it. A changed word changes its row's sum and its column's, and two words that change places change two of either.
    Only four words and more whose changes cancel in every row and in every column are missed.

    Args:
        tensor: A float16 or bfloat16 tensor, any shape, layout and device.

    Returns:
        The fingerprint, equal for equal values in equal order on every device.
    """
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,) or flat.storage_offset() % 4:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    in_rows = flat.numel() - flat.numel() % (4 * _ROW)
    parts = [flat[in_rows:]]
    if in_rows:
        rows = flat[:in_rows].view(torch.int64).view(-1, _ROW)
        parts += [rows.sum(1), rows.sum(0)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().view(torch.uint8).numpy().data)
    return digest.digest()


@dataclass(frozen=True)
class NanPayloads:
    """The NaNs of a half tensor: where they are, and their bits, which need not survive float32.

    Which of them do is no property of the bits alone: a CPU converts whole vectors and single elements by different
    instructions. So all of them are kept.

    Attributes:
        positions: Indices into the flattened tensor, shape ``(n,)``, int64.
        bits: The patterns, shape ``(n,)``, int16.
    """

    positions: torch.Tensor
    bits: torch.Tensor

    @staticmethod
    def find(tensor: torch.Tensor) -> NanPayloads | None:
        """Find a tensor's NaNs.

        Args:
            tensor: A float16 or bfloat16 tensor.

        Returns:
            Them, or ``None`` where there are none.
        """
        if tensor.numel() == 0 or not torch.isnan(torch.aminmax(tensor.detach())[0]):
            return None
        flat = tensor.detach().reshape(-1)
        positions = torch.isnan(flat).nonzero().view(-1)
        return NanPayloads(positions, flat[positions].view(torch.int16))

    def write(self, tensor: torch.Tensor) -> None:
        """Put the payloads back, where the tensor still holds a NaN.

        Args:
            tensor: The tensor rounded back, of the shape and dtype that was searched; changed in place.
        """
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        positions = self.positions.to(tensor.device)
        is_nan = torch.isnan(flat[positions])
        flat.view(torch.int16)[positions[is_nan]] = self.bits.to(tensor.device)[is_nan]
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, zeros with their signs, any NaN equal to any; compared in chunks.

    Args:
        a: Any shape and floating dtype.
        b: The same shape; another dtype is converted to ``a``'s.

    Returns:
        Whether they are equal.
    """
    if a.shape != b.shape:
        return False
    left, right = a.detach().reshape(-1), b.detach().reshape(-1)
    for start in range(0, left.numel(), _CHUNK):
        x = left[start : start + _CHUNK]
        y = right[start : start + _CHUNK].to(device=x.device, dtype=x.dtype)
        integers = torch.int32 if x.element_size() == 4 else torch.int16
        x_bits, y_bits = x.contiguous().view(integers), y.contiguous().view(integers)
        if not torch.equal(x_bits, y_bits) and not bool(((x_bits == y_bits) | (x.isnan() & y.isnan())).all()):
            return False
    return True


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage, so that the same layout can be made anew.

    Attributes:
        offset: The first element.
        shape: The shape.
        stride: The strides, in elements.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of a strided tensor."""
        return Layout(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    @property
    def end(self) -> int:
        """One past the last element that the tensor reaches in its storage."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @staticmethod
    def place(tensors: Sequence[tuple[torch.Tensor, Layout]]) -> list[torch.Tensor]:
        """Copy tensors of one dtype into one new storage, each with the strides and relative offset of its layout.

        Args:
            tensors: The values, each with the layout it is to get.

        Returns:
            Views of the new storage, in the same order.
        """
        start = min(layout.offset for _, layout in tensors)
        storage = tensors[0][0].new_empty(max(layout.end for _, layout in tensors) - start)
        views = []
        for tensor, layout in tensors:
            view = storage.as_strided(layout.shape, layout.stride, layout.offset - start)
            # Along an expanded dimension all elements are one.
            once = tuple(slice(0, 1) if step == 0 else slice(None) for step in layout.stride)
            view[once].copy_(tensor[once])
            views.append(view)
        return views


class StorageChange:
    """What one parameter stored, and how to get back to it.

    Args:
        fqn: The parameter's name, for reports.
        parameter: The parameter, before it is cast.
        keep: Hold on to the original tensor: on the CPU itself, elsewhere a copy on the host unless ``on_device``.
        on_device: Hold the original itself on any device (for the small biases that bitsandbytes rewrites).
    """

    def __init__(self, fqn: str, parameter: nn.Parameter, *, keep: bool = False, on_device: bool = False) -> None:
        data = parameter.detach()
        self.fqn = fqn
        self.reference = weakref.ref(parameter)
        self.dtype = data.dtype
        self.layout = Layout.of(data)
        self.kept = (data if on_device else data.cpu()) if keep else None
        self.payloads = NanPayloads.find(data) if self.kept is None else None
        self.fingerprint = fingerprint(data) if self.kept is None else None
        self.trained_policy = "keep"
        self.was_trained = False
        self.was_resized = False
        self._is_undone = False

    def _rounded(self, current: torch.Tensor) -> torch.Tensor:
        """The current value in the original dtype, NaN payloads included."""
        # Of the original's dtype already, it would be the live memory, where no payload is to be written.
        rounded = current.detach().to(self.dtype, copy=self.payloads is not None)
        if self.payloads is not None and tuple(rounded.shape) == self.layout.shape:
            self.payloads.write(rounded)
        return rounded

    def _is_untouched(self, current: torch.Tensor, rounded: torch.Tensor | None) -> bool:
        """Whether the current value is the original's, in whatever dtype others put it since."""
        if tuple(current.shape) != self.layout.shape:
            return False
        if self.kept is not None:
            # bitsandbytes casts a bias to the dtype of its input, which may have rounded it on the way.
            return any(
                same_values(current, self.kept.to(step)) for step in dict.fromkeys((current.dtype, *HALF_DTYPES))
            )
        assert rounded is not None
        return same_values(current, rounded) and fingerprint(rounded) == self.fingerprint

    def _original(self, current: torch.Tensor) -> torch.Tensor:
        """The value to put back; sets ``was_trained``."""
        rounded = self._rounded(current) if self.kept is None else None
        self.was_trained = not self._is_untouched(current, rounded)
        if self.kept is not None and (not self.was_trained or self._discards(current)):
            return self.kept.to(current.device)
        return self._rounded(current) if rounded is None else rounded

    def read_original(self) -> torch.Tensor | None:
        """The value that ``restore(trained="keep")`` would put back, and nothing changed; ``None`` where it is gone."""
        parameter = self.reference()
        return None if parameter is None else self.original_of(parameter.data)

    def original_of(self, current: torch.Tensor) -> torch.Tensor:
        """The same for a parameter that stores the current value given, or would if it were whole."""
        if self.kept is not None and _is_same_tensor(current, self.kept):
            return current
        if self.kept is None:
            return self._rounded(current)
        was_trained, policy, self.trained_policy = self.was_trained, self.trained_policy, "keep"
        try:
            return self._laid_out(self._original(current))
        finally:
            self.was_trained, self.trained_policy = was_trained, policy

    def read_pieces(self) -> Iterator[torch.Tensor]:
        """The values of ``read_original``, flat and one after the other, without having all of them in memory.

        Yields:
            Tensors of the original dtype; none where the parameter is gone.
        """
        parameter = self.reference()
        if parameter is None:
            return
        if self.kept is not None or self.payloads is not None or not parameter.is_contiguous():
            original = self.read_original()
            assert original is not None
            yield original.reshape(-1)
            return
        for piece in parameter.detach().view(-1).split(_PIECE):
            yield piece.to(self.dtype)

    def _discards(self, current: torch.Tensor) -> bool:
        return self.trained_policy == "discard" and tuple(current.shape) == self.layout.shape

    def undo(self) -> None:
        """Put the original storage back: exact where nothing was trained, else by ``trained_policy``.

        Raises:
            TrainedError: The value was trained and the policy is ``"error"``; the parameter is left as it is.
        """
        parameter = self.reference()
        if parameter is None or self._is_undone or (self.kept is not None and _is_same_tensor(parameter, self.kept)):
            return
        original = self._original(parameter.data)
        if self.was_trained and self.trained_policy == "error" and parameter.dtype != self.dtype:
            raise TrainedError([self.fqn])
        self.was_resized = tuple(parameter.shape) != self.layout.shape
        self.was_trained = self.was_trained and parameter.dtype != self.dtype
        parameter.data = self._laid_out(original)
        self._is_undone = True

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() == self.layout.stride or self.was_trained:
            return tensor
        return Layout.place([(tensor, self.layout)])[0]

    def suspend(self, resumes: list[Resume]) -> None:
        """Put the original storage back for a while; resuming brings back the upcast one, bit for bit."""
        parameter = self.reference()
        if parameter is None or (self.kept is not None and _is_same_tensor(parameter, self.kept)):
            return
        current = parameter.data
        policy, self.trained_policy = self.trained_policy, "keep"
        try:
            original = self._laid_out(self._original(current))
        finally:
            self.trained_policy = policy
        dtype = current.dtype
        # A value that the original gives exactly is made again from it, so that only others are held twice.
        is_derivable = dtype == torch.float32 and not self.was_trained and same_values(current, original)
        saved = None if is_derivable else current

        def resume() -> None:
            live = self.reference()
            if live is not None:
                live.data = saved if saved is not None else original.to(dtype)

        resumes.append(resume)
        parameter.data = original


def _is_same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory, seen in the same way."""
    return (
        a.dtype == b.dtype
        and a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


class SharedStorageChange:
    """Parameters that are different objects over the same memory: undone one by one, then made to share again."""

    def __init__(self, changes: Sequence[StorageChange]) -> None:
        self.changes = tuple(changes)

    def undo(self) -> None:
        """Put the originals back; memory is shared again where no value was trained.

        Raises:
            TrainedError: As for one parameter; the others are restored.
        """
        trained: list[str] = []
        for change in self.changes:
            try:
                change.undo()
            except TrainedError as error:
                trained += error.fqns
        if trained:
            raise TrainedError(trained)
        self._share()

    def _share(self) -> None:
        live = [(change, p) for change in self.changes if (p := change.reference()) is not None]
        is_shared = len({p.untyped_storage().data_ptr() for _, p in live}) < 2
        if is_shared or any(change.was_trained or p.dtype != change.dtype for change, p in live):
            return
        views = Layout.place([(p.data, change.layout) for change, p in live])
        for (_, parameter), view in zip(live, views, strict=True):
            parameter.data = view

    def suspend(self, resumes: list[Resume]) -> None:
        """As ``undo``, for a while."""
        for change in self.changes:
            change.suspend(resumes)
        self._share()


@dataclass(frozen=True, kw_only=True)
class Store(EditBase):
    """Store parameters in another dtype, and record what they stored.

    They share one memory; nearly always it is a single one.

    Attributes:
        parameters: The parameters, weakly.
        dtype: The storage dtype wanted, or ``None`` to record only.
        keep: Hold on to the originals.
        is_rewritten: bitsandbytes rewrites these (a quantized layer's bias), so the originals are held where they are.
        record_bytes: Bytes that the record holds of them.
    """

    parameters: tuple[weakref.ref[nn.Parameter], ...] = field(repr=False)
    dtype: torch.dtype | None = None
    keep: bool = False
    is_rewritten: bool = False
    record_bytes: int = 0

    def _live(self) -> list[nn.Parameter]:
        return [p for ref in self.parameters if (p := ref()) is not None]

    def capture(self) -> StorageChange | SharedStorageChange:
        """Record dtype, layout, NaN payloads and fingerprint, or the originals themselves."""
        changes = [
            StorageChange(fqn, parameter, keep=self.keep or self.is_rewritten, on_device=self.is_rewritten)
            for fqn, parameter in zip(self.fqns, self._live(), strict=True)
        ]
        return changes[0] if len(changes) == 1 else SharedStorageChange(changes)

    def apply(self) -> None:
        """Cast by ``.data``: the parameter stays the same object, so ties and optimizers hold."""
        if self.dtype is not None:
            for parameter in self._live():
                parameter.data = parameter.data.to(self.dtype)


class CopyChange:
    """A copy that PEFT made of an upcast parameter, or what stands in its place: taken to the original dtype."""

    def __init__(self, fqn: str, parameter: nn.Parameter, dtype: torch.dtype, *, is_resized: bool = False) -> None:
        self.fqn = fqn
        self.reference = weakref.ref(parameter)
        self.dtype = dtype
        self.is_resized = is_resized

    def undo(self) -> None:
        """Round the value to the original dtype; the Parameter object stays."""
        parameter = self.reference()
        if parameter is not None:
            parameter.data = parameter.data.to(self.dtype)

    def suspend(self, resumes: list[Resume]) -> None:
        """Round for a while; the exact float32 value is back afterwards."""
        parameter = self.reference()
        if parameter is None:
            return
        saved = parameter.data

        def resume() -> None:
            parameter.data = saved

        resumes.append(resume)
        self.undo()
