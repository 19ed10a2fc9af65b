"""A tensor's bits: which are the same, where NaNs are, how they lie in memory, and fingerprints of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# elements compared at once: bounds what a comparison holds beside the tensors compared
_CHUNK = 1 << 20
_ROW = 4096  # int64 words in a row of a fingerprint
_RUN, RUNS = 64, 64  # elements in a run of a sample, and runs
_BLOCK = 1 << 16  # int64 words in a block of a digest
_MASK = (1 << 64) - 1
# The multipliers of a digest, as int64: 2**64 divided by the golden ratio, odd; and one
# of MurmurHash3's finalizer.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MURMUR = 0xC2B2AE3D27D4EB4F - (1 << 64)
# Bytes digested at once: what stays in a CPU's cache, and what keeps an accelerator
# busy.
_CPU_CHUNK = 1 << 20
_DEVICE_CHUNK = 32 << 20


def fingerprint_and(tensor: torch.Tensor, question: torch.Tensor) -> tuple[bytes, bool]:
    """Fingerprint a half tensor's bits, without a copy, and answer a question, in one read of the device.

    Changes of fewer than four words are always seen, and of more unless they cancel in
    every row and every column.

    Args:
        tensor: A tensor of a two-byte dtype. One on the meta device has no bits: its
            fingerprint is empty.
        question: A boolean scalar on the same device.

    Returns:
        The fingerprint, 32 bytes, which does not depend on the tensor's layout, and the
            answer.
    """
    if tensor.is_meta:  # it has no bits
        return b"", False
    flat = tensor.detach().reshape(-1)
    if flat.stride() != (1,) or flat.storage_offset() % 4:
        flat = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device).copy_(flat)
    num_in_rows = flat.numel() - flat.numel() % (4 * _ROW)
    sums = []
    if num_in_rows:
        rows = flat[:num_in_rows].view(torch.int64).view(-1, _ROW)
        sums = [rows.sum(1), rows.sum(0)]
    asked = [question.view(1), flat[num_in_rows:], *sums]
    read = torch.cat([part.contiguous().view(torch.uint8) for part in asked]).cpu()
    fingerprint = hashlib.sha256(read[1:].numpy().data).digest()
    return fingerprint, bool(read[0])


def has_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Whether a floating tensor holds a NaN, on its device; it makes no mask of it."""
    data = tensor.detach()
    if not data.numel():
        return torch.zeros((), dtype=torch.bool, device=data.device)
    return torch.aminmax(data)[0].isnan()


@dataclass(frozen=True)
class NanPayloads:
    """The NaNs of a half tensor: which of their bits survive float32 depends on how a CPU converts.

    Attributes:
        positions: Their indices in the flat tensor, int64.
        bits: Their bits, int16, in the same order.
    """

    positions: torch.Tensor
    bits: torch.Tensor

    @staticmethod
    def find(tensor: torch.Tensor) -> NanPayloads | None:
        """Find the NaNs of a float16 or bfloat16 tensor; ``None`` where there are none."""
        flat = tensor.detach().reshape(-1)
        positions = flat.isnan().nonzero().view(-1)
        if not len(positions):
            return None
        return NanPayloads(positions, flat[positions].view(torch.int16))

    def write(self, tensor: torch.Tensor) -> None:
        """Put the payloads back into the tensor rounded back to its dtype, where it still holds a NaN."""
        flat = tensor.reshape(-1)
        positions = self.positions.to(tensor.device)
        bits = self.bits.to(tensor.device)
        is_nan = flat[positions].isnan()
        flat.view(torch.int16)[positions[is_nan]] = bits[is_nan]
        is_copy = flat.data_ptr() != tensor.data_ptr()
        if is_copy:
            tensor.copy_(flat.view(tensor.shape))


