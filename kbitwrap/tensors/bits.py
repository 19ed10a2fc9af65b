"""A tensor's bits: compared, digested, sampled and laid out in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

# elements compared at once: bounds what a comparison holds beside the tensors compared
_CHUNK = 1 << 20
_RUN, RUNS = 64, 64  # elements in a run of a sample, and runs
_BLOCK = 1 << 16  # int64 words in a block of a digest
_MASK = (1 << 64) - 1
# The multipliers of a digest, as int64: 2**64 divided by the golden ratio, odd; and one
# of MurmurHash3's finalizer.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MURMUR = 0xC2B2AE3D27D4EB4F - (1 << 64)
# bytes digested at once, whole blocks: they stay in a CPU's cache, and keep an
# accelerator busy
_PIECE = 4 << 20


@dataclass(frozen=True)
class NanPayloads:
    """The NaNs of a half tensor.

    Which of their bits survive float32 depends on how a CPU converts.

    Attributes:
        positions: Their indices in the flat tensor, int64.
        bits: Their bits, int16, in the same order.
    """

    positions: Tensor
    bits: Tensor

    @staticmethod
    def find(tensor: Tensor) -> NanPayloads | None:
        """Find the NaNs of a float16 or bfloat16 tensor.

        ``None`` where there are none.
        """
        if not has_nan(tensor):
            return None
        flat = tensor.detach().reshape(-1)
        positions = flat.isnan().nonzero().view(-1)
        return NanPayloads(positions, flat[positions].view(torch.int16))

    def write(self, tensor: Tensor) -> None:
        """Put the payloads back into the tensor, where it still holds a NaN.

        The tensor has been rounded back to its dtype.
        """
        flat = tensor.flatten()
        positions = self.positions.to(tensor.device)
        bits = self.bits.to(tensor.device)
        is_nan = flat[positions].isnan()
        flat.view(torch.int16)[positions[is_nan]] = bits[is_nan]
        tensor.copy_(flat.view(tensor.shape))


def has_nan(tensor: Tensor) -> Tensor:
    """Return whether there is a NaN in a floating tensor, as a boolean scalar on its device.

    It does not wait for the device, and makes no mask.
    """
    data = tensor.detach()
    if not data.numel():
        return torch.zeros((), dtype=torch.bool, device=data.device)
    # the least of numbers among which there is a NaN is NaN
    return torch.aminmax(data)[0].isnan()


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Return whether two tensors hold other numbers.

    It does not wait for the device, and holds little beside the tensors.

    Args:
        a: A tensor.
        b: A tensor of the same number of elements, on any device; it is compared in
            ``a``'s dtype.

    Returns:
        The answer, a boolean scalar on ``a``'s device. A NaN equals any NaN; zeros of
            different signs differ.
    """
    left = a.detach().reshape(-1)
    right = b.detach().reshape(-1)
    found = []
    for x, y in zip(left.split(_CHUNK), right.split(_CHUNK), strict=True):
        found.append(differs(x, y.to(device=x.device, dtype=x.dtype)).any())
    return torch.stack(found).any()


@dataclass(frozen=True)
class Layout:
    """The layout of a strided tensor in its storage, to be made again.

    Attributes:
        offset: Its first element's place in the storage.
        shape: Its shape.
        stride: Its strides, in elements; 0 along a dimension that was expanded.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Layout:
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
    def place(tensors: Sequence[tuple[Tensor, Layout]]) -> list[Tensor]:
        """Copy tensors into one new storage, where they overlap as their layouts do.

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
            offset = layout.offset - start
            view = storage.as_strided(layout.shape, layout.stride, offset)
            views.append(view)
            # Along an expanded dimension all elements are one.
            for dim, step in enumerate(layout.stride):
                if step == 0:
                    view = view.narrow(dim, 0, min(1, view.shape[dim]))
                    tensor = tensor.narrow(dim, 0, view.shape[dim])
            view.copy_(tensor)
        return views


def without_storage(
    cls: Any, like: Tensor, dtype: torch.dtype, device: torch.device
) -> Any:
    """Make a tensor of a subclass without storage, shaped and laid out as another.

    Args:
        cls: The subclass.
        like: The other tensor, on any device.
        dtype: The dtype that the made tensor says it has.
        device: The device that it says it is on.

    Returns:
        A tensor of ``cls``, on which ``__init__`` was not called.
    """
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=dtype,
        device=device,
    )


