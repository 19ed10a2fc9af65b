"""One tensor of a merged model against what it should be: sums over all of its values, and a sample of them.

The values are read a few at a time: nothing is held but sums and samples.
"""

from __future__ import annotations

import dataclasses
import math
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
    """Grids of values in float32, by matrix, row and column: those found, those expected, those of the references."""

    found: Tensor
    after: Tensor
    trained: Tensor
    original: Tensor

    @property
    def delta(self) -> Tensor:
        """The values that the adapter adds."""
        return self.after - self.trained

    @property
    def change(self) -> Tensor:
        """The values that were added to the trained ones."""
        return self.found - self.trained


@dataclass(frozen=True)
class Figures:
    """The figures of one tensor.

    Attributes:
        fqn: Its name.
        shape: Its shape.
        dtype: The dtype that it is stored in: of a quantized one, that of its codes.
        is_quantized: Whether it is stored quantized.
        was_quantized: Whether it was quantized in training.
        references: The tensor against the weights that were trained on, and against
            those in the base's files where these were compared.
        sample: Some of its values.
        has_due_scales: Whether its scales are those of the base, or, in 8 bits, those
            that the merged values give.
        most_off: The squared length of what rounding to its codes takes at most.
        base_codes: The share of the base's codes that it has when its delta is taken off
            and it is quantized as the base; 0 where that was not asked. Of a tensor
            without a delta the codes are those of the checkpoint.
        is_scaled: Whether it has other scales than those codes have.
        requantized_bits: The bits of the codes of the training, where the values are those
            that quantizing them again leaves; else 0.
        likelier: The multiple of the delta that has to be taken off for clearly more of
            the base's codes; ``None`` where no other than 1 has.
        matrices: The figures of each matrix of a stack.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_quantized: bool
    was_quantized: bool
    references: Sequence[ComparisonSums]
    sample: Sample
    has_due_scales: bool = True
    most_off: float = math.inf
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
        return math.isfinite(self.references[0].off)

    @property
    def leaves(self) -> Sequence[Figures]:
        """The figures of its matrices, if it is a stack that has them, or else these alone."""
        return self.matrices or [self]

    @property
    def nearest(self) -> ComparisonSums:
        """The reference that explains the tensor best."""
        return min(self.references, key=lambda against: against.off)

    @property
    def is_onto_original(self) -> bool:
        """Whether the base's own weights explain it, and not those that were trained on."""
        return self.nearest is not self.references[0] or self.base_codes > 0

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
    stored: torch.dtype | None,
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
        stored: The dtype of the codes that ``found`` was dequantized from.
        was_quantized: Whether the weight was quantized in training.
    """
    coarser = max(dtype, found.dtype, key=lambda one: torch.finfo(one).eps)
    references = [trained] if original is None else [trained, original]
    shape = tuple(after.shape)
    # the elements of each matrix of a stack that has figures of its own
    size = math.prod(shape[-2:])
    if len(shape) != 3 or size < _LEAST_OF_STACK:
        size = math.prod(shape)

    grid = grid_of(shape)
    positions = grid.flatten()
    sample = torch.zeros(len(references) + 2, *grid.shape)
    total = [ComparisonSums() for _ in references]
    sums: list[list[ComparisonSums]] = []
    for start, values in _in_step([found, after, *references], size):
        if start == len(sums) * size:
            sums.append([ComparisonSums() for _ in references])

        merged, expected, *befores = values
        delta = expected.float() - befores[0].float()
        for against, before in zip(sums[-1], befores, strict=True):
            against.add_reference(merged, before.float(), delta, coarser)

        is_here = (positions >= start) & (positions < start + len(merged))
        for row, side in zip(sample.flatten(1), values, strict=True):
            row[is_here] = side[positions[is_here] - start].float()
        # Their memory is free while the next values are computed.
        del values, merged, expected, befores, delta, side

    for of_matrix in sums:
        for against, more in zip(total, of_matrix, strict=True):
            against.include(more)

    figures = Figures(
        fqn,
        shape,
        stored or found.dtype,
        stored is not None,
        was_quantized,
        total,
        Sample(sample[0], sample[1], sample[2], sample[-1]),
    )
    matrices = []
    for index, of_matrix in enumerate(sums if len(sums) > 1 else ()):
        matrix = dataclasses.replace(
            figures,
            fqn=f"{fqn}[{index}]",
            shape=shape[-2:],
            references=of_matrix,
            sample=Sample(*[grid[index : index + 1] for grid in figures.sample]),
        )
        matrices.append(matrix)

    return dataclasses.replace(figures, matrices=matrices)


def grid_of(shape: tuple[int, ...]) -> Tensor:
    """Return the flat positions of a sample of a tensor: an even grid of each matrix, by matrix, row and column."""
    height, width = (1, 1, *shape)[-2:]
    matrices = torch.arange(math.prod(shape[:-2])).view(-1, 1, 1)
    rows = _evenly(height).view(-1, 1)
    return (matrices * height + rows) * width + _evenly(width)


def _evenly(length: int) -> Tensor:
    return torch.linspace(0, length - 1, min(length, _GRID), dtype=torch.float64).long()


def _in_step(
    tensors: Sequence[Tensor], most: int
) -> Iterator[tuple[int, list[Tensor]]]:
    """Yield the values of tensors of one size, flat: the place of the first, and as many of each at a time.

    None of them reach beyond a multiple of ``most``.
    """
    streams = [pieces(tensor) for tensor in tensors]
    left = [torch.empty(0) for _ in tensors]
    start = 0
    while start < tensors[0].numel():
        for place, stream in enumerate(streams):
            while not left[place].numel():
                left[place] = next(stream).reshape(-1)
        size = min(most - start % most, *map(len, left))
        yield start, [values[:size] for values in left]
        left = [values[size:] for values in left]
        start += size
