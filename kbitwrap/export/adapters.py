"""PEFT's layers: which of their adapters are active, and one layer's merge in float32.

The merge is PEFT's own, on a float32 copy of the layer. By whatever method, it must
compute what that copy computes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import ExportError
from ..model.quantization import PEFT_MODULES, Rows, is_quantized_layer
from ..model.tree import shallow_copy
from .plain import HOOKED_FORWARD

# The largest difference allowed between what a layer and its merge compute, relative to
# the largest output, adapted or not. Rounding in float32 stays below it; half a unit in
# the last place of float16, the finer half dtype, is 2**-12.
_TOLERANCE = 2.0**-15
_QUANTIZED_MODULES = tuple(f".{name}" for name in PEFT_MODULES)
# Layers for a quantized base are called as those for a plain one, with a prefix or a
# suffix.
_KIND = re.compile(
    rf"peft\.tuners\.(\w+)\.(?:layer|{'|'.join(PEFT_MODULES)})\.(?:\w+Lora(?=Linear))?(\w+?)(?:4bit|8bitLt)?"
)
# The methods and layers that merge row by row, with the containers whose tensors have
# the rows of the base's weight and the dimension of these. Merging takes 6 to 12 times
# the bytes that what is merged, a layer or a few rows, has in half.
_ROWS = {
    "adalora.SVDLinear": {"lora_B": 0},
    "hira.Linear": {"hira_B": 0},
    "ia3.Linear": {"ia3_l": 0},
    "loha.Linear": {"hada_w1_a": 0, "hada_w2_a": 0},
    "lora.Embedding": {"lora_embedding_A": 1},
    "lora.Linear": {"lora_B": 0, "lora_magnitude_vector": 0},
    "trainable_tokens.TrainableTokensLayer": {},
    "vera.Linear": {"vera_B": 0, "vera_lambda_b": 0},
}
_VARIANTS_WITH_ROWS = {"DoraLinearVariant"}  # of LoRA
_Cut = tuple[torch.Tensor, Callable[[Any], torch.Tensor]]


def refusal(
    fqn: str, layer: nn.Module, active: Sequence[str], why: object
) -> ExportError:
    """The error for adapters that cannot be merged; the ``fqn`` ``""`` is the model itself."""
    cls = type(layer)
    method = re.sub(r"^peft\.(?:tuners\.)?", "", cls.__module__).partition(".")[0]
    adapters = f" with the adapters {list(active)}" if active else ""
    return ExportError(
        f"{fqn or 'the model'}: {cls.__name__} ({method}){adapters} cannot be merged exactly: {why}; "
        "export without merging, or disable these adapters",
        fqn=fqn,
    )


def is_tuner_layer(wrapper: nn.Module) -> bool:
    """Whether one of PEFT's modules is a layer that adapts a module of the base."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(wrapper, BaseTunerLayer)


def adapters_of(wrapper: Any) -> Sequence[str]:
    """The names of the adapters that one of PEFT's layers, or of its ``modules_to_save`` wrappers, holds."""
    copies = wrapper._modules.get("modules_to_save", ())
    return (
        wrapper._all_available_adapter_names() if is_tuner_layer(wrapper) else [*copies]
    )


def active_adapters(wrapper: Any, chosen: Sequence[str] | None) -> tuple[str, ...]:
    """The adapters of a layer or wrapper that are chosen, in their order; by default those that its forward uses."""
    if chosen is None:
        chosen = () if wrapper.disable_adapters else wrapper.active_adapters
    there = adapters_of(wrapper)
    return tuple(name for name in chosen if name in there)


def trained_copy(
    fqn: str, wrapper: Any, chosen: Sequence[str] | None
) -> nn.Module | None:
    """The copy that one of PEFT's ``modules_to_save`` wrappers runs instead of the original, if it runs one."""
    active = (
        active_adapters(wrapper, chosen)
        if "modules_to_save" in wrapper._modules
        else ()
    )
    if len(active) > 1:
        raise refusal(
            fqn,
            wrapper,
            active,
            "each has a trained copy of the module, which only one can replace",
        )
    trained: nn.Module | None = (
        wrapper._modules["modules_to_save"][active[0]] if active else None
    )
    return trained


