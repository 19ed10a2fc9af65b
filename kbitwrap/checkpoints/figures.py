"""One tensor of a merged model against what it should be: sums over all of its values, and a sample of them.

The values are read a few at a time: nothing is held but sums and samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensors.lazy import pieces

_GRID = 32  # rows and columns of a sample
# The least elements of a matrix of a stack that has figures of its own: not a kernel's.
_LEAST_OF_STACK = 1024


class Against:
    """The values of a merged tensor against one reference: the weights that the delta was added to.

    All are sums over the elements. The difference is that between the merged tensor and
    the reference with the delta, before it is rounded.

    Attributes:
        off: The squared length of the difference.
        off_along: The product of the difference and the delta.
        rounding: The squared length of what rounding once takes.
        rounding_along: The product of what rounding once takes and the delta.
        size: The squared length of the reference.
        is_same: Whether the merged tensor is the reference, rounded to its dtype.
    """

    def __init__(self) -> None:
        self.off = 0.0
        self.off_along = 0.0
        self.rounding = 0.0
        self.rounding_along = 0.0
        self.size = 0.0
        self.is_same = True

    def add(
        self, found: Tensor, before: Tensor, delta: Tensor, dtype: torch.dtype
    ) -> None:
        """Add some values: of the merged tensor, the reference and the delta.

        ``dtype`` is rounded to.
        """
        reference = before.float()
        expected = reference + delta
        off = found.float() - expected
        lost = expected.to(dtype).float() - expected
        self.off += _dot(off, off)
        self.off_along += _dot(off, delta)
        self.rounding += _dot(lost, lost)
        self.rounding_along += _dot(lost, delta)
        self.size += _dot(reference, reference)
        if self.is_same:
            self.is_same = torch.equal(found, reference.to(found.dtype))

    def include(self, other: Against) -> None:
        """Add the sums of other elements."""
        self.off += other.off
        self.off_along += other.off_along
        self.rounding += other.rounding
        self.rounding_along += other.rounding_along
        self.size += other.size
        self.is_same &= other.is_same

    def kept(self, delta: float) -> float:
        """The part of the delta that is there, given its squared length."""
        return 1.0 + self.off_along / delta

    def kept_by_rounding(self, delta: float) -> float:
        """The part of the delta that rounding once leaves, given its squared length."""
        return 1.0 + self.rounding_along / delta

    def error(self, delta: float) -> float:
        """The length of the difference, as a part of the delta's, given that squared."""
        return math.sqrt(self.off / delta)

    def aside(self, delta: float) -> float:
        """The length of that part of the change that is no multiple of the delta, given its squared length."""
        return math.sqrt(max(self.off - self.off_along**2 / delta, 0.0))


@dataclass(frozen=True)
class Sample:
    """A grid of a tensor's values, in float32: those found, those expected, and those trained on."""

    found: Tensor
    after: Tensor
    trained: Tensor

    @property
    def delta(self) -> Tensor:
        """The values that the adapter adds."""
        return self.after - self.trained

    @property
    def change(self) -> Tensor:
        """The values that were added."""
        return self.found - self.trained

    def split(self, number: int) -> list[Sample]:
        """The samples of so many matrices."""
        sides = [
            side.view(number, -1) for side in (self.found, self.after, self.trained)
        ]
        return [Sample(*rows) for rows in zip(*sides, strict=True)]


@dataclass(frozen=True)
class Stored:
    """The quantized storage of a tensor.

    Attributes:
        dtype: The dtype of its codes.
        has_due_scales: Whether its statistics are the base's, in which case its codes
            alone were changed, or, in 8 bits, those that the merged values give.
        most_off: The squared length of what rounding to its codes takes at most.
    """

    dtype: torch.dtype
    has_due_scales: bool = True
    most_off: float = math.inf


