"""One parameter of the base by rows: dequantized, and merged with its adapters.

Exports of the merged model and the measure of a merge read the same values here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..model.bitsandbytes_layers import Rows, dequantized_dtype, dequantizer
from ..model.quantization import is_quantized_layer, is_quantized_parameter
from ..tensors.lazy import values_of
from .adapters import ActiveLayer
from .float32 import float32_module
from .layers import Merger, merges_by_rows
from .plain import parameter_of, plain_layer

# The float32 values of a block of rows. Merging it takes several times these bytes, and
# some time whatever its size.
_BLOCK_BYTES = 2 << 20


class AdaptedTensor:
    """A parameter of a module: as its base is, and merged with adapters.

    ``rows`` are those of its first dimension, the experts of a stack, or ``...`` for
    the whole; `blocks` says which to take at once. The weight of a layer of
    bitsandbytes has the shape ``(out_features, in_features)``; what it is computed from
    is held as long as this object.
    """

    def __init__(
        self, module: nn.Module, name: str, layers: Sequence[ActiveLayer] = ()
    ) -> None:
        self._module = module
        self._name = name
        self._layers = [one for one in layers if one.parameter in (None, name)]
        self._merger = Merger(self._layers) if self._layers else None
        # computes in float32 what the module does; without values where it is quantized
        self._plain = module
        if is_quantized_layer(module):
            self._plain = plain_layer(module, as_linear=True)

        # A layer that adapts the module merges all of its parameters at once.
        adapts_module = any(one.parameter is None for one in self._layers)
        self._readers: dict[str, Callable[[Rows], Tensor]] = {}
        for other, parameter in module._parameters.items():
            if other == name or (adapts_module and parameter is not None):
                self._readers[other] = _reader(module, other)

    @property
    def shape(self) -> torch.Size:
        """The shape of what is computed."""
        return parameter_of(self._plain, self._name).shape

    @property
    def is_own(self) -> bool:
        """Whether ``base(...)`` is in memory that nothing else reads."""
        parameter = parameter_of(self._module, self._name)
        if is_quantized_parameter(parameter):
            return dequantized_dtype(self._module, parameter) is not None
        return getattr(parameter, "is_own", False)

    def base(self, rows: Rows) -> Tensor:
        """Rows without adapters.

        They have the dtype that they are stored in, or dequantized to.
        """
        return self._readers[self._name](rows)

    def merged(self, rows: Rows, before: Tensor | None = None) -> Tensor:
        """Rows with the adapters merged, in float32.

        Where there is no adapter they are those of the base, in its dtype.

        Args:
            rows: The rows.
            before: The same rows of the base, where they are known.
        """
        if before is None:
            before = self.base(rows)
        if self._merger is None:
            return before

        values = {}
        for name, read in self._readers.items():
            base = before if name == self._name else read(rows)
            # copied even if float32 already: it is merged in place
            values[name] = base.to(torch.float32, copy=True)

        del before, base

        plain = float32_module(self._plain, values)
        del values
        merged = self._merger.merge(plain, rows)
        return parameter_of(merged, self._name).detach()

    def blocks(self) -> list[Rows]:
        """The rows of each block to merge.

        It is a single block where rows cannot be merged by themselves.
        """
        shapes = [parameter_of(self._plain, name).shape for name in self._readers]
        num_values = sum(shape.numel() for shape in shapes)
        num_bytes = num_values * torch.float32.itemsize
        if num_bytes <= _BLOCK_BYTES or len({shape[:1] for shape in shapes}) > 1:
            return [...]

        num_rows = self.shape[0]
        for one in self._layers:
            if not merges_by_rows(one, self._module, num_rows):
                return [...]

        step = max(_BLOCK_BYTES * num_rows // num_bytes, 1)
        blocks: list[Rows] = []
        for start in range(0, num_rows, step):
            blocks.append(slice(start, min(start + step, num_rows)))

        return blocks


def _reader(module: nn.Module, name: str) -> Callable[[Rows], Tensor]:
    """A function that reads rows of a module's parameter, dequantized."""
    parameter = parameter_of(module, name)
    if is_quantized_parameter(parameter):
        return dequantizer(module)
    return values_of(parameter).__getitem__