def refuse_unmergeable(fqn: str, wrapper: Any, chosen: Sequence[str] | None) -> None:
    """Raise `ExportError` if a PEFT module that is not a layer does more than hold layers."""
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(wrapper, (PeftModel, PeftMixedModel)):
        found: str | list[str] = wrapper.active_adapter
        active = (
            chosen
            if chosen is not None
            else [found]
            if isinstance(found, str)
            else found
        )
        for config in [
            wrapper.peft_config[name] for name in active if name in wrapper.peft_config
        ]:
            if config.is_prompt_learning:
                method = str(getattr(config.peft_type, "value", config.peft_type))
                raise refusal(fqn, wrapper, active, f"{method} adds to the input")
    elif type(wrapper).__name__ == "XLoraModel":
        raise refusal(
            fqn, wrapper, (), "the weights of its adapters depend on the input"
        )
    elif not isinstance(wrapper, (BaseTuner, AuxiliaryTrainingWrapper)):
        raise refusal(fqn, wrapper, (), "it has no method that merges")


class Merger:
    """Merges the active adapters of a module's layers into float32 rows of its base, of one block after the other."""

    def __init__(
        self,
        fqn: str,
        layers: Sequence[tuple[Any, tuple[str, ...]]],
        stored: torch.Tensor | None,
        blocks: list[Rows],
    ) -> None:
        self._stored = stored  # a quantized base's storage, which some methods read
        self._layers = [_LayerMerge(fqn, layer, active) for layer, active in layers]
        # Rows from all blocks: what is merged in them must compute what the layers did.
        # ``None`` compares nothing: a parameter that is adapted by name is not that of
        # a layer that could be run by itself.
        self.sampled: Any = (
            None if any(parameter_name(layer) for layer, _ in layers) else blocks[0]
        )
        if isinstance(self.sampled, slice):
            trained = [
                row
                for layer, active in layers
                for name in active
                for row in _token_indices(layer, name)
            ]
            firsts = (
                [
                    _numbers(rows)[0],
                    *[row for row in trained if row in _numbers(rows)][:1],
                ]
                for rows in blocks
            )
            self.sampled = sorted({row for rows in firsts for row in rows})

    def run(self, plain: nn.Module) -> None:
        """Compute what the layers do over the sampled rows of a plain base; merged ones take the place of these."""
        adapted, layer = plain, self._layers[0].layer
        # not in every version of PEFT
        backend = getattr(layer, "quantization_backend", None)
        knows_it = backend is not None or type(layer).__module__.endswith(
            _QUANTIZED_MODULES
        )
        if self._stored is not None and not knows_it:
            adapted = _as_stored(plain, self._stored, self.sampled)
        with self._layers[-1].refusing():
            for one in self._layers:
                adapted = one.over(adapted, self.sampled)
            self._merged, self._probe = plain, _probe(plain)
            self._outputs = plain(self._probe), adapted(self._probe)

    def __call__(self, plain: nn.Module, rows: Any) -> nn.Module:
        """Merge into ``rows`` of a plain base, which may be changed."""
        if self.sampled is ...:
            self.run(plain)
        for layer in self._layers:
            plain = layer.merge(plain, rows)
        if self.sampled is ...:
            self._merged = plain
        elif self.sampled is not None:
            places = _positions(self.sampled, rows)
            for name, parameter in plain.named_parameters():
                picked = parameter[
                    [self.sampled[place] - rows.start for place in places]
                ]
                self._merged.get_parameter(name)[places] = picked
        return plain

    def check(self) -> None:
        """Raise unless the sampled rows, merged, compute what the layers did."""
        if self.sampled is None:
            return
        unadapted, expected = self._outputs
        with self._layers[-1].refusing():
            found = self._merged(self._probe)
            difference = float((found - expected).abs().max())
            largest = max(float(output.abs().max()) for output in (unadapted, expected))
            # The caller refuses weights that are not finite.
            if (
                bool(torch.isfinite(found).all())
                and not difference <= _TOLERANCE * largest
            ):
                raise ValueError(
                    f"the merged layer computes another output (off by {difference:.1e}, the largest is {largest:.1e})"
                )