@dataclass(frozen=True)
class Figures:
    """The figures of one tensor.

    Attributes:
        fqn: Its name.
        shape: Its shape.
        dtype: The dtype that it is stored in.
        stored: The way that it is stored quantized; ``None`` where it is not.
        was_quantized: Whether it was quantized in training.
        delta: The squared length of the adapter's delta; 0 where it has none.
        trained: The tensor against the weights that were trained on.
        original: The tensor against those in the base's files; ``None`` where these
            hold none that can be compared.
        is_finite: Whether all of its values are.
        sample: Some of its values.
        base_codes: The share of the base's codes that the tensor has when its delta is
            taken off and it is quantized as the base, or the base as it is stored; 0
            where that was not asked.
        is_scaled: Whether it has other scales than those beside these codes.
        requantized_bits: The bits of the codes of the training, where the values are those
            that quantizing them again leaves; else 0.
        likelier: The multiple of the delta that has to be taken off for clearly more of
            the base's codes; ``None`` where no other than 1 has.
        matrices: The figures of each matrix of a stack.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: Stored | None
    was_quantized: bool
    delta: float
    trained: Against
    original: Against | None
    is_finite: bool
    sample: Sample
    base_codes: float = 0.0
    is_scaled: bool = False
    requantized_bits: int = 0
    likelier: float | None = None
    matrices: Sequence[Figures] = ()

    @property
    def is_quantized(self) -> bool:
        """Whether it is stored quantized."""
        return self.stored is not None

    @property
    def is_of_codes(self) -> bool:
        """Whether its values are those of codes, in which it is stored or was before."""
        return self.is_quantized or self.requantized_bits > 0

    @property
    def leaves(self) -> Sequence[Figures]:
        """Those of its matrices, if it is a stack that has them, or else these."""
        return self.matrices or [self]

    @property
    def references(self) -> list[Against]:
        """The references that there are, the trained one first."""
        return (
            [self.trained] if self.original is None else [self.trained, self.original]
        )

    @property
    def nearest(self) -> Against:
        """The reference that explains the tensor best."""
        return min(self.references, key=lambda against: against.off)

    @property
    def is_onto_original(self) -> bool:
        """Whether the base's own weights explain it, and not those that were trained on."""
        if self.original is None:
            return self.base_codes > 0
        return self.original.off < self.trained.off

    @property
    def num_bits(self) -> int:
        """The bits of an element as it is stored: a byte of bitsandbytes holds two of 4."""
        is_packed = self.is_quantized and self.dtype == torch.uint8
        return 4 if is_packed else 8 * self.dtype.itemsize


def compare(
    fqn: str,
    found: Tensor,
    after: Tensor,
    trained: Tensor,
    original: Tensor | None,
    *,
    dtype: torch.dtype,
    stored: Stored | None,
    was_quantized: bool,
) -> Figures:
    """Compare one tensor of a merged model with its expected values and its references.

    Args:
        fqn: Its name.
        found: The tensor, dequantized; it may be lazy, as all others.
        after: What it should be, in float32, before it is rounded.
        trained: The weight that was trained on, of its shape.
        original: The weight in the base's files, or ``None``.
        dtype: The dtype that the model computes in, which a merge may round to.
        stored: The quantized storage that ``found`` was dequantized from.
        was_quantized: Whether the weight was quantized in training.
    """
    coarser = max(dtype, found.dtype, key=lambda one: torch.finfo(one).eps)
    references = [trained] if original is None else [trained, original]
    shape = tuple(after.shape)
    sampling = _Sampling(shape)
    sums: list[_Sums] = []
    size = _size_of_matrices(shape)
    for start, values in _in_step([found, after, *references], size):
        if start == len(sums) * size:
            sums.append(_Sums(len(references)))
        merged, expected, *befores = values
        sums[-1].add(merged, expected, befores, coarser)
        sampling.add(merged, expected, befores[0])

    def figures(
        name: str,
        shape: tuple[int, ...],
        total: _Sums,
        sample: Sample,
        matrices: Sequence[Figures] = (),
    ) -> Figures:
        trained, *originals = total.against
        return Figures(
            name,
            shape,
            found.dtype if stored is None else stored.dtype,
            stored,
            was_quantized,
            total.delta,
            trained,
            originals[0] if originals else None,
            math.isfinite(trained.off),
            sample,
            matrices=matrices,
        )

    sample = sampling.sample()
    total = _Sums(len(references))
    matrices = []
    parts = sample.split(len(sums)) if len(sums) > 1 else []
    for one in sums:
        total.include(one)

    for index, part in enumerate(parts):
        name = f"{fqn}[{index}]"
        matrices.append(figures(name, shape[-2:], sums[index], part))

    return figures(fqn, shape, total, sample, matrices)