def differ(a: torch.Tensor, b: torch.Tensor, *, has_nans: bool = True) -> torch.Tensor:
    """Whether two tensors hold other numbers. It does not wait for the device, and holds little beside the tensors.

    Args:
        a: A tensor.
        b: A tensor of the same number of elements, on any device; it is compared in
            ``a``'s dtype.
        has_nans: Whether ``a`` may hold NaNs, each of which then equals any; without
            them, bits are compared alone.

    Returns:
        The answer, a boolean scalar on ``a``'s device. Zeros of different signs differ.
    """
    left = a.detach().reshape(-1)
    right = b.detach().reshape(-1)
    found = [torch.zeros((), dtype=torch.uint8, device=left.device)]
    for start in range(0, left.numel(), _CHUNK):
        x = left[start : start + _CHUNK]
        y = right[start : start + _CHUNK].to(device=x.device, dtype=x.dtype)
        mask = differs(x, y) if has_nans else _bits(x) != _bits(y)
        found.append(mask.view(torch.uint8).amax())
    return torch.stack(found).any()


@dataclass(frozen=True)
class Layout:
    """How a strided tensor lies in its storage, so that the same layout can be made again.

    Attributes:
        offset: Its first element's place in the storage.
        shape: Its shape.
        stride: Its strides, in elements; 0 along a dimension that was expanded.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """Read the layout of a tensor."""
        return Layout(
            int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()
        )

    @property
    def end(self) -> int:
        """One past the last element that the tensor reaches in its storage."""
        if 0 in self.shape:
            return self.offset
        last = self.offset
        for size, step in zip(self.shape, self.stride, strict=True):
            last += (size - 1) * step
        return last + 1

    @staticmethod
    def place(tensors: Sequence[tuple[torch.Tensor, Layout]]) -> list[torch.Tensor]:
        """Copy tensors into one new storage, in which they overlap as those overlapped that the layouts are of.

        Args:
            tensors: Each tensor with the layout that it is to have; all of one dtype,
                on one device.

        Returns:
            Views of the storage, in the same order. It is as large as the layouts
                reach, and no larger.
        """
        start = min(layout.offset for _, layout in tensors)
        end = max(layout.end for _, layout in tensors)
        first, _ = tensors[0]
        storage = first.new_empty(end - start)
        views = []
        for tensor, layout in tensors:
            view = storage.as_strided(
                layout.shape, layout.stride, layout.offset - start
            )
            # Along an expanded dimension all elements are one.
            one_each = tuple(
                slice(0, 1) if step == 0 else slice(None) for step in layout.stride
            )
            view[one_each].copy_(tensor[one_each])
            views.append(view)
        return views


def without_storage(
    cls: Any, like: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> Any:
    """Make a tensor of a subclass without storage, in the shape and layout of another tensor.

    Args:
        cls: The subclass.
        like: The other tensor, on any device.
        dtype: The dtype that the made tensor says it has.
        device: The device that it says it is on.

    Returns:
        A tensor of ``cls``, on which ``__init__`` was not called.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=dtype,
        device=device,
    )


def is_composed(cls: type[torch.Tensor]) -> bool:
    """Whether tensors of a class may be made of other tensors, in which their values lie."""
    return hasattr(cls, "__tensor_flatten__")


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a tensor's values lie in: the tensor, unless it is made of others.

    Those that it is made of may be made of others too: the parts are the innermost
    ones, in the order of their classes.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    innermost: list[torch.Tensor] = []
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):
            innermost += parts_of(part)
    return innermost


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Those of a tensor's parts that are strided memory."""
    return [
        part
        for part in parts_of(tensor)
        if part.layout is torch.strided and not part.is_nested
    ]


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
    """Which elements of two flat tensors differ in their bits. It does not wait for the device.

    Args:
        a: A flat tensor.
        b: A tensor of its shape and dtype, on its device.

    Returns:
        A mask of the same shape. A NaN equals any NaN, but for float8, of which all
            bits are compared.
    """
    if not a.is_floating_point():
        return a != b
    different = _bits(a) != _bits(b)
    if a.element_size() == 1:
        return different  # torch finds no NaNs of float8
    both_nan = a.isnan() & b.isnan()
    return different & ~both_nan


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat CPU tensors hold the same bytes, by one thread: several take longer to start."""
    left = a.detach().view(torch.uint8).numpy()
    right = b.detach().view(torch.uint8).numpy()
    return bool(left.tobytes() == right.tobytes())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes can be read: each part is strided, not nested, quantized by torch, lazy or meta."""
    if is_lazy(tensor) or tensor.is_nested:
        return False
    return all(_is_readable(part) for part in parts_of(tensor))