@dataclass
class _LayerMerge:
    """Merges one layer's active adapters."""

    fqn: str
    layer: Any
    active: tuple[str, ...]
    _copy: Any = None  # of the layer, in float32, over the rows that are merged
    _cuts: Sequence[_Cut] = ()

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Turn errors into `ExportError`, and leave torch's random numbers as they were."""
        try:
            with torch.random.fork_rng(devices=[]):
                yield
        except Exception as error:
            raise refusal(self.fqn, self.layer, self.active, error) from error

    def merge(self, plain: nn.Module, rows: Rows) -> nn.Module:
        """Merge into ``rows`` of a plain base, which may be changed."""
        with self.refusing():
            adapted = self.over(plain, rows)
            if adapted is not plain:
                adapted.merge(safe_merge=False, adapter_names=adapted._active_adapter)
                plain = adapted.get_base_layer()
        return plain

    def over(self, plain: nn.Module, rows: Rows) -> Any:
        """The float32 copy of the layer, over some rows of a plain base; the base where it adapts none of these."""
        active = [*self.active]
        if rows is not ... and "token_indices" in vars(self.layer):
            active = [
                name
                for name in active
                if _positions(self.layer.token_indices[name], rows)
            ]
        if not active:
            return plain
        if self._copy is None:
            if (
                plain._modules
                and not is_tuner_layer(plain)
                and parameter_name(self.layer) is None
            ):
                raise ValueError(
                    f"it adapts several modules of {type(plain).__name__} at once"
                )
            if vars(plain).get("max_norm") is not None:
                raise ValueError(
                    "the embedding renormalizes the rows that it looks up (max_norm)"
                )
            self._copy = _float32_layer(self.layer, plain)
            self._copy._modules["base_layer"] = None  # it would be held
            self._cuts = () if rows is ... else _cuts(self._copy, self.active)
        if rows is not ...:
            self._cut(rows)
        # a merge may leave values of these rows on it
        adapted: Any = shallow_copy(self._copy)
        adapted._modules["base_layer"] = plain
        adapted._active_adapter, adapted._disable_adapters, adapted.merged_adapters = (
            active,
            False,
            [],
        )
        for magnitude in adapted._modules.get("lora_magnitude_vector", {}).values():
            vars(magnitude).get("_dora_cache", {}).clear()
        return adapted

    def _cut(self, rows: Rows) -> None:
        """Put some rows in the place of the copy's tensors."""
        for tensor, pick in self._cuts:
            tensor.data = pick(rows).clone()
        for name, indices in vars(self.layer).get("token_indices", {}).items():
            found = [indices[position] for position in _positions(indices, rows)]
            self._copy.token_indices[name] = [
                _numbers(rows).index(index) for index in found
            ]


def parameter_name(layer: nn.Module) -> str | None:
    """The parameter that a layer of ``target_parameters`` adapts; ``None`` for a layer that adapts a module."""
    name: str | None = getattr(layer, "parameter_name", None)
    return name


def _kind(layer: Any) -> str:
    """The method and the layer's class for a base that is not quantized: ``"lora.Linear"``; ``""`` for others."""
    found = _KIND.fullmatch(f"{type(layer).__module__}.{type(layer).__name__}")
    return ".".join(found.groups()) if found else ""


