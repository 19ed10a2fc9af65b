"""The tensors of a merged model, computed when they are read.

`merge_rows` has the formula: the base in float32, plus what PEFT's own layers add. The
sum is rounded once, to the dtype of the base or to the codes of a layer that stays
quantized.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ExportError
from ..model.bitsandbytes_layers import (
    Rows,
    codes_of,
    copy_statistics,
    dequantized_dtype,
    dequantizer,
    quantized_layer,
)
from ..model.quantization import is_quantized_layer, is_quantized_parameter
from ..model.tree import join, shallow_copy
from ..tensors.codes import RandomNumbers
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import LazyTensor, values_of
from .adapters import ActiveLayer, refuse_infinite
from .float32 import (
    Float32Layer,
    float32_module,
    lay_over,
    merges_by_rows,
    probe_of,
)
from .plain import is_transposed, make_plain, parameter_of, plain_layer
from .sums import ComparisonSums

# The float32 values of a block of rows. Merging it takes several times these bytes, and
# some time whatever its size.
_BLOCK_BYTES = 4 << 20
# The elements that are compared or rounded to codes at once: whole bytes of codes, whole
# words of random numbers, and few enough for a CPU's cache.
_SUMMED_AT_ONCE, _ROUNDED_AT_ONCE = 1 << 15, 1 << 18
# The largest difference allowed between what a layer and its merge compute, relative to
# the largest output, adapted or not. Rounding in float32 stays below it; half a unit in
# the last place of float16, the finer half dtype, is 2**-12.
_TOLERANCE = 2.0**-15
_MOST_ROUNDED = 2.0**-7  # of the largest value, by rounding to half
_MOST_CLIPPED = 1e-3  # of a weight's elements, beyond the codes of their groups
_OF_STORAGE = (
    "PEFT computes with what a quantized layer stores as though it were its weight: "
    "train this method on a base that is not quantized"
)
_REMEDY = "merge it as 'half', or as 'mixed' where the adapter leaves layers alone"
Sums = dict[str, ComparisonSums] | None
"""The sums of the tensors that were computed, by name; ``None``: nobody wants any."""


def merge_rows(
    module: nn.Module,
    name: str,
    layers: Sequence[ActiveLayer],
) -> Iterator[tuple[Rows, Tensor, Tensor]]:
    """Merge adapters into a parameter of a module, a few rows at a time.

    Args:
        module: The base's module. The weight of a layer of bitsandbytes has the shape
            ``(out_features, in_features)``.
        name: The parameter.
        layers: PEFT's layers around the module, the innermost first.

    Yields:
        Rows, or ``...`` for all; their values in the base, in the dtype that they are
        stored in or dequantized to; and the merged values in float32, which are the
        base's own where there is no adapter.
    """
    layers = [one for one in layers if one.parameter in (None, name)]
    # computes in float32 what the module does; without values where it is quantized
    plain = module
    if is_quantized_layer(module):
        plain = plain_layer(module, as_linear=True)

    # A layer that adapts the module merges all of its parameters at once.
    adapts_module = any(one.parameter is None for one in layers)
    readers = {}
    for other, parameter in module._parameters.items():
        if other == name or (adapts_module and parameter is not None):
            readers[other] = _row_reader(module, other)

    if layers:
        first = layers[0]
        # where a module holds others, as attention does, PEFT's layer adapts more than its
        # own weight
        if module._modules and first.parameter is None:
            why = f"it adapts several modules of {type(module).__name__} at once"
            raise first.refusal(why)
        if vars(module).get("max_norm") is not None:
            why = "the embedding renormalizes the rows that it looks up (max_norm)"
            raise first.refusal(why)

    shapes = [parameter_of(plain, other).shape for other in readers]
    copies: list[Float32Layer] = []
    for rows in _blocks(module, layers, shapes):
        read = {other: reader(rows) for other, reader in readers.items()}
        base = read[name]
        if not layers:
            yield rows, base, base
            continue

        if not copies:
            for one in layers:
                with _refusing(one):
                    copies.append(Float32Layer(one, base.device))

        # copied even if float32 already: it is merged in place
        values = {
            other: one.to(torch.float32, copy=True) for other, one in read.items()
        }
        del read
        merged = _merge(float32_module(plain, values), copies, rows)
        del values
        yield rows, base, parameter_of(merged, name).detach()
        del base, merged  # their memory is free while the next rows are read


@torch.no_grad()
def _merge(base: nn.Module, copies: Sequence[Float32Layer], rows: Rows) -> nn.Module:
    """Merge PEFT's layers into some rows of a float32 base by their own method.

    What results must compute what the layers do over the base: both are run on a probe.
    """
    layers = [copied.take(rows) for copied in copies]
    outermost = copies[-1].one
    # A parameter that is adapted by name is not that of a layer that could be run by
    # itself.
    is_compared = all(copied.one.parameter is None for copied in copies)
    # PEFT's methods may draw random numbers.
    with torch.random.fork_rng(devices=[]):
        if is_compared:
            with _refusing(outermost):
                probe = probe_of(base)
                unadapted = base(probe)
                expected = _adapted(base, layers, probe, unadapted, copies[0].one)

        merged = base
        for copied, layer in zip(copies, layers, strict=True):
            with _refusing(copied.one):
                adapted = lay_over(merged, layer)
                adapted.merge(safe_merge=False, adapter_names=adapted._active_adapter)
                merged = adapted.get_base_layer()

        if is_compared:
            with _refusing(outermost):
                _compare(merged(probe), expected, unadapted)

    return merged


def _adapted(
    base: nn.Module,
    layers: Sequence[Any],
    probe: Tensor,
    unadapted: Tensor,
    innermost: ActiveLayer,
) -> Tensor:
    """Compute the output of PEFT's layers, one over the other, for a probe.

    Their base is known to give ``unadapted`` for it, and does not compute that again.
    """
    if not isinstance(unadapted, Tensor):
        raise TypeError(
            f"{type(base).__name__} returns no tensor that PEFT could add to, but a "
            f"{type(unadapted).__name__}: leave it out of the adapter (exclude_modules)"
        )

    known = shallow_copy(base)
    if innermost.reads_storage:  # whoever does gets no numbers
        weight = base.get_parameter("weight")
        unknown = weight.new_full((1,), math.nan).expand(weight.shape)
        known._parameters["weight"] = nn.Parameter(unknown, requires_grad=False)

    def forward(given: Tensor) -> Tensor:  # may be written to
        return unadapted.clone() if given is probe else base(given)

    vars(known)["forward"] = forward
    adapted = known
    for layer in layers:
        adapted = lay_over(adapted, layer)

    return adapted(probe)  # type: ignore[no-any-return]


def _compare(found: Tensor, expected: Tensor, unadapted: Tensor) -> None:
    """Raise unless two outputs are the same but for rounding.

    Others refuse weights that are not finite, which are let through here.
    """
    if not torch.isfinite(found).all():
        return

    if not torch.isfinite(expected).all():
        raise ValueError(_OF_STORAGE)

    difference = float((found - expected).abs().max())
    largest = float(max(unadapted.abs().max(), expected.abs().max()))
    if not difference <= _TOLERANCE * largest:
        raise ValueError(
            f"the merged layer computes another output (off by {difference:.1e}, the "
            f"largest is {largest:.1e})"
        )


@contextlib.contextmanager
def _refusing(one: ActiveLayer) -> Iterator[None]:
    """Turn errors into `ExportError`, which names the layer and its adapters.

    One that says itself what is in the way, such as a base that changed, stays as it is.
    """
    try:
        yield
    except ExportError:
        raise
    except Exception as error:
        why: object = error
        if one.reads_storage and type(error) is RuntimeError:  # torch's, of shapes
            why = f"{_OF_STORAGE} ({error})"
        raise one.refusal(why) from error


def _blocks(
    module: nn.Module,
    layers: Sequence[ActiveLayer],
    shapes: Sequence[torch.Size],
) -> list[Rows]:
    """Return the rows to merge at once: all of them where they cannot be merged apart."""
    num_bytes = sum(shape.numel() for shape in shapes) * torch.float32.itemsize
    if num_bytes <= _BLOCK_BYTES or len({shape[:1] for shape in shapes}) > 1:
        return [...]

    num_rows = shapes[0][0]
    if not all(merges_by_rows(one, module, num_rows) for one in layers):
        return [...]

    step = max(_BLOCK_BYTES * num_rows // num_bytes, 1)
    if is_quantized_layer(module):
        step += step % 2  # two rows of codes end with a whole byte
    starts = range(0, num_rows, step)
    return [slice(start, min(start + step, num_rows)) for start in starts]


def _row_reader(module: nn.Module, name: str) -> Callable[[Rows], Tensor]:
    """Return a function that reads rows of a module's parameter, dequantized."""
    parameter = parameter_of(module, name)
    if is_quantized_parameter(parameter):
        return dequantizer(module)
    return values_of(parameter).__getitem__


