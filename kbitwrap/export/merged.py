"""The tensors of one module of the merged model.

They are computed when they are read: dequantized, merged in float32 with the adapters
on the module, and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..model.bitsandbytes_layers import STATISTICS, Rows, dequantized_dtype
from ..model.quantization import is_quantized_layer, is_quantized_parameter
from ..model.tree import join
from ..reports import TensorMeasure
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import LazyTensor
from .adapted import AdaptedTensor
from .adapters import ActiveLayer, refuse_infinite
from .plain import is_transposed, make_plain, parameter_of
from .requantize import requantize
from .tally import Tally


@dataclass
class Merged:
    """The changes that a merge makes to a twin.

    Attributes:
        fqns: The names of the modules that an adapter or a trained copy changed.
        tallies: The sums of the tensors that were computed so far, by name.
        note: What a user should know of the form that was chosen; ``""``: nothing.
    """

    fqns: tuple[str, ...]
    tallies: dict[str, Tally]
    note: str = ""

    @property
    def total(self) -> Tally:
        """The sums over all of these tensors."""
        total = Tally()
        for tally in self.tallies.values():
            total.delta += tally.delta
            total.off += tally.off
            total.off_along += tally.off_along

        return total

    def report(self) -> dict[str, Any]:
        """The fields of an `ExportReport` for what was merged, once all is computed."""
        measures = {}
        for fqn, tally in self.tallies.items():
            if not tally.delta:
                continue
            measures[fqn] = TensorMeasure(
                tally.kept, tally.error, tally.num_bits, tally.num_clipped
            )

        total = self.total
        return {
            "merged": self.fqns,
            "tensors": measures,
            "kept": total.kept if measures else None,
            "error": total.error if measures else None,
            "notes": (self.note,) if self.note else (),
        }


@dataclass
class MergedModule:
    """How the tensors of one module of the twin are computed.

    Attributes:
        fqn: The name of the module.
        shell: The twin's module, whose tensors are replaced.
        original: A copy of the shell as it was.
        dtype: The dtype of dequantized weights, where these do not name a half dtype.
        is_rounded: Whether the dequantized weight is computed in another one.
        copy: The active copy of ``modules_to_save``, which runs instead of the
            original.
        layers: PEFT's layers with active adapters, the innermost first.
        in_float32: Whether the result is not rounded.
        seed: The seed of the codes of a weight that stays quantized; ``None`` where it
            becomes a plain one.
        tallies: The sums of the tensors that were computed, by name; ``None`` where
            they are not wanted.
    """

    fqn: str
    shell: nn.Module
    original: nn.Module
    dtype: torch.dtype
    is_rounded: bool = False
    copy: nn.Module | None = None
    layers: list[ActiveLayer] = field(default_factory=list)
    in_float32: bool = False
    seed: int | None = None
    tallies: dict[str, Tally] | None = None

    @property
    def source(self) -> nn.Module:
        """The module that holds the values."""
        return self.original if self.copy is None else self.copy

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter has a part in the module."""
        return self.copy is not None or bool(self.layers)

    @property
    def kind(self) -> Hashable:
        """The key of modules that are alike: if one of them can be merged, all can."""
        kinds = [(type(one.layer), one.adapters, one.variants) for one in self.layers]
        return type(self.source), *kinds

    def delta(self, name: str) -> Hashable:
        """Identify what adapters add to a parameter, by the values of their factors.

        It is ``None`` where that is not known: of methods other than plain LoRA.
        """
        if self.copy is not None or name != "weight":
            return None

        deltas = [one.delta for one in self.layers]
        return None if None in deltas else (self.is_rounded, *deltas)

    def try_out(self) -> None:
        """Merge the first block and throw the result away.

        `ExportError` is raised where that is not exact.
        """
        for one in self.layers:
            name = one.parameter or "weight"
            if self.source._parameters.get(name) is None:
                why = f"{type(self.source).__name__} has no parameter {name!r}"
                raise one.refusal(why)
            next(self._blocks(name, self._tensor(name)))

    def replace_tensors(self) -> None:
        """Replace the shell's tensors by lazy ones.

        A quantized layer becomes a plain one, unless it stays quantized.
        """
        if is_quantized_layer(self.original) and self.seed is None:
            make_plain(self.shell)
        parameters = vars(self.shell)["_parameters"]
        for name, value in self.source._parameters.items():
            if value is not None and self._stays_quantized(value):
                parameters[name] = self._lazy_codes(value)
            elif value is not None:
                is_computed = self._is_computed(name, value)
                parameters[name] = self._lazy(name) if is_computed else value

        for name, buffer in self.source._buffers.items():
            before = self.original._buffers.get(name)
            if buffer is not None and before is not None:
                buffer = buffer.to(before.dtype)
            self.shell._buffers[name] = buffer

    def _is_computed(self, name: str, value: Tensor) -> bool:
        """Whether the merged model has another tensor for a parameter of the source."""
        if self.copy is not None or is_quantized_parameter(value):
            return True
        is_adapted = any(one.parameter in (None, name) for one in self.layers)
        return is_adapted or self._is_rounded(name)

    def _lazy(self, name: str) -> Tensor:
        """The tensor that the merged model has for a parameter of the source.

        It gives its values in pieces where the rows of these are the blocks' rows.
        """
        shape, pieces = self._tensor_shape(name), None
        if not self._is_transposed(name):
            pieces = functools.partial(self._pieces, name)
        compute = functools.partial(self._compute, name)
        return LazyTensor(shape, self._dtype(name), compute, pieces, is_own=True)

    def _stays_quantized(self, value: Tensor) -> bool:
        return self.seed is not None and is_quantized_parameter(value)

    def _lazy_codes(self, weight: Tensor) -> Tensor:
        """A quantized weight with other codes, and with the statistics that it has."""
        assert self.seed is not None
        fqn = join(self.fqn, "weight")
        tally = Tally()
        if self.tallies is not None:
            self.tallies[fqn] = tally
        compute = functools.partial(
            requantize, fqn, self.original, self.layers, self.seed, tally
        )
        codes = LazyTensor(weight.shape, weight.dtype, compute, is_own=True)
        for name in STATISTICS:
            if name in vars(weight):
                vars(codes)[name] = vars(weight)[name]
        return codes

    def _tensor_shape(self, name: str) -> torch.Size:
        """The shape of a parameter in the plain model."""
        parameter = parameter_of(self.source, name)
        if is_quantized_parameter(parameter):
            parameter = parameter_of(self.shell, name)  # by now the plain layer's
        return parameter.shape

    def _dtype(self, name: str) -> torch.dtype:
        """The original's dtype, which is rounded to."""
        before = self.original._parameters.get(name)
        if before is None:
            raise ExportError(
                f"{self.fqn}: its trained copy has a {name}, but the base has none; "
                "export without merging",
                fqn=self.fqn,
            )

        if self.in_float32:
            return torch.float32

        if self._is_rounded(name):
            return self.dtype

        if not is_quantized_parameter(before):
            return before.dtype

        # PEFT quantizes what some adapters leave in float32
        own = dequantized_dtype(self.original, before)
        return own if own in HALF_DTYPES else self.dtype

    def _is_rounded(self, name: str) -> bool:
        """Whether a weight of another library than bitsandbytes has to be rounded."""
        return self.is_rounded and name == "weight"

    def _is_transposed(self, name: str) -> bool:
        """Whether rows of what is computed are columns of the plain model's tensor."""
        return name == "weight" and is_transposed(self.source)

    def _tensor(self, name: str) -> AdaptedTensor:
        return AdaptedTensor(self.source, name, self.layers)

    @torch.no_grad()
    def _compute(self, name: str) -> Tensor:
        """A parameter of the plain model, in memory of its own.

        It has the plain module's layout and the original dtype.
        """
        tensor = self._tensor(name)
        # Where each block can take the place of what it is computed from, it does.
        whole = None
        if tensor.is_own:
            whole = tensor.base(...).to(self._dtype(name)).contiguous()

        for rows, block in self._blocks(name, tensor):
            if whole is None:
                whole = block.new_empty(tensor.shape)
            whole[rows] = block

        assert whole is not None
        return whole.t() if self._is_transposed(name) else whole

    def _pieces(self, name: str) -> Iterator[Tensor]:
        """The same values as those of ``_compute``, block by block."""
        for _, block in self._blocks(name, self._tensor(name)):
            yield block

    @torch.no_grad()
    def _blocks(
        self, name: str, tensor: AdaptedTensor
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Compute a parameter in its original dtype, a few rows at a time, or whole.

        What an adapter adds is tallied block by block.
        """
        dtype = self._dtype(name)
        # a trained copy is compared with what it is a copy of
        before = tensor
        if self.copy is not None:
            before = AdaptedTensor(self.original, name)
        tally = None
        if self.is_adapted and self.tallies is not None:
            tally = Tally(num_bits=8 * dtype.itemsize)
            self.tallies[join(self.fqn, name)] = tally

        for rows in tensor.blocks():
            value = tensor.merged(rows)
            rounded = value.to(dtype)
            if self.is_adapted:
                refuse_infinite(join(self.fqn, name), value, rounded)
            if tally is not None:
                tally.add(before.base(rows), value, rounded)

            del value
            yield rows, rounded
