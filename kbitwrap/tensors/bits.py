"""A tensor's bits: which are the same, where NaNs are, how they lie in memory, and fingerprints of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CHUNK = 1 << 20  # elements compared at once: bounds what a comparison holds beside the tensors compared
_ROW = 4096  # int64 words in a row of a fingerprint
_RUN, RUNS = 64, 64  # elements in a run of a sample, and runs
_BLOCK = 1 << 16  # int64 words in a block of a digest
_MASK = (1 << 64) - 1
# The multipliers of a digest, as int64: 2**64 divided by the golden ratio, odd; and one of MurmurHash3's finalizer.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MURMUR = 0xC2B2AE3D27D4EB4F - (1 << 64)
# Bytes digested at once: what stays in a CPU's cache, and what keeps an accelerator busy.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 32 << 20


def fingerprint_and(tensor: torch.Tensor, question: torch.Tensor) -> tuple[bytes, bool]:
    """A fingerprint of a half tensor's bits, without a copy, and the answer to a question there, in one read."""
    if tensor.is_meta:  # it has no bits
        return b"", False
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,) or flat.storage_offset() % 4:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    # Only changes of at least four words that cancel in every row and column are missed.
    in_rows = flat.numel() - flat.numel() % (4 * _ROW)
    parts = [flat[in_rows:]]
    if in_rows:
        rows = flat[:in_rows].view(torch.int64).view(-1, _ROW)
        parts += [rows.sum(1), rows.sum(0)]
    read = torch.cat([question.view(1).view(torch.uint8), *(p.contiguous().view(torch.uint8) for p in parts)]).cpu()
    return hashlib.sha256(read[1:].numpy().data).digest(), bool(read[0])


def has_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Whether a floating tensor holds a NaN, on its device; it makes no mask of it."""
    data = tensor.detach()
    return torch.aminmax(data)[0].isnan() if data.numel() else torch.zeros((), dtype=torch.bool, device=data.device)


@dataclass(frozen=True)
class NanPayloads:
    """The indices of a half tensor's NaNs, and their bits: which survive float32 depends on how a CPU converts."""

    positions: torch.Tensor
    bits: torch.Tensor

    @staticmethod
    def find(tensor: torch.Tensor) -> NanPayloads | None:
        """Find the NaNs of a float16 or bfloat16 tensor; ``None`` where there are none."""
        flat = tensor.detach().reshape(-1)
        positions = torch.isnan(flat).nonzero().view(-1)
        return NanPayloads(positions, flat[positions].view(torch.int16)) if len(positions) else None

    def write(self, tensor: torch.Tensor) -> None:
        """Put the payloads back into the tensor rounded back to its dtype, where it still holds a NaN."""
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        positions = self.positions.to(tensor.device)
        is_nan = torch.isnan(flat[positions])
        flat.view(torch.int16)[positions[is_nan]] = self.bits.to(tensor.device)[is_nan]
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def differ(a: torch.Tensor, b: torch.Tensor, *, has_nans: bool = True) -> torch.Tensor:
    """Whether two tensors hold other numbers in ``a``'s dtype, without a sync; any NaN equals any, zeros have signs."""
    left, right = a.detach().reshape(-1), b.detach().reshape(-1)
    found = [torch.zeros((), dtype=torch.uint8, device=left.device)]
    for start in range(0, left.numel(), _CHUNK):
        x = left[start : start + _CHUNK]
        y = right[start : start + _CHUNK].to(device=x.device, dtype=x.dtype)
        mask = differs(x, y) if has_nans else _bits(x) != _bits(y)
        found.append(mask.view(torch.uint8).amax())
    return torch.stack(found).any()


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in its storage, in elements, so that the same layout can be made again."""

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
        """Copy tensors of one dtype into one new storage, each with the strides and relative offset of its layout."""
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


def without_storage(cls: Any, like: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a tensor of a subclass without storage, in the shape and layout of another tensor."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=dtype, device=device
    )


@functools.cache
def is_composed(cls: Any) -> bool:
    """Whether tensors of a class may be made of others."""
    return hasattr(cls, "__tensor_flatten__")


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor's values lie in: itself or, of a subclass made of others, these, down to the last."""
    if is_composed(type(tensor)) and is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [inner for part in parts if isinstance(part, torch.Tensor) for inner in parts_of(part)]
    return [tensor]


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Those of a tensor's parts that are strided memory."""
    return [part for part in parts_of(tensor) if part.layout is torch.strided and not part.is_nested]