@dataclass
class MergedModule:
    """A module of the twin whose tensors are computed.

    Attributes:
        fqn: The name of the module.
        shell: The twin's module, whose tensors are replaced.
        original: A copy of the shell as it was.
        is_rounded: Whether its weight, of another library than bitsandbytes, is
            dequantized to another dtype than the merged model's.
        copy: The active copy of ``modules_to_save``, which runs instead of the
            original.
        layers: PEFT's layers with active adapters, the innermost first.
    """

    fqn: str
    shell: nn.Module
    original: nn.Module
    is_rounded: bool = False
    copy: nn.Module | None = None
    layers: list[ActiveLayer] = field(default_factory=list)

    @property
    def source(self) -> nn.Module:
        """The module that holds the values."""
        return self.original if self.copy is None else self.copy

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter has a part in the module."""
        return self.copy is not None or bool(self.layers)

    def try_out(self) -> None:
        """Merge the first rows and throw them away.

        `ExportError` is raised where they are not merged exactly.
        """
        for one in self.layers:
            name = one.parameter or "weight"
            if self.source._parameters.get(name) is None:
                why = f"{type(self.source).__name__} has no parameter {name!r}"
                raise one.refusal(why)
            next(merge_rows(self.source, name, self.layers))

    def replace_tensors(
        self, half: torch.dtype | None, seed: int | None, sums: Sums
    ) -> None:
        """Replace the shell's tensors by lazy ones.

        Args:
            half: The dtype of dequantized weights that do not name a half dtype;
                ``None``: nothing is rounded.
            seed: The seed of the codes of a weight that stays quantized; ``None``: a
                quantized layer becomes a plain one.
            sums: The sums of the tensors, which are added to; there where ``seed`` is.
        """
        if is_quantized_layer(self.original) and seed is None:
            make_plain(self.shell)
        parameters = vars(self.shell)["_parameters"]
        for name, value in self.source._parameters.items():
            if value is None:
                continue
            is_quantized = is_quantized_parameter(value)
            is_rounded = self.is_rounded and name == "weight"
            is_adapted = any(one.parameter in (None, name) for one in self.layers)
            if is_quantized and seed is not None:
                assert sums is not None
                parameters[name] = self._codes(seed, sums)
            elif is_quantized or is_rounded or is_adapted or self.copy is not None:
                # of a quantized layer, that of the plain one in its place
                shape = (parameters[name] if is_quantized else value).shape
                dtype = self._dtype(name, half)
                parameters[name] = self._rounded(name, shape, dtype, sums)
            else:
                parameters[name] = value

        for name, buffer in self.source._buffers.items():
            before = self.original._buffers.get(name)
            if buffer is not None and before is not None:
                buffer = buffer.to(before.dtype)
            self.shell._buffers[name] = buffer

    def _dtype(self, name: str, half: torch.dtype | None) -> torch.dtype:
        """Return the dtype to round to: that of the original, or a half one."""
        before = self.original._parameters.get(name)
        if before is None:
            raise ExportError(
                f"{self.fqn}: its trained copy has a {name}, but the base has none; "
                "export without merging",
                fqn=self.fqn,
            )

        if half is None:
            return torch.float32
        if self.is_rounded and name == "weight":
            return half
        if not is_quantized_parameter(before):
            return before.dtype

        # PEFT quantizes what some adapters leave in float32
        own = dequantized_dtype(self.original, before)
        return own if own in HALF_DTYPES else half

    def _rounded(
        self, name: str, shape: torch.Size, dtype: torch.dtype, sums: Sums
    ) -> LazyTensor:
        """Make the tensor of a parameter, rounded to a dtype: float32 rounds nothing.

        The sums over what is added and what rounding takes are put into ``sums``.
        """
        fqn, module = join(self.fqn, name), self.source
        is_turned = name == "weight" and is_transposed(module)

        def blocks(source: nn.Module = module) -> Iterator[tuple[Rows, Tensor]]:
            own = None
            if sums is not None and self.is_adapted:
                own = sums[fqn] = ComparisonSums(8 * dtype.itemsize)
            read_original = None
            if self.copy is not None:
                read_original = _row_reader(self.original, name)
            for rows, base, value in merge_rows(source, name, self.layers):
                rounded = value.to(dtype)
                if self.is_adapted:
                    refuse_infinite(fqn, rounded)
                if own is not None:
                    before = base if read_original is None else read_original(rows)
                    parts = [
                        one.reshape(-1).split(_SUMMED_AT_ONCE)
                        for one in (before, value, rounded)
                    ]
                    for old, exact, new in zip(*parts, strict=True):
                        own.add(exact - old.float(), new.float() - exact)
                del base, value
                yield rows, rounded
                del rounded  # its memory is free while the next rows are merged

        def compute() -> Tensor:
            source = module
            whole = None
            parameter = parameter_of(module, name)
            if isinstance(parameter, LazyTensor) and parameter.is_own:
                # Nobody else reads these values: each block takes the place of its own.
                values = values_of(parameter)
                source = shallow_copy(module)
                vars(source)["_parameters"][name] = values
                whole = values.to(dtype).contiguous()

            for rows, block in blocks(source):
                if whole is None:
                    whole = block.new_empty(shape[::-1] if is_turned else shape)
                whole[rows] = block
                del block

            assert whole is not None
            return whole.t() if is_turned else whole

        def pieces() -> Iterator[Tensor]:
            for _, block in blocks():
                yield block
                del block

        in_pieces = None if is_turned else pieces
        return LazyTensor(shape, dtype, compute, in_pieces, is_own=True)

    def _codes(self, seed: int, sums: dict[str, ComparisonSums]) -> LazyTensor:
        """Make a quantized weight with other codes, and with the statistics that it has.

        What the adapters add to a value is added to what its code stands for, and rounded
        at random (`Codes.round_at_random`). The numbers follow from the weight's name and a
        seed: it can be computed again.
        """
        fqn, module = join(self.fqn, "weight"), self.original
        stored = module.get_parameter("weight")

        @torch.no_grad()
        def compute() -> Tensor:
            layer = quantized_layer(module)
            weight = layer.get_parameter("weight")
            codes = codes_of(layer)
            assert codes is not None
            random = RandomNumbers(fqn, seed)
            own = sums[fqn] = ComparisonSums(8 // codes.per_byte)
            rounded = []
            start = 0
            for _, base, value in merge_rows(layer, "weight", self.layers):
                before = base.float()
                if start == 0:
                    found = codes.values_of(0, before.numel()).view_as(before)
                    off = (found - before).abs().max()
                    if off > _MOST_ROUNDED * before.abs().max():
                        raise ExportError(
                            f"{fqn}: bitsandbytes computes other values on "
                            f"{before.device.type} than the codes and scales stand for, as "
                            f"it does where a row is no multiple of a block; {_REMEDY}",
                            fqn=fqn,
                        )
                refuse_infinite(fqn, value)
                delta = value.sub_(before).flatten()
                for part in delta.split(_ROUNDED_AT_ONCE):
                    result = codes.round_at_random(start, part, random)
                    start += len(part)
                    own.add(part, result.off)
                    own.num_clipped += result.num_clipped
                    rounded.append(result.stored)

            share = own.num_clipped / start
            if share > _MOST_CLIPPED:
                raise ExportError(
                    f"{fqn}: {share:.2%} of the merged weights are beyond the range of their "
                    "quantization, whose scales stay the base's: the delta is too large "
                    f"for them; {_REMEDY}",
                    fqn=fqn,
                )

            return torch.cat(rounded).view(weight.dtype).view(weight.shape)

        made = LazyTensor(stored.shape, stored.dtype, compute, is_own=True)
        copy_statistics(stored, made)
        return made
