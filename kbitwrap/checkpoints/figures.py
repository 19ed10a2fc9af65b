"""One tensor of a merged model against what it should be: sums over all of its values, and a sample of them.

The values are read a few at a time: nothing is held but sums and samples.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..export.sums import ComparisonSums
from ..tensors.lazy import pieces

_GRID = 32  # rows and columns of a sample
# The least elements of a matrix of a stack that has figures of its own: not a kernel's.
_LEAST_OF_STACK = 1024


class Sample(NamedTuple):
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


class Stored(NamedTuple):
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
        trained: The tensor against the weights that were trained on.
        original: The tensor against those in the base's files; ``None`` where these
            hold none that can be compared.
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
    trained: ComparisonSums
    original: ComparisonSums | None
    sample: Sample
    base_codes: float = 0.0
    is_scaled: bool = False
    requantized_bits: int = 0
    likelier: float | None = None
    matrices: Sequence[Figures] = ()

    @property
    def delta(self) -> float:
        """The squared length of the adapter's delta on the nearest reference; 0 where it has none."""
        return self.nearest.delta

    @property
    def is_finite(self) -> bool:
        """Whether all of its values are."""
        return math.isfinite(self.trained.off)

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
        """The figures of its matrices, if it is a stack that has them, or else these alone."""
        return self.matrices or [self]

    @property
    def references(self) -> list[ComparisonSums]:
        """The references that there are, the trained one first."""
        references = [self.trained, self.original]
        return [one for one in references if one is not None]

    @property
    def nearest(self) -> ComparisonSums:
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
    # the elements of each matrix of a stack that has figures of its own
    size = math.prod(shape[-2:])
    if len(shape) != 3 or size < _LEAST_OF_STACK:
        size = math.prod(shape)

    positions = grid_of(shape).tolist()
    nothing = torch.empty(0)  # the sample of a tensor without elements
    picked = [[nothing] * 3]
    sums: list[list[ComparisonSums]] = []
    for start, values in _in_step([found, after, *references], size):
        if start == len(sums) * size:
            sums.append([ComparisonSums() for _ in references])

        merged, expected, *befores = values
        delta = expected.float() - befores[0].float()
        for against, before in zip(sums[-1], befores, strict=True):
            against.add_reference(merged, before.float(), delta, coarser)

        first = bisect_left(positions, start)
        last = bisect_left(positions, start + len(merged))
        if first < last:
            inside = torch.tensor(positions[first:last]) - start
            picked.append([side[inside].float() for side in values[:3]])
        # Their memory is free while the next values are computed.
        del values, merged, expected, befores, delta

    sample = [torch.cat(side) for side in zip(*picked, strict=True)]
    total = [ComparisonSums() for _ in references]
    for of_matrix in sums:
        for against, more in zip(total, of_matrix, strict=True):
            against.include(more)

    def make(
        name: str,
        shape: tuple[int, ...],
        against: list[ComparisonSums],
        picked: list[Tensor],
        matrices: Sequence[Figures] = (),
    ) -> Figures:
        return Figures(
            name,
            shape,
            found.dtype if stored is None else stored.dtype,
            stored,
            was_quantized,
            against[0],
            against[1] if original is not None else None,
            Sample(*picked),
            matrices=matrices,
        )

    matrices = []
    for index, of_matrix in enumerate(sums if len(sums) > 1 else ()):
        rows = [side.view(len(sums), -1)[index] for side in sample]
        matrices.append(make(f"{fqn}[{index}]", shape[-2:], of_matrix, rows))

    return make(fqn, shape, total, sample, matrices)


def grid_of(shape: tuple[int, ...]) -> Tensor:
    """Return the flat positions of a sample of a tensor: an even grid of each of its matrices, or of its elements."""
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
    """Return the number of a tensor's matrices, and the rows and columns of the grid of each."""
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
    """Yield the values of tensors of one size, flat: the place of the first, and as many of each at a time.

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