def _size_of_matrices(shape: tuple[int, ...]) -> int:
    """The elements of each matrix of a stack; of another tensor, all."""
    size = math.prod(shape[-2:])
    is_stack = len(shape) == 3 and size >= _LEAST_OF_STACK
    return size if is_stack else math.prod(shape)


class _Sums:
    """The sums over some elements: of the delta, and against each reference."""

    def __init__(self, num_references: int) -> None:
        self.delta = 0.0
        self.against = [Against() for _ in range(num_references)]

    def add(
        self, found: Tensor, after: Tensor, befores: list[Tensor], dtype: torch.dtype
    ) -> None:
        """Add some values of each side."""
        added = after.float() - befores[0].float()
        self.delta += _dot(added, added)
        for against, before in zip(self.against, befores, strict=True):
            against.add(found, before, added, dtype)

    def include(self, other: _Sums) -> None:
        """Add the sums of other elements."""
        self.delta += other.delta
        for against, more in zip(self.against, other.against, strict=True):
            against.include(more)


class _Sampling:
    """Picks the values of a grid out of those that come by."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._positions = grid_of(shape).tolist()
        self._num_picked = 0
        self._start = 0
        self._picked: list[tuple[Tensor, ...]] = []

    def add(self, *sides: Tensor) -> None:
        """Pick from the next values of each side."""
        end = self._start + sides[0].numel()
        number = bisect_left(self._positions, end) - self._num_picked
        if number:
            picked = self._positions[self._num_picked :][:number]
            inside = torch.tensor(picked) - self._start
            self._picked.append(tuple(side[inside].float() for side in sides))

        self._num_picked += number
        self._start = end

    def sample(self) -> Sample:
        """The values that were picked."""
        nothing = torch.empty(0)  # all of a tensor without elements
        picked = [(nothing, nothing, nothing), *self._picked]
        found, after, trained = map(torch.cat, zip(*picked, strict=True))
        return Sample(found, after, trained)


def grid_of(shape: tuple[int, ...]) -> Tensor:
    """The flat positions of a sample of a tensor: an even grid of each of its matrices, or of its elements."""
    if not shape or 0 in shape:
        return torch.zeros(math.prod(shape), dtype=torch.int64)

    if len(shape) == 1:
        return _evenly(shape[0], _GRID * _GRID)

    *stacked, height, width = shape
    rows, columns = _evenly(height, _GRID), _evenly(width, _GRID)
    matrices = torch.arange(math.prod(stacked))
    starts = (matrices * height).unsqueeze(1) + rows
    return (starts.reshape(-1, 1) * width + columns).reshape(-1)


def grid_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The number of a tensor's matrices, and the rows and columns of the grid of each."""
    if len(shape) < 2:
        return 1, 1, min(math.prod(shape), _GRID * _GRID)

    *stacked, height, width = shape
    return math.prod(stacked), min(height, _GRID), min(width, _GRID)


def _evenly(length: int, number: int) -> Tensor:
    number = min(length, number)
    return torch.arange(number) * length // number


def _in_step(
    tensors: Sequence[Tensor], most: int
) -> Iterator[tuple[int, list[Tensor]]]:
    """The values of tensors of one size, flat: the place of the first, and as many of each at a time.

    None of them reach beyond a multiple of ``most``.
    """
    streams = [pieces(tensor) for tensor in tensors]
    left = [torch.empty(0) for _ in tensors]
    num_elements = tensors[0].numel()
    start = 0
    while start < num_elements:
        for place, stream in enumerate(streams):
            while not left[place].numel():
                left[place] = next(stream).reshape(-1)
        size = min(values.numel() for values in left)
        size = min(size, most - start % most)
        yield start, [values[:size] for values in left]
        left = [values[size:] for values in left]
        start += size


def _dot(a: Tensor, b: Tensor) -> float:
    return float(torch.dot(a, b))
