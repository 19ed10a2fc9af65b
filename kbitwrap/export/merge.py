"""The merged model: quantized weights dequantized, active adapters merged in float32, everything rounded once."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError, ExportError
from ..model.quantization import (
    Rows,
    dequantizer,
    is_quantized_layer,
    is_quantized_parameter,
    quant_state_of,
)
from ..model.tree import ModelTree, join, shallow_copy
from ..model.wrappers import is_adapter_class
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import LazyTensor, values_of
from .adapters import (
    Merger,
    active_adapters,
    adapters_of,
    is_tuner_layer,
    merges_by_rows,
    of_expert,
    parameter_name,
    refusal,
    refuse_unmergeable,
    trained_copy,
)
from .plain import dequantized, float32_module, is_transposed, parameter_of, plain_layer
from .ties import configs_of_all, settle_ties
from .twin import Twin

# The attributes that a quantized load leaves on a model, and on its configs.
_MODEL_ATTRIBUTES = (
    *("hf_quantizer", "is_quantized", "quantization_method", "hqq_quantized"),
    *(
        "is_loaded_in_4bit",
        "is_loaded_in_8bit",
        "is_4bit_serializable",
        "is_8bit_serializable",
    ),
)
_CONFIG_ATTRIBUTES = ("quantization_config", "_pre_quantization_dtype")

# A layer that merges by rows is merged in this number of blocks, each within these
# bytes of float32 values: merging a block takes several times its bytes, and some time
# whatever its size.
_NUM_BLOCKS = 32
_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 20, 4 << 20

_Reader = Callable[[Rows], torch.Tensor]
_Layers = list[tuple[Any, tuple[str, ...]]]


def merge_into(twin: Twin, adapters: Sequence[str] | None = None) -> tuple[str, ...]:
    """Make a twin, in place, the plain model; return the names of the modules that an adapter or a copy changed."""
    chosen = None if adapters is None else tuple(dict.fromkeys(adapters))
    there = {
        name
        for one in twin.peeled
        for wrapper in one.wrappers
        for name in adapters_of(wrapper)
    }
    for name in chosen or ():
        if name not in there:
            raise ConfigError(
                f"adapters: expected names out of {sorted(there)}, found {name!r}"
            )
    tree = ModelTree(twin.model)
    if not tree.quantization.can_dequantize:
        raise ExportError(
            f"the model is quantized with {tree.quantization.method}, whose weights cannot be dequantized here, and so "
            "not merged; export without merging"
        )
    shared = [
        places for tensor in tree.tensors if len(places := tree.places(tensor)) > 1
    ]
    dtype = _half_dtype(twin.model)
    twin, rounded = dequantized(twin, dtype)
    merges = _plan(twin, dtype, rounded, chosen)
    # Refusals come before anything is written: one layer of each kind is tried out.
    for merge in {merge.kind: merge for merge in reversed(merges)}.values():
        merge.try_out()
    for merge in merges:
        merge.replace_tensors()
    settle_ties(twin.model, shared)
    for _, module in twin.model.named_modules():
        for name in _MODEL_ATTRIBUTES:
            vars(module).pop(name, None)
    for config in configs_of_all(twin.model):
        for name in _CONFIG_ATTRIBUTES:
            vars(config).pop(name, None)
    return tuple(merge.fqn for merge in merges if merge.is_adapted)


@dataclass
class _Merge:
    """How the tensors of one module of the twin are computed."""

    fqn: str
    shell: nn.Module  # the twin's module
    original: nn.Module  # a copy of the shell as it was
    dtype: torch.dtype  # that of dequantized weights, where these do not name their own
    # whether the dequantized weight is computed in another one
    is_rounded: bool = False
    # the active copy of ``modules_to_save``, which runs instead of the original
    copy: nn.Module | None = None
    # PEFT's around the module, the innermost first, and active adapters
    layers: _Layers = field(default_factory=list)

    @property
    def source(self) -> nn.Module:
        """The module that holds the values."""
        return self.original if self.copy is None else self.copy

    @functools.cached_property
    def _plain(self) -> nn.Module:
        """The module that computes in float32 what the source does, without its values where it is quantized."""
        return (
            plain_layer(self.source, as_linear=True)
            if is_quantized_layer(self.source)
            else self.source
        )

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter has a part in the module."""
        return self.copy is not None or bool(self.layers)

    @property
    def kind(self) -> Any:
        """The key of modules that are alike: if one of them can be merged, all can."""
        variants = [
            tuple(map(type, getattr(layer, "lora_variant", {}).values()))
            for layer, _ in self.layers
        ]
        return (
            type(self.source),
            tuple((type(layer), active) for layer, active in self.layers),
            tuple(variants),
        )

    def try_out(self) -> None:
        """Merge the first block and throw the result away; raise `ExportError` where that is not exact."""
        for layer, active in self.layers:
            name = parameter_name(layer) or "weight"
            if self.source._parameters.get(name) is None:
                raise refusal(
                    self.fqn,
                    layer,
                    active,
                    f"{type(self.source).__name__} has no parameter {name!r}",
                )
            next(self.blocks(name, self._readers(name), is_tried=True))

    def replace_tensors(self) -> None:
        """Replace the shell's tensors by lazy ones; a quantized layer becomes a plain one."""
        if is_quantized_layer(self.original):
            is_training = self.shell.training
            plain = plain_layer(self.original)
            self.shell.__class__ = type(plain)
            vars(self.shell).clear()
            vars(self.shell).update(vars(plain), training=is_training)
        parameters, buffers = (
            vars(self.shell)["_parameters"],
            vars(self.shell)["_buffers"],
        )
        for name, value in self.source._parameters.items():
            if value is None:
                continue
            is_computed = is_quantized_parameter(value) or self._is_rounded(name)
            if self.copy is None and not self._layers_of(name) and not is_computed:
                parameters[name] = value
                continue
            shape = (
                parameters[name].shape if is_quantized_parameter(value) else value.shape
            )
            pieces = (
                None
                if self._is_transposed(name)
                else functools.partial(self._pieces, name)
            )
            compute = functools.partial(self.compute, name)
            parameters[name] = LazyTensor(
                shape, self._dtype(name), compute, pieces, is_own=True
            )
        for name, buffer in self.source._buffers.items():
            before = self.original._buffers.get(name)
            buffers[name] = (
                buffer if buffer is None or before is None else buffer.to(before.dtype)
            )

    def _dtype(self, name: str) -> torch.dtype:
        """The original's dtype, which is rounded to."""
        before = self.original._parameters.get(name)
        if before is None:
            raise ExportError(
                f"{self.fqn}: its trained copy has a {name}, but the base has none; export without merging",
                fqn=self.fqn,
            )
        if self._is_rounded(name):
            return self.dtype
        if not is_quantized_parameter(before):
            return before.dtype
        state = quant_state_of(self.original, before)
        return self.dtype if state is None else state.dtype

    def _is_rounded(self, name: str) -> bool:
        return self.is_rounded and name == "weight"

    def _layers_of(self, name: str) -> _Layers:
        """The layers that adapt a parameter: those of the whole module and those of this parameter."""
        return [
            (layer, active)
            for layer, active in self.layers
            if parameter_name(layer) in (None, name)
        ]

    @torch.no_grad()
    def compute(self, name: str) -> torch.Tensor:
        """A parameter of the plain model, in the plain module's layout and its original dtype, in memory of its own."""
        value, readers = parameter_of(self.source, name), self._readers(name)
        # 4-bit weights are dequantized whole: each block takes the place of what it is
        # computed from.
        is_four_bit = (
            is_quantized_parameter(value)
            and quant_state_of(self.source, value) is not None
        )
        whole = (
            readers[name](...).contiguous()
            if getattr(value, "is_own", is_four_bit)
            else None
        )
        for rows, block in self.blocks(name, readers):
            whole = (
                block.new_empty(parameter_of(self._plain, name).shape)
                if whole is None
                else whole
            )
            _rows_of(whole, rows).copy_(block)
        assert whole is not None
        return whole.t() if self._is_transposed(name) else whole

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        return (block for _, block in self.blocks(name, self._readers(name)))

    @torch.no_grad()
    def blocks(
        self, name: str, readers: Mapping[str, _Reader], *, is_tried: bool = False
    ) -> Iterator[tuple[Rows, torch.Tensor]]:
        """Compute a parameter in its original dtype, a few rows (of a transposed one, columns) at a time, or whole."""
        dtype, layers = self._dtype(name), self._layers_of(name)
        stored = (
            self.source._parameters["weight"]
            if is_quantized_layer(self.source)
            else None
        )
        every = self._blocks_of_rows([*readers], layers)[: 1 if is_tried else None]
        merge = Merger(self.fqn, layers, stored, every) if layers else None
        if merge is not None and isinstance(merge.sampled, list):
            merge.run(
                self._float32({n: read(merge.sampled) for n, read in readers.items()})
            )
        for rows in every:
            values = {n: read(rows) for n, read in readers.items()}
            value = values[name]
            if merge is not None:
                value = parameter_of(merge(self._float32(values), rows), name)
                if rows is every[-1]:
                    merge.check()
            rounded = value.detach().to(dtype)
            # A sum is finite only if everything in it is, and takes a fraction of the
            # time of looking at each.
            if self.is_adapted and not torch.isfinite(rounded.sum(dtype=torch.float32)):
                self._refuse_infinite(name, value, rounded)
            del values, value
            yield rows, rounded

    def _refuse_infinite(
        self, name: str, value: torch.Tensor, rounded: torch.Tensor
    ) -> None:
        """Raise where a rounded value is not finite."""
        if torch.isfinite(rounded).all():
            return
        what = (
            f"beyond the range of {rounded.dtype}"
            if torch.isfinite(value).all()
            else "not finite"
        )
        raise ExportError(
            f"{self.fqn}.{name}: merged with its adapters, it has values that are {what}; export without merging, or "
            "disable these adapters",
            fqn=self.fqn,
        )

    def _is_transposed(self, name: str) -> bool:
        return name == "weight" and is_transposed(self.source)

    def _blocks_of_rows(self, names: list[str], layers: _Layers) -> list[Rows]:
        """The rows of each block; a single block where rows cannot be merged by themselves."""
        shapes = [parameter_of(self._plain, name).shape for name in names]
        heights = {shape[:1] for shape in shapes}
        num_bytes = torch.float32.itemsize * sum(shape.numel() for shape in shapes)
        num_blocks = math.ceil(
            num_bytes
            / max(_MIN_BLOCK_BYTES, min(num_bytes // _NUM_BLOCKS, _MAX_BLOCK_BYTES))
        )
        is_whole = num_blocks <= 1 or len(heights) > 1 or () in heights
        if is_whole or not all(merges_by_rows(self.source, *layer) for layer in layers):
            return [...]
        # A stack has the rows of its matrices, one after the other, and no block has
        # rows of two.
        (num_rows,) = {
            math.prod(shape[:2]) if len(shape) == 3 else shape[0] for shape in shapes
        }
        height = shapes[0][1] if len(shapes[0]) == 3 else num_rows
        num_blocks = min(math.ceil(num_blocks * height / num_rows), height)
        cuts = [
            first + height * i // num_blocks
            for first in range(0, num_rows, height)
            for i in range(num_blocks)
        ]
        return [
            slice(start, stop) for start, stop in itertools.pairwise([*cuts, num_rows])
        ]

    def _readers(self, name: str) -> dict[str, _Reader]:
        """By name, functions that read rows of a parameter, and of those it is merged with, without adapters."""
        is_by_name = all(parameter_name(layer) for layer, _ in self._layers_of(name))
        return {
            n: dequantizer(self.source)
            if is_quantized_parameter(p)
            else functools.partial(_rows_of, values_of(p))
            for n, p in self.source._parameters.items()
            if p is not None and (n == name or not is_by_name)
        }

    def _float32(self, values: Mapping[str, torch.Tensor]) -> nn.Module:
        # Copied even if float32 already: it is merged in place.
        return float32_module(
            self._plain,
            {n: value.to(torch.float32, copy=True) for n, value in values.items()},
        )


def _rows_of(tensor: torch.Tensor, rows: Any) -> torch.Tensor:
    """Some rows of a tensor; a stack has those of its matrices, one after the other."""
    return (
        tensor[rows]
        if rows is ... or tensor.dim() < 3
        else of_expert(tensor, 0, tensor.shape[1], rows)
    )


def _plan(
    twin: Twin, dtype: torch.dtype, rounded: set[int], chosen: Sequence[str] | None
) -> list[_Merge]:
    """The modules whose tensors have to be computed: adapted ones, trained copies and quantized layers."""
    merges: dict[int, _Merge] = {}

    def merge_of(fqn: str, shell: nn.Module) -> _Merge:
        made = _Merge(fqn, shell, shallow_copy(shell), dtype, id(shell) in rounded)
        return merges.setdefault(id(shell), made)

    for peeled in twin.peeled:
        for wrapper in reversed(peeled.wrappers):
            if is_tuner_layer(wrapper):
                active = active_adapters(wrapper, chosen)
                merge = merge_of(peeled.fqn, peeled.shell)
                # A shared module is peeled once for each of its places.
                if active and all(layer is not wrapper for layer, _ in merge.layers):
                    merge.layers.append((wrapper, active))
            elif (trained := trained_copy(peeled.fqn, wrapper, chosen)) is not None:
                for name, module in trained.named_modules():
                    if is_adapter_class(type(module)):
                        raise refusal(
                            peeled.fqn,
                            module,
                            (),
                            "it is inside a module of modules_to_save",
                        )
                    fqn = ".".join(part for part in (peeled.fqn, name) if part)
                    merge_of(fqn, peeled.shell.get_submodule(name)).copy = module
            else:
                refuse_unmergeable(peeled.fqn, wrapper, chosen)
    for fqn, module in twin.model.named_modules():
        if is_quantized_layer(module) or id(module) in rounded:
            merge_of(fqn, module)
    _refuse_partly_adapted(twin, merges)
    return list(merges.values())


def _refuse_partly_adapted(twin: Twin, merges: Mapping[int, _Merge]) -> None:
    """Raise where a module has several places and an adapter only some of them: merged, it would be in all."""
    # of each shell: where it lies, with its name there
    places: dict[int, dict[tuple[int, str], str]] = {}
    for fqn, parent in twin.model.named_modules():
        for name, child in parent._modules.items():
            places.setdefault(id(child), {})[id(parent), name] = join(fqn, name)
    for peeled in twin.peeled:
        parent_fqn, _, name = peeled.fqn.rpartition(".")
        places.get(id(peeled.shell), {}).pop(
            (id(twin.model.get_submodule(parent_fqn)), name), None
        )
    for peeled in twin.peeled:
        merge = merges.get(id(peeled.shell))
        others = places.get(id(peeled.shell))
        if merge is not None and merge.is_adapted and others:
            other = next(iter(others.values()))
            raise refusal(
                peeled.fqn,
                peeled.wrappers[0],
                (),
                f"the module is {other} too, and is not adapted there",
            )


def _half_dtype(model: nn.Module) -> torch.dtype:
    """The half dtype of most parameters outside quantized layers; float32 where there are none."""
    # The config's dtype does not tell: ``save_pretrained`` sets it to float32 while a
    # model is prepared.
    parameters = [
        p
        for _, module in model.named_modules()
        for p in module._parameters.values()
        if p is not None
    ]
    votes = Counter(
        p.dtype
        for p in parameters
        if p.dtype in HALF_DTYPES and not is_quantized_parameter(p)
    )
    return votes.most_common(1)[0][0] if votes else torch.float32
