"""A tensor's bits: which are the same, where NaNs are, how they lie in memory, and fingerprints of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_CHUNK = 1 << 20  # elements compared at once: bounds what a comparison holds beside the tensors compared
_ROW = 4096  # int64 words in a row of a fingerprint
_SAMPLED = 2048  # elements of a sample, at the least
# Of a digest.
_BLOCK = 1 << 16  # int64 words
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd
_MURMUR = 0xC2B2AE3D27D4EB4F  # a multiplier of MurmurHash3's finalizer
_MASK = (1 << 64) - 1
# Bytes digested at once: what stays in a CPU's cache, and what keeps an accelerator busy.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 32 << 20


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


@functools.cache
def is_composed(cls: Any) -> bool:
    """Whether tensors of a class may be made of others."""
    return hasattr(cls, "__tensor_flatten__")


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor's values lie in: itself or, of a subclass made of others, these."""
    if is_composed(type(tensor)) and is_traceable_wrapper_subclass(tensor):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [dense for part in parts if isinstance(part, torch.Tensor) for dense in dense_parts(part)]
    return [tensor] if tensor.layout is torch.strided and not tensor.is_nested else []


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, in their order: all of a small one, some thousands of a larger one.

    They are evenly spread, an odd number of elements apart, so that they do not all lie in a few columns. What changes
    fewer elements than that may be missed; a merge or a residual changes nearly all.

    Args:
        tensor: A dense tensor of any shape and layout.

    Returns:
        A flat tensor on the same device; of a contiguous tensor a view.
    """
    step = 1 if tensor.numel() <= 2 * _SAMPLED else tensor.numel() // _SAMPLED | 1
    data = tensor.detach()
    if data.is_contiguous():
        return data.view(-1)[::step]
    return torch.take(data, torch.arange(0, data.numel(), step, device=data.device))


def differs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements of two flat tensors of one dtype differ in their bits; any NaN equals any.

    Returns:
        A bool tensor on their device: nothing is read by the host.
    """
    if not a.is_floating_point():
        return a != b
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    different = a.contiguous().view(integers) != b.contiguous().view(integers)
    return different & ~(a.isnan() & b.isnan()) if a.element_size() > 1 else different


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in memory as they are: not sparse, nested, quantized by torch, empty or composed.

    Args:
        tensor: Any tensor.
    """
    if is_lazy(tensor) or is_traceable_wrapper_subclass(tensor):
        return False
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)


def content_digest(tensor: torch.Tensor) -> int:
    """Digest a tensor's bytes in the order of its elements, on its own device.

    All arithmetic is on integers modulo 2**64, so the digest does not depend on the device, nor on how a device adds
    up. The bytes are read as little-endian int64 words ``w``, in blocks of 65,536. In each block, with ``i`` counting
    its words from 0 and ``>>`` shifting arithmetically::

        x = w ^ ((i + 1) * 0x9E3779B97F4A7C15)
        x = (x ^ (x >> 32)) * 0xC2B2AE3D27D4EB4F
        x = x ^ (x >> 29)
        h = h * 0xC2B2AE3D27D4EB4F + sum(x)

    starting from ``h = 0``. Up to seven bytes that are left over, as one little-endian word, and then the number of
    bytes, are taken in by ``h = h * 0xC2B2AE3D27D4EB4F + value`` each. The multipliers are those of Fibonacci hashing
    and of MurmurHash3's finalizer. It finds accidents, such as another revision of a model or a flipped bit; it is no
    defence against somebody who means to deceive.

    Shape and dtype are no part of it: equal bytes have equal digests. Beside the tensor two pieces of it are held, of
    1 MiB on the CPU and 32 MiB elsewhere; of a tensor that is not contiguous a copy.

    Args:
        tensor: A dense tensor of any shape, dtype, layout and device.

    Returns:
        The digest, from 0 to 2**64 - 1.

    Example:
        >>> import torch
        >>> f"{content_digest(torch.zeros(0)):016x}"
        '0000000000000000'
        >>> content_digest(torch.arange(6)) == content_digest(torch.arange(6).view(2, 3))
        True
        >>> content_digest(torch.tensor([1, 2])) == content_digest(torch.tensor([2, 1]))
        False
    """
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    data = plain.contiguous().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    num_words = num_bytes // 8
    factors = torch.arange(1, min(num_words, _BLOCK) + 1, device=data.device) * _signed(_GOLDEN)
    is_aligned = data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
    step = _CPU_CHUNK if data.device.type == "cpu" else _DEVICE_CHUNK
    sums = []
    for start in range(0, num_words * 8, step):
        piece = data[start : min(start + step, num_words * 8)]
        sums += _block_sums((piece if is_aligned else piece.clone()).view(torch.int64), factors)
    digest = 0
    for block in torch.cat(sums).tolist() if sums else ():
        digest = digest * _MURMUR + block & _MASK
    if num_bytes % 8:
        tail = bytes(data[num_words * 8 :].tolist())
        digest = digest * _MURMUR + int.from_bytes(tail, "little") & _MASK
    return digest * _MURMUR + num_bytes & _MASK


def _block_sums(words: torch.Tensor, factors: torch.Tensor) -> list[torch.Tensor]:
    """The sum of each block's mixed words: for the whole blocks one tensor, for what is left another."""
    whole = words.numel() - words.numel() % _BLOCK
    parts = (words[:whole].view(-1, _BLOCK), words[whole:].view(1, -1))
    return [_mixed(part, factors[: part.shape[1]]).sum(1) for part in parts if part.numel()]


def _mixed(words: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    mixed = words ^ factors
    mixed ^= mixed >> 32
    mixed *= _signed(_MURMUR)
    mixed ^= mixed >> 29
    return mixed


def _signed(word: int) -> int:
    """An unsigned 64-bit integer with a set top bit as the int64 of the same bits."""
    return word - (1 << 64)