def _is_readable(part: torch.Tensor) -> bool:
    if part.layout is not torch.strided:
        return False
    return not (part.is_meta or part.is_nested or part.is_quantized)


def content_digest(tensor: torch.Tensor) -> int:
    """Digest a dense tensor's bytes, on its device, to an integer below 2**64; ``docs/manifest.md`` has the formula.

    It is the same on every device. Beside the tensor two pieces of 1 MiB (CPU) or 32
    MiB are held, and a copy of one that is not contiguous. A tensor made of others has
    the digest of theirs, as words in the order of its class.
    """
    return begin_digest(tensor)()


def begin_digest(tensor: torch.Tensor) -> Callable[[], int]:
    """Begin a digest of what a tensor holds now, without waiting for its device.

    Args:
        tensor: A dense tensor. It may change afterwards.

    Returns:
        A call that waits for the device and returns the digest, as ``content_digest``
            does.
    """
    parts = parts_of(tensor)
    if all(part is not tensor for part in parts):
        reads = [begin_digest(part) for part in parts]

        def digest_of_parts() -> int:
            words = b"".join(read().to_bytes(8, "little") for read in reads)
            return content_digest(
                torch.tensor(list(words), dtype=torch.uint8, device="cpu")
            )

        return digest_of_parts
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    data = plain.contiguous().view(-1).view(torch.uint8)
    num_bytes = data.numel()
    num_in_words = num_bytes - num_bytes % 8
    blocks = _block_sums(data[:num_in_words])
    tail = data[num_in_words:].clone()

    def read() -> int:
        digest = 0
        for block in blocks.tolist():
            digest = _extended(digest, block)
        if len(tail):
            digest = _extended(digest, int.from_bytes(bytes(tail.tolist()), "little"))
        return _extended(digest, num_bytes)

    return read


def _extended(digest: int, value: int) -> int:
    return (digest * _MURMUR + value) & _MASK


def _block_sums(data: torch.Tensor) -> torch.Tensor:
    """The sum of each block's mixed words; the last block may be short.

    Args:
        data: The bytes, uint8, flat and contiguous; their number is a multiple of 8.
            They are read piece by piece.

    Returns:
        The sums, int64, on the device of the bytes.
    """
    num_words = data.numel() // 8
    factors = torch.arange(1, min(num_words, _BLOCK) + 1, device=data.device) * _GOLDEN
    is_aligned = data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
    step = _CPU_CHUNK if data.device.type == "cpu" else _DEVICE_CHUNK
    sums = [factors[:0]]
    for piece in data.split(step):
        words = (piece if is_aligned else piece.clone()).view(torch.int64)
        num_whole = words.numel() - words.numel() % _BLOCK
        whole = words[:num_whole].view(-1, _BLOCK)
        rest = words[num_whole:].view(1, -1)
        sums += [
            _mixed_sums(blocks, factors) for blocks in (whole, rest) if blocks.numel()
        ]
    return torch.cat(sums)


def _mixed_sums(blocks: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Mix the words of each row, in memory of their own, and add the row up."""
    mixed = blocks ^ factors[: blocks.shape[1]]
    mixed ^= mixed >> 32
    mixed *= _MURMUR
    mixed ^= mixed >> 29
    return mixed.sum(1)