def is_composed(cls: type[Tensor]) -> bool:
    """Return whether tensors of a class may be made of other tensors, which hold their values."""
    return hasattr(cls, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a tensor's values lie in.

    It is the tensor itself, unless that is made of others. Those may be made of others
    too: the parts are the innermost ones, in the order of their classes.
    """
    if not is_composed(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    innermost = []
    for name in names:
        part = getattr(tensor, name)
        if isinstance(part, Tensor):
            innermost += parts_of(part)
    return innermost


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return those of a tensor's parts that are strided memory."""
    return [
        part
        for part in parts_of(tensor)
        if part.layout is torch.strided and not part.is_nested
    ]


def num_sampled(tensor: Tensor, num_runs: int = RUNS) -> int:
    """Return how many elements of a tensor a sample has."""
    return min(tensor.numel(), num_runs * _RUN)


def sample(tensor: Tensor, num_runs: int = RUNS) -> Tensor:
    """Pick some elements of a dense tensor, flat.

    They are all of a small one, and evenly spread runs of a larger one.
    """
    data = tensor.detach()
    if data.numel() == num_sampled(data, num_runs):
        return data.reshape(-1)
    step = data.numel() // num_runs
    if data.is_contiguous():
        return data.as_strided((num_runs, _RUN), (step, 1)).reshape(-1)
    starts = torch.arange(num_runs, device=data.device) * step
    positions = starts.unsqueeze(1) + torch.arange(_RUN, device=data.device)
    return data.take(positions).view(-1)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Find which elements of two flat tensors differ in their bits.

    It does not wait for the device.

    Args:
        a: A flat tensor.
        b: A tensor of its shape and dtype, on its device.

    Returns:
        A mask of the same shape. A NaN equals any NaN, but for float8, of which all
            bits are compared.
    """
    if not a.is_floating_point():
        return a != b
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = integers[a.element_size()]
    different = a.view(bits) != b.view(bits)
    if a.element_size() == 1:
        return different  # torch finds no NaNs of float8
    return different & ~(a.isnan() & b.isnan())


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor's bytes can be read.

    Each part is strided, not nested, quantized by torch, lazy or meta.
    """
    if is_lazy(tensor) or tensor.is_nested:
        return False
    dense = [p for p in dense_parts(tensor) if not (p.is_meta or p.is_quantized)]
    return len(dense) == len(parts_of(tensor))


def digest_bytes(tensor: Tensor) -> int:
    """Return the most bytes that a digest of a plain tensor holds beside it."""
    num_whole = tensor.nbytes - tensor.nbytes % (8 * _BLOCK)
    factors, piece = (
        min(tensor.nbytes, 8 * _BLOCK),
        min(num_whole or tensor.nbytes, _PIECE),
    )
    copied = 0 if tensor.is_contiguous() else tensor.nbytes
    return copied + factors + 2 * piece


def content_digest(tensor: Tensor) -> int:
    """Digest a dense tensor's bytes, on its device, to an integer below 2**64.

    ``docs/manifest.md`` has the formula.

    It is the same on every device. Beside the tensor two pieces of 4 MiB are held, and
    a copy of one that is not contiguous. A tensor made of others has the digest of
    theirs, as words in the order of its class.
    """
    return begin_digest(tensor)()


def begin_digest(tensor: Tensor) -> Callable[[], int]:
    """Begin a digest of what a tensor holds now, without waiting for its device.

    Args:
        tensor: A dense tensor. It may change afterwards.

    Returns:
        A call that waits for the device and returns the digest, as ``content_digest``
            does. Until it is dropped it holds 8 bytes a block there.
    """
    if is_composed(type(tensor)):
        reads = [begin_digest(part) for part in parts_of(tensor)]

        def digest_of_parts() -> int:
            words = b"".join(read().to_bytes(8, "little") for read in reads)
            return content_digest(torch.frombuffer(bytearray(words), dtype=torch.uint8))

        return digest_of_parts

    sums, num_bytes = _sums_of(tensor), tensor.nbytes
    return lambda: _digest_of(sums.cpu(), num_bytes)  # in one read of the device


def digest_and(tensor: Tensor, question: Tensor) -> tuple[int, bool]:
    """Digest a plain tensor and answer a question, a boolean scalar, in one read of its device."""
    answer = question.view(1).view(torch.uint8)
    read = torch.cat([_sums_of(tensor), answer]).cpu()
    return _digest_of(read[:-1], tensor.nbytes), bool(read[-1])


def _sums_of(tensor: Tensor) -> Tensor:
    """Return the sums of a plain tensor's blocks on its device, as bytes, with the bytes of its tail."""
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    # the strides of a tensor of one element may be any
    flat = plain.contiguous().as_strided((plain.numel(),), (1,))
    data = flat.view(torch.uint8)
    num_in_blocks = len(data) - len(data) % 8
    blocks = _block_sums(data, num_in_blocks)
    return torch.cat([blocks.view(torch.uint8), data[num_in_blocks:]])


def _digest_of(sums: Tensor, num_bytes: int) -> int:
    """Return the digest of a tensor of so many bytes by what `_sums_of` returned."""
    end = len(sums) - num_bytes % 8
    values = sums[:end].view(torch.int64).tolist()
    if end < len(sums):
        values.append(int.from_bytes(bytes(sums[end:].tolist()), "little"))
    found = 0
    for value in (*values, num_bytes):
        found = (found * _MURMUR + value) & _MASK
    return found


def _block_sums(data: Tensor, num_bytes: int) -> Tensor:
    """Sum each block's mixed words, int64, on their device.

    The last block may be short.

    Args:
        data: The bytes, uint8, flat and contiguous, read piece by piece.
        num_bytes: How many of them are read, a multiple of 8.
    """
    is_aligned = data.storage_offset() % 8 == 0 and data.data_ptr() % 8 == 0
    block_length = min(num_bytes // 8, _BLOCK)
    factors = torch.arange(1, block_length + 1, device=data.device) * _GOLDEN
    num_whole = num_bytes - num_bytes % (8 * _BLOCK)
    sums = [factors[:0]]
    for piece in (*data[:num_whole].split(_PIECE), data[num_whole:num_bytes]):
        if not len(piece):
            continue
        words = (piece if is_aligned else piece.clone()).view(torch.int64)
        blocks = words.view(-1, min(len(words), _BLOCK))
        mixed = blocks ^ factors[: blocks.shape[1]]
        mixed ^= mixed >> 32
        mixed *= _MURMUR
        mixed ^= mixed >> 29
        sums.append(mixed.sum(1))
        del mixed  # its memory is free while the next piece is mixed
    return torch.cat(sums)
