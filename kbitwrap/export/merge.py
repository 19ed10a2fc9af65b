"""The merged model: quantized weights dequantized, active adapters merged in float32, everything rounded once."""

from __future__ import annotations

import functools
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
    Chosen,
    Layers,
    Merger,
    active_adapters,
    adapters_of,
    is_tuner_layer,
    merges_by_rows,
    parameter_name,
    refusal,
    refuse_unmergeable,
    rows_of,
    trained_copy,
)
from .plain import (
    dequantize,
    float32_module,
    is_transposed,
    parameter_of,
    plain_layer,
)
from .ties import configs_of_all, settle_ties
from .twin import Twin

# The attributes that a quantized load leaves on a model, and on its configs.
_MODEL_ATTRIBUTES = (
    "hf_quantizer", "is_quantized", "quantization_method", "hqq_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit",
    "is_4bit_serializable", "is_8bit_serializable",
)  # fmt: skip
_CONFIG_ATTRIBUTES = ("quantization_config", "_pre_quantization_dtype")

# The float32 values of a block of rows. Merging it takes several times these bytes, and
# some time whatever its size.
_BLOCK_BYTES = 2 << 20

_Readers = Mapping[str, Callable[[Rows], torch.Tensor]]


def merge_into(twin: Twin, adapters: Chosen = None) -> tuple[str, ...]:
    """Make a twin, in place, the plain model; return the names of the modules that an adapter or a copy changed."""
    chosen = None if adapters is None else tuple(dict.fromkeys(adapters))
    _refuse_unknown(twin, chosen)
    tree = ModelTree(twin.model)
    if not tree.quantization.can_dequantize:
        raise ExportError(
            f"the model is quantized with {tree.quantization.method}, whose weights cannot be dequantized here, and so "
            "not merged; export without merging"
        )
    places = [tree.places(tensor) for tensor in tree.tensors]
    dtype = _half_dtype(twin.model)
    rounded = dequantize(twin, dtype)
    merges = _plan(twin, dtype, rounded, chosen)
    # Refusals come before anything is written: one layer of each kind is tried out.
    for merge in {merge.kind: merge for merge in reversed(merges)}.values():
        merge.try_out()
    for merge in merges:
        merge.replace_tensors()
    settle_ties(twin.model, [shared for shared in places if len(shared) > 1])
    for _, module in twin.model.named_modules():
        for name in _MODEL_ATTRIBUTES:
            vars(module).pop(name, None)
    for config in configs_of_all(twin.model):
        for name in _CONFIG_ATTRIBUTES:
            vars(config).pop(name, None)
    return tuple(merge.fqn for merge in merges if merge.is_adapted)