def merges_by_rows(source: nn.Module, layer: Any, active: Sequence[str]) -> bool:
    """Whether each row of the merged weight depends on that row of the base's weight alone, and on no other row."""
    if parameter_name(layer) is not None:
        return _kind(layer) == "lora.ParamWrapper" and layer.num_experts > 1
    if not is_quantized_layer(source) and type(source).forward not in (
        nn.Linear.forward,
        nn.Embedding.forward,
    ):
        return False  # it may do anything with what it computes
    num_rows = vars(source).get("num_embeddings", vars(source).get("out_features", 0))
    indices = [index for name in active for index in _token_indices(layer, name)]
    variants = vars(layer).get("lora_variant", {})
    return (
        _kind(layer) in _ROWS
        and {type(variants[name]).__name__ for name in active if name in variants}
        <= _VARIANTS_WITH_ROWS
        # PEFT refuses others when it merges the whole
        and all(0 <= index < num_rows for index in indices)
    )


def _token_indices(layer: Any, name: str) -> Sequence[int]:
    """The rows that an adapter trains, where it does not train all."""
    found: Sequence[int] = vars(layer).get("token_indices", {}).get(name, ())
    return found


def _numbers(rows: Any) -> Sequence[int]:
    return range(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _positions(indices: Sequence[int], rows: Rows) -> list[int]:
    """The positions in a list of indices of those that are among some rows."""
    numbers = _numbers(rows)
    return [position for position, index in enumerate(indices) if index in numbers]


def _select(whole: torch.Tensor, dim: int, rows: Rows) -> torch.Tensor:
    return whole[(slice(None),) * dim + (rows,)]


def _trained(delta: torch.Tensor, indices: Sequence[int], rows: Rows) -> torch.Tensor:
    return delta[_positions(indices, rows)]


def of_expert(
    factors: torch.Tensor, dim: int | None, height: int, rows: slice
) -> torch.Tensor:
    """One expert's factor, in ``dim`` some rows of it; a stack's rows are those of its matrices, ``height`` each."""
    expert, start = divmod(rows.start, height)
    return (
        factors[expert]
        if dim is None
        else factors[expert].narrow(dim, start, rows.stop - rows.start)
    )


def _cuts(copied: Any, active: Sequence[str]) -> list[_Cut]:
    """The tensors of a layer's copy that have rows, each with a function that picks rows of its whole value."""
    cuts: list[_Cut] = []
    for container, dim in _ROWS.get(_kind(copied), {}).items():
        holder = getattr(copied, container)
        for tensor in (*holder.parameters(), *holder.buffers()):
            # A tensor with a single row, as IA3's that scales the input, has it for
            # all.
            if tensor.shape[dim] > 1:
                cuts.append((tensor, functools.partial(_select, tensor.data, dim)))
    for name in active if "token_indices" in vars(copied) else ():
        delta = copied.trainable_tokens_delta[name]
        cuts.append(
            (delta, functools.partial(_trained, delta.data, copied.token_indices[name]))
        )
    if parameter_name(copied) is not None:
        num_experts, copied.num_experts = copied.num_experts, 1
        # PEFT takes a single expert for a matrix, (out, in), which it transposes where
        # it is told to.
        is_transposed = copied.fan_in_fan_out = not getattr(
            copied, "_did_swap_in_out_features", False
        )
        for name in active:
            a, b = copied.lora_A[name].weight, copied.lora_B[name].weight
            height = a.shape[1] if is_transposed else b.shape[0]
            of_a = a.data.reshape(num_experts, -1, a.shape[1])
            of_b = b.data.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
            cuts.append(
                (
                    a,
                    functools.partial(
                        of_expert, of_a, 1 if is_transposed else None, height
                    ),
                )
            )
            cuts.append(
                (
                    b,
                    functools.partial(
                        of_expert, of_b, None if is_transposed else 0, height
                    ),
                )
            )
    return cuts


def _product(
    lora_A: nn.Linear,  # noqa: N803
    lora_B: nn.Linear,  # noqa: N803
    adapter_name: str | None = None,
) -> torch.Tensor:
    """Compute ``DoraLinearLayer.get_lora_weight`` without the unit matrix, as wide as the layer, that FSDP needs."""
    return lora_B.weight @ lora_A.weight


def _float32_layer(layer: Any, plain: nn.Module) -> Any:
    """A copy of one of PEFT's layers in float32, over a plain base."""
    if "forward" in vars(layer) and "_hf_hook" not in vars(layer):
        raise TypeError(
            "its forward was replaced, and may depend on the input in any way"
        )
    base = layer._modules["base_layer"]
    memo: dict[int, Any] = {id(base): plain}
    # Hooks, accelerate's forward and tied adapters refer to objects far outside the
    # layer.
    memo |= {
        id(vars(layer)[name]): None for name in HOOKED_FORWARD if name in vars(layer)
    }
    memo |= {
        id(tied): [] for name, tied in vars(layer).items() if name == "_tied_adapter"
    }
    for _, module in layer.named_modules(memo={base}):
        memo |= {
            id(hooks): OrderedDict()
            for name, hooks in vars(module).items()
            if name.endswith("_hooks")
        }
        # A layer keeps views with a history of tied adapters, which ``deepcopy``
        # refuses.
        tensors = [
            value
            for value in tree_leaves(dict(vars(module)))
            if isinstance(value, torch.Tensor)
        ]
        memo |= {
            id(tensor): tensor.detach().clone()
            for tensor in tensors
            if not tensor.is_leaf
        }
    copied = copy.deepcopy(layer, memo)
    for magnitude in copied._modules.get("lora_magnitude_vector", {}).values():
        if type(magnitude).__name__ == "DoraLinearLayer":
            vars(magnitude)["get_lora_weight"] = _product
    for name in HOOKED_FORWARD:
        vars(copied).pop(name, None)
    if type(copied).__module__.endswith(_QUANTIZED_MODULES):
        method, _, name = _kind(copied).partition(".")
        copied.__class__ = getattr(
            importlib.import_module(f"peft.tuners.{method}.layer"), name
        )
        # A layer for bitsandbytes may lack this field: its weights are stored as those
        # of ``nn.Linear``.
        vars(copied).setdefault("fan_in_fan_out", False)
    copied.quantization_backend = None
    device = next(plain.parameters()).device
    return copied.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def _as_stored(plain: nn.Module, stored: torch.Tensor, rows: Rows) -> nn.Module:
    """A base that computes what ``plain`` does, while its weight reads as the quantized storage."""
    made = shallow_copy(plain)
    values = stored.detach().as_subclass(torch.Tensor)
    # 4-bit storage has no rows
    if values.shape[1:] == plain.get_parameter("weight").shape[1:]:
        values = values[rows]
    vars(made)["_parameters"]["weight"] = nn.Parameter(values, requires_grad=False)
    vars(made)["forward"] = plain.forward
    return made


def _probe(plain: nn.Module) -> torch.Tensor:
    """An input for a plain module, always the same; torch's global generators are not used."""
    weight = plain.get_parameter("weight")
    drawn: dict[str, Any] = {
        "generator": torch.Generator().manual_seed(0),
        "device": "cpu",
    }
    if isinstance(plain, nn.Embedding):
        return torch.arange(
            0,
            plain.num_embeddings,
            math.ceil(plain.num_embeddings / 64),
            device=weight.device,
        )[None]
    fields = vars(plain)
    # ``nx`` is the width of transformers' ``Conv1D``; a norm's is the last dimension of
    # its weight.
    shape = [8, fields.get("in_features", fields.get("nx", weight.shape[-1]))]
    if "kernel_size" in fields:
        shape = [
            fields["in_channels"],
            *(2 * size + 1 for size in fields["kernel_size"]),
        ]
    return torch.randn(2, *shape, dtype=torch.float32, **drawn).to(weight.device)
