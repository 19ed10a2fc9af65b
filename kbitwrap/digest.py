"""A 64-bit digest of what a tensor holds, the same on every device."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_BLOCK = 1 << 16  # int64 words
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, odd
_MURMUR = 0xC2B2AE3D27D4EB4F  # a multiplier of MurmurHash3's finalizer
_MASK = (1 << 64) - 1
# Bytes digested at once: what stays in a CPU's cache, and what keeps an accelerator busy.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 32 << 20


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