def num_sampled(tensor: torch.Tensor, num_runs: int = RUNS) -> int:
    """How many elements of a tensor a sample has."""
    return min(tensor.numel(), num_runs * _RUN)


def sample(tensor: torch.Tensor, num_runs: int = RUNS) -> torch.Tensor:
    """Some elements of a dense tensor, flat: all of a small one, evenly spread runs of a larger one."""
    data = tensor.detach()
    if data.numel() == num_sampled(data, num_runs):
        return data.reshape(-1)
    stride = data.numel() // num_runs
    if data.is_contiguous():
        return data.as_strided((num_runs, _RUN), (stride, 1)).reshape(-1)
    starts = torch.arange(num_runs, device=data.device).view(-1, 1) * stride
    return torch.take(data, starts + torch.arange(_RUN, device=data.device)).view(-1)


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements of two flat tensors of one dtype differ in their bits, any NaN equal to any; no device sync."""
    if not a.is_floating_point():
        return a != b
    different = _bits(a) != _bits(b)
    return different & ~(a.isnan() & b.isnan()) if a.element_size() > 1 else different


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat CPU tensors hold the same bytes, by one thread: several take longer to start."""
    left, right = (tensor.detach().view(torch.uint8).numpy().tobytes() for tensor in (a, b))
    return bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes can be read: each part is strided, not nested, quantized by torch, lazy or meta."""
    if is_lazy(tensor) or tensor.is_nested:
        return False
    return all(
        part.layout is torch.strided and not (part.is_meta or part.is_nested or part.is_quantized)
        for part in parts_of(tensor)
    )


def content_digest(tensor: torch.Tensor) -> int:
    """Digest a dense tensor's bytes, on its device, to an integer below 2**64; ``docs/manifest.md`` has the formula.

    It is the same on every device. Beside the tensor two pieces of 1 MiB (CPU) or 32 MiB are held, and a copy of one
    that is not contiguous. A tensor made of others has the digest of theirs, as words in the order of its class.
    """
    return begin_digest(tensor)()


def begin_digest(tensor: torch.Tensor) -> Callable[[], int]:
    """Begin a digest of what a tensor holds now, without waiting for its device; the call returned waits for it."""
    parts = parts_of(tensor)
    if all(part is not tensor for part in parts):
        digests = [begin_digest(part) for part in parts]

        def digest_of_parts() -> int:
            words = [digest - (digest >> 63 << 64) for digest in (read() for read in digests)]
            return content_digest(torch.tensor(words, dtype=torch.int64, device="cpu"))

        return digest_of_parts
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    data = plain.contiguous().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    num_words = num_bytes // 8
    factors = torch.arange(1, min(num_words, _BLOCK) + 1, device=data.device) * _GOLDEN
    is_aligned = data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
    step = _CPU_CHUNK if data.device.type == "cpu" else _DEVICE_CHUNK
    sums = []
    for start in range(0, num_words * 8, step):
        piece = data[start : min(start + step, num_words * 8)]
        sums += _block_sums((piece if is_aligned else piece.clone()).view(torch.int64), factors)
    blocks = torch.cat(sums) if sums else None
    tail = data[num_words * 8 :].clone() if num_bytes % 8 else None

    def read() -> int:
        digest = 0
        for block in () if blocks is None else blocks.tolist():
            digest = digest * _MURMUR + block & _MASK
        if tail is not None:
            digest = digest * _MURMUR + int.from_bytes(bytes(tail.tolist()), "little") & _MASK
        return digest * _MURMUR + num_bytes & _MASK

    return read


def _block_sums(words: torch.Tensor, factors: torch.Tensor) -> list[torch.Tensor]:
    """The sum of each block's mixed words: one tensor for the whole blocks, another for the rest."""
    whole = words.numel() - words.numel() % _BLOCK
    parts = (words[:whole].view(-1, _BLOCK), words[whole:].view(1, -1))
    mixed = [part ^ factors[: part.shape[1]] for part in parts if part.numel()]
    for part in mixed:
        part ^= part >> 32
        part *= _MURMUR
        part ^= part >> 29
    return [part.sum(1) for part in mixed]