def _refuse_unknown(twin: Twin, chosen: Chosen) -> None:
    there: set[str] = set()
    for peeled in twin.peeled:
        for wrapper in peeled.wrappers:
            there.update(adapters_of(wrapper))
    for name in chosen or ():
        if name not in there:
            raise ConfigError(
                f"adapters: expected names out of {sorted(there)}, found {name!r}"
            )


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
    layers: Layers = field(default_factory=list)

    @property
    def source(self) -> nn.Module:
        """The module that holds the values."""
        return self.original if self.copy is None else self.copy

    @functools.cached_property
    def _plain(self) -> nn.Module:
        """The module that computes in float32 what the source does, without its values where it is quantized."""
        if is_quantized_layer(self.source):
            return plain_layer(self.source, as_linear=True)
        return self.source

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter has a part in the module."""
        return self.copy is not None or bool(self.layers)

    @property
    def kind(self) -> Any:
        """The key of modules that are alike: if one of them can be merged, all can."""
        kinds: list[Any] = [type(self.source)]
        for layer, active in self.layers:
            variants = getattr(layer, "lora_variant", {}).values()
            kinds += [type(layer), active, *map(type, variants)]
        return tuple(kinds)

    def try_out(self) -> None:
        """Merge the first block and throw the result away; raise `ExportError` where that is not exact."""
        for layer, active in self.layers:
            name = parameter_name(layer) or "weight"
            if self.source._parameters.get(name) is None:
                why = f"{type(self.source).__name__} has no parameter {name!r}"
                raise refusal(self.fqn, layer, active, why)
            next(self._blocks(name, self._readers(name)))

    def replace_tensors(self) -> None:
        """Replace the shell's tensors by lazy ones; a quantized layer becomes a plain one."""
        if is_quantized_layer(self.original):
            is_training = self.shell.training
            plain = plain_layer(self.original)
            self.shell.__class__ = type(plain)
            vars(self.shell).clear()
            vars(self.shell).update(vars(plain), training=is_training)
        for name, value in self.source._parameters.items():
            if value is not None:
                vars(self.shell)["_parameters"][name] = self._replacement(name, value)
        for name, buffer in self.source._buffers.items():
            before = self.original._buffers.get(name)
            if buffer is not None and before is not None:
                buffer = buffer.to(before.dtype)
            self.shell._buffers[name] = buffer

    def _replacement(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The tensor that the merged model has for a parameter of the source."""
        is_quantized = is_quantized_parameter(value)
        is_changed = self.copy is not None or self._layers_of(name)
        if not (is_changed or is_quantized or self._is_rounded(name)):
            return value
        # by now that of the plain layer
        shape = parameter_of(self.shell, name).shape if is_quantized else value.shape
        compute = functools.partial(self._compute, name)
        pieces = functools.partial(self._pieces, name)
        return LazyTensor(
            shape,
            self._dtype(name),
            compute,
            None if self._is_transposed(name) else pieces,
            is_own=True,
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

    def _is_transposed(self, name: str) -> bool:
        return name == "weight" and is_transposed(self.source)

    def _layers_of(self, name: str) -> Layers:
        """The layers that adapt a parameter: those of the whole module and those of this parameter."""
        return [one for one in self.layers if parameter_name(one[0]) in (None, name)]

    @torch.no_grad()
    def _compute(self, name: str) -> torch.Tensor:
        """A parameter of the plain model, in the plain module's layout and its original dtype, in memory of its own."""
        source, readers = parameter_of(self.source, name), self._readers(name)
        whole = None
        # These are read whole: each block takes the place of what it is computed from.
        if _is_four_bit(self.source, source) or getattr(source, "is_own", False):
            whole = readers[name](...).contiguous()
        for rows, block in self._blocks(name, readers):
            if whole is None:
                whole = block.new_empty(parameter_of(self._plain, name).shape)
            rows_of(whole, rows).copy_(block)
        assert whole is not None
        return whole.t() if self._is_transposed(name) else whole

    def _pieces(self, name: str) -> Iterator[torch.Tensor]:
        for _, block in self._blocks(name, self._readers(name)):
            yield block

    @torch.no_grad()
    def _blocks(
        self, name: str, readers: _Readers
    ) -> Iterator[tuple[Rows, torch.Tensor]]:
        """Compute a parameter in its original dtype, a few rows (of a transposed one, columns) at a time, or whole."""
        dtype, layers = self._dtype(name), self._layers_of(name)
        merger = Merger(self.fqn, layers) if layers else None
        for rows in self._blocks_of_rows([*readers], layers):
            if merger is None:
                value = readers[name](rows)
            else:
                plain = self._float32(readers, rows)
                value = parameter_of(merger.merge(plain, rows), name)
                del plain
            rounded = value.detach().to(dtype)
            if self.is_adapted:
                self._refuse_infinite(name, value, rounded)
            del value
            yield rows, rounded

    def _refuse_infinite(
        self, name: str, value: torch.Tensor, rounded: torch.Tensor
    ) -> None:
        """Raise where a rounded value is not finite."""
        # A sum is finite only if everything in it is, and takes a fraction of the time
        # of looking at each.
        is_sum_finite = torch.isfinite(rounded.sum(dtype=torch.float32))
        if is_sum_finite or torch.isfinite(rounded).all():
            return
        what = "not finite"
        if torch.isfinite(value).all():
            what = f"beyond the range of {rounded.dtype}"
        raise ExportError(
            f"{self.fqn}.{name}: merged with its adapters, it has values that are {what}; export without merging, or "
            "disable these adapters",
            fqn=self.fqn,
        )

    def _blocks_of_rows(self, names: Sequence[str], layers: Layers) -> list[Rows]:
        """The rows of each block; a single block where rows cannot be merged by themselves."""
        shapes = [parameter_of(self._plain, name).shape for name in names]
        num_bytes = torch.float32.itemsize * sum(shape.numel() for shape in shapes)
        heights = {shape[:1] for shape in shapes}
        if num_bytes <= _BLOCK_BYTES or len(heights) > 1 or () in heights:
            return [...]
        # A stack, which is by itself, has the rows of its matrices, one after the
        # other, and no block has rows of two.
        *numbers, height = shapes[0][:-1] if shapes[0][2:] else shapes[0][:1]
        for layer, active in layers:
            if not merges_by_rows(self.source, height, layer, active):
                return [...]
        num_rows = height * (numbers[0] if numbers else 1)
        step = max(_BLOCK_BYTES * num_rows // num_bytes, 1)
        blocks: list[Rows] = []
        for first in range(0, num_rows, height):
            end = first + height
            for start in range(first, end, step):
                blocks.append(slice(start, min(start + step, end)))
        return blocks

    def _readers(self, name: str) -> _Readers:
        """By name, functions that read rows of a parameter, and of those it is merged with, without adapters."""
        is_by_name = all(parameter_name(layer) for layer, _ in self._layers_of(name))
        readers: dict[str, Callable[[Rows], torch.Tensor]] = {}
        for other, parameter in self.source._parameters.items():
            if parameter is None or (is_by_name and other != name):
                continue
            if is_quantized_parameter(parameter):
                readers[other] = dequantizer(self.source)
            else:
                readers[other] = functools.partial(rows_of, values_of(parameter))
        return readers

    def _float32(self, readers: _Readers, rows: Rows) -> nn.Module:
        # Copied even if float32 already: it is merged in place.
        values = {
            name: read(rows).to(torch.float32, copy=True)
            for name, read in readers.items()
        }
        return float32_module(self._plain, values)


def _is_four_bit(module: nn.Module, parameter: torch.Tensor) -> bool:
    if not is_quantized_parameter(parameter):
        return False
    return quant_state_of(module, parameter) is not None


def _plan(
    twin: Twin, dtype: torch.dtype, rounded: set[int], chosen: Chosen
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
                continue
            trained = trained_copy(peeled.fqn, wrapper, chosen)
            if trained is None:
                refuse_unmergeable(peeled.fqn, wrapper, chosen)
                continue
            for name, module in trained.named_modules():
                if is_adapter_class(type(module)):
                    why = "it is inside a module of modules_to_save"
                    raise refusal(peeled.fqn, module, (), why)
                fqn = join(peeled.fqn, name) if name else peeled.fqn
                merge_of(fqn, peeled.shell.get_submodule(name)).copy = module
    for fqn, module in twin.model.named_modules():
        if is_quantized_layer(module) or id(module) in rounded:
            merge_of(fqn, module)
    _refuse_partly_adapted(twin, merges)
    return list(merges.values())


def _refuse_partly_adapted(twin: Twin, merges: Mapping[int, _Merge]) -> None:
    """Raise where a module has several places and an adapter only some of them: merged, it would be in all."""
    adapted = {peeled.fqn for peeled in twin.peeled}
    wrappers = {id(peeled.shell): peeled.wrappers for peeled in twin.peeled}
    for prefix, parent in twin.model.named_modules():
        for name, child in parent._modules.items():
            place = join(prefix, name)
            if id(child) not in wrappers or place in adapted:
                continue
            merge = merges.get(id(child))
            if merge is not None and merge.is_adapted:
                why = f"the module is {place} too, and is not adapted there"
                raise refusal(merge.fqn, wrappers[id(child)][0], (), why)


def _half_dtype(model: nn.Module) -> torch.dtype:
    """The half dtype of most parameters outside quantized layers; float32 where there are none."""
    # The config's dtype does not tell: ``save_pretrained`` sets it to float32 while a
    # model is prepared.
    votes = Counter(
        tensor.parameter.dtype
        for tensor in ModelTree(model).all_tensors
        if not is_quantized_parameter(tensor.parameter)
    )
    halves = [dtype for dtype in votes if dtype in HALF_DTYPES]
    return max(halves, key=votes.__getitem__, default=torch.float32)
