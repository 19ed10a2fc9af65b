"""PEFT's layers: which of their adapters are active, and one layer's merge in float32.

The merge is PEFT's own, on a float32 copy of the layer. By whatever method, it must
compute what that copy computes.
"""

from __future__ import annotations

import contextlib
import copy
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
_PLAIN_FORWARDS = (nn.Linear.forward, nn.Embedding.forward)
_MOST_LOOKED_UP = 4096  # rows of an embedding in which a merge is compared
Chosen = Sequence[str] | None
"""The names of the adapters to merge; ``None`` for those that the model uses."""
Layers = list[tuple[Any, tuple[str, ...]]]
"""PEFT's layers around a module, the innermost first, each with the names of its active adapters."""
_Cut = tuple[torch.Tensor, Callable[[slice], torch.Tensor]]


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


def adapters_of(wrapper: Any) -> list[str]:
    """The names of the adapters that one of PEFT's layers, or of its ``modules_to_save`` wrappers, holds."""
    if is_tuner_layer(wrapper):
        return list(wrapper._all_available_adapter_names())
    return [*wrapper._modules.get("modules_to_save", ())]


def active_adapters(wrapper: Any, chosen: Chosen) -> tuple[str, ...]:
    """The adapters of a layer or wrapper that are chosen, in their order; by default those that its forward uses."""
    if chosen is None:
        chosen = () if wrapper.disable_adapters else wrapper.active_adapters
    there = adapters_of(wrapper)
    return tuple(name for name in chosen if name in there)


def trained_copy(fqn: str, wrapper: Any, chosen: Chosen) -> nn.Module | None:
    """The copy that one of PEFT's ``modules_to_save`` wrappers runs instead of the original, if it runs one."""
    copies = wrapper._modules.get("modules_to_save")
    active = () if copies is None else active_adapters(wrapper, chosen)
    if len(active) > 1:
        why = "each has a trained copy of the module, which only one can replace"
        raise refusal(fqn, wrapper, active, why)
    for name in active:
        trained: nn.Module = copies[name]
        return trained
    return None


def refuse_unmergeable(fqn: str, wrapper: Any, chosen: Chosen) -> None:
    """Raise `ExportError` if a PEFT module that is not a layer does more than hold layers."""
    from peft import PeftMixedModel, PeftModel
    from peft.tuners.tuners_utils import BaseTuner
    from peft.utils.other import AuxiliaryTrainingWrapper

    if isinstance(wrapper, (PeftModel, PeftMixedModel)):
        if chosen is None:
            found: str | list[str] = wrapper.active_adapter
            chosen = [found] if isinstance(found, str) else found
        for name in chosen:
            config = wrapper.peft_config.get(name)
            if config is not None and config.is_prompt_learning:
                method = str(getattr(config.peft_type, "value", config.peft_type))
                raise refusal(fqn, wrapper, chosen, f"{method} adds to the input")
    elif type(wrapper).__name__ == "XLoraModel":
        why = "the weights of its adapters depend on the input"
        raise refusal(fqn, wrapper, (), why)
    elif not isinstance(wrapper, (BaseTuner, AuxiliaryTrainingWrapper)):
        raise refusal(fqn, wrapper, (), "it has no method that merges")


class Merger:
    """Merges the active adapters of a module's layers into float32 blocks of its base."""

    def __init__(self, fqn: str, layers: Layers) -> None:
        self._layers = [_LayerMerge(fqn, layer, active) for layer, active in layers]
        # A parameter that is adapted by name is not that of a layer that could be run
        # by itself.
        self._is_compared = not any(parameter_name(layer) for layer, _ in layers)
        # PEFT lets such a layer take the quantized storage for the weight's values.
        innermost = self._layers[0].layer
        is_quantized = is_quantized_layer(innermost.get_base_layer())
        self._reads_storage = is_quantized and not _dequantizes(innermost)

    def merge(self, plain: nn.Module, rows: Rows) -> nn.Module:
        """Merge into ``rows`` of a plain base, which may be changed; what is merged computes what the layers did."""
        if not self._is_compared:
            return self._merged(plain, rows)
        refusing = self._layers[-1].refusing
        with refusing():
            probe = _probe(plain)
            unadapted = plain(probe)
            expected = self._adapted(plain, rows)(probe)
        merged = self._merged(plain, rows)
        with refusing():
            found = merged(probe)
            # The caller refuses weights that are not finite.
            if bool(torch.isfinite(found).all()):
                _compare(found, expected, unadapted)
        return merged

    def _adapted(self, plain: nn.Module, rows: Rows) -> nn.Module:
        """The layers in float32, one over the other."""
        adapted = _without_values(plain) if self._reads_storage else plain
        for layer in self._layers:
            adapted = layer.over(adapted, rows)
        return adapted

    def _merged(self, plain: nn.Module, rows: Rows) -> nn.Module:
        for layer in self._layers:
            plain = layer.merge(plain, rows)
        return plain


def _dequantizes(layer: Any) -> bool:
    """Whether one of PEFT's layers computes the values of a quantized base."""
    is_for_quantized = type(layer).__module__.endswith(_QUANTIZED_MODULES)
    # not in every version of PEFT
    has_backend = getattr(layer, "quantization_backend", None) is not None
    return is_for_quantized or has_backend


def _without_values(plain: nn.Module) -> nn.Module:
    """A base that computes what ``plain`` does, while whoever reads its weight gets no numbers."""
    made = shallow_copy(plain)
    weight = plain.get_parameter("weight")
    unknown = weight.new_full((1,), math.nan).expand(weight.shape)
    made._parameters["weight"] = nn.Parameter(unknown, requires_grad=False)
    vars(made)["forward"] = plain.forward
    return made


def _compare(
    found: torch.Tensor, expected: torch.Tensor, unadapted: torch.Tensor
) -> None:
    """Raise unless two outputs are the same but for rounding."""
    difference = float((found - expected).abs().max())
    largest = float(max(unadapted.abs().max(), expected.abs().max()))
    if not difference <= _TOLERANCE * largest:
        raise ValueError(
            f"the merged layer computes another output (off by {difference:.1e}, the largest is {largest:.1e})"
        )


@dataclass
class _LayerMerge:
    """Merges one layer's active adapters."""

    fqn: str
    layer: Any
    active: tuple[str, ...]
    _copy: Any = None  # of the layer, in float32
    # the copy's tensors that have rows
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
            adapted.merge(safe_merge=False, adapter_names=adapted._active_adapter)
            merged: nn.Module = adapted.get_base_layer()
            return merged

    def over(self, plain: nn.Module, rows: Rows) -> Any:
        """The float32 copy of the layer, over some rows of a plain base."""
        if self._copy is None:
            _refuse_base(plain, self.layer)
            self._copy = _float32_layer(self.layer, plain)
            self._copy._modules["base_layer"] = None  # it would be held
            if rows is not ...:
                self._cuts = _cuts(self._copy, self.active)
        # a merge may leave values of these rows on it
        adapted: Any = shallow_copy(self._copy)
        adapted._modules["base_layer"] = plain
        adapted._active_adapter = [*self.active]
        adapted._disable_adapters = False
        adapted.merged_adapters = []
        if rows is not ...:
            for tensor, cut in self._cuts:
                tensor.data = cut(rows).clone()
            if "token_indices" in vars(adapted):
                _renumber_tokens(adapted, rows)
        for magnitude in adapted._modules.get("lora_magnitude_vector", {}).values():
            vars(magnitude).get("_dora_cache", {}).clear()
        return adapted


def _refuse_base(plain: nn.Module, layer: nn.Module) -> None:
    is_inner = is_tuner_layer(plain)
    if plain._modules and not is_inner and parameter_name(layer) is None:
        raise ValueError(f"it adapts several modules of {type(plain).__name__} at once")
    if vars(plain).get("max_norm") is not None:
        raise ValueError(
            "the embedding renormalizes the rows that it looks up (max_norm)"
        )


def parameter_name(layer: nn.Module) -> str | None:
    """The parameter that a layer of ``target_parameters`` adapts; ``None`` for a layer that adapts a module."""
    name: str | None = getattr(layer, "parameter_name", None)
    return name


def _kind(layer: Any) -> str:
    """The method and the layer's class for a base that is not quantized: ``"lora.Linear"``; ``""`` for others."""
    found = _KIND.fullmatch(f"{type(layer).__module__}.{type(layer).__name__}")
    return ".".join(found.groups()) if found else ""


# ----------------------------------------------------------------------------------------------------
# Row by row.
# ----------------------------------------------------------------------------------------------------


def merges_by_rows(
    source: nn.Module, num_rows: int, layer: Any, active: Sequence[str]
) -> bool:
    """Whether each row of the merged weight depends on that row of the base's weight alone, and on no other row."""
    if parameter_name(layer) is not None:
        return _kind(layer) == "lora.ParamWrapper" and layer.num_experts > 1
    forward = type(source).forward
    if not is_quantized_layer(source) and forward not in _PLAIN_FORWARDS:
        return False  # it may do anything with what it computes
    variants = vars(layer).get("lora_variant", {})
    kinds = {type(variants[name]).__name__ for name in active if name in variants}
    if _kind(layer) not in _ROWS or kinds - _VARIANTS_WITH_ROWS:
        return False
    tokens = vars(layer).get("token_indices", {})
    trained = [index for name in active for index in tokens.get(name, ())]
    # PEFT refuses others when it merges the whole
    return all(0 <= index < num_rows for index in trained)


def rows_of(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Some rows of a tensor; a stack has those of its matrices, one after the other, and no block has rows of two."""
    if rows is ... or tensor.dim() < 3:
        return tensor[rows]
    number, start = divmod(rows.start, tensor.shape[1])
    return tensor[number].narrow(0, start, rows.stop - rows.start)


def _cuts(copied: Any, active: Sequence[str]) -> list[_Cut]:
    """The tensors of a layer's copy that have rows, each with a function that picks rows of its whole value."""
    if parameter_name(copied) is not None:
        num_experts, copied.num_experts = copied.num_experts, 1
        # PEFT takes a single expert for a matrix, (out, in), which it transposes where
        # it is told to.
        is_swapped = getattr(copied, "_did_swap_in_out_features", False)
        copied.fan_in_fan_out = not is_swapped
        cuts = []
        for name in active:
            a, b = copied.lora_A[name].weight, copied.lora_B[name].weight
            cuts += _cuts_of_experts(a, b, num_experts, copied.fan_in_fan_out)
        return cuts
    cuts = []
    for container, dim in _ROWS[_kind(copied)].items():
        holder = getattr(copied, container)
        for tensor in (*holder.parameters(), *holder.buffers()):
            # A tensor with a single row, as IA3's that scales the input, has it for
            # all.
            if tensor.shape[dim] > 1:
                cuts.append(_cut_of_matrix(tensor, dim))
    for name in active if "token_indices" in vars(copied) else ():
        delta = copied.trainable_tokens_delta[name]
        cuts.append(_cut_of_tokens(delta, copied.token_indices[name]))
    return cuts


def _cut_of_matrix(tensor: torch.Tensor, dim: int) -> _Cut:
    whole = tensor.data
    return tensor, lambda rows: whole.narrow(dim, rows.start, rows.stop - rows.start)


def _cut_of_tokens(tensor: torch.Tensor, indices: Sequence[int]) -> _Cut:
    whole = tensor.data
    return tensor, lambda rows: whole[
        [
            place
            for place, index in enumerate(indices)
            if rows.start <= index < rows.stop
        ]
    ]


def _cuts_of_experts(
    a: torch.Tensor, b: torch.Tensor, num_experts: int, is_transposed: bool
) -> list[_Cut]:
    """The two factors of all experts, of which a block has those of one; its rows are in only one of the two."""
    stack_a = a.data.reshape(num_experts, -1, a.shape[1])
    stack_b = b.data.reshape(b.shape[0], -1, num_experts).permute(2, 0, 1)
    if is_transposed:
        height = a.shape[1]
        return [
            (a, lambda rows: rows_of(stack_a.mT, rows).mT),
            (b, lambda rows: stack_b[rows.start // height]),
        ]
    height = b.shape[0]
    return [
        (a, lambda rows: stack_a[rows.start // height]),
        (b, lambda rows: rows_of(stack_b, rows)),
    ]


def _renumber_tokens(adapted: Any, rows: slice) -> None:
    """Count the rows that adapters train from the first of a block; those that train none of it are not active."""
    numbered = {}
    for name, indices in adapted.token_indices.items():
        found = [index for index in indices if rows.start <= index < rows.stop]
        numbered[name] = [index - rows.start for index in found]
    adapted.token_indices = numbered
    adapted._active_adapter = [
        name for name in adapted._active_adapter if numbered[name]
    ]


# ----------------------------------------------------------------------------------------------------
# A layer in float32, and what it is given.
# ----------------------------------------------------------------------------------------------------


def _float32_layer(layer: Any, plain: nn.Module) -> Any:
    """A copy of one of PEFT's layers in float32, over a plain base."""
    fields = vars(layer)
    if "forward" in fields and "_hf_hook" not in fields:
        raise TypeError(
            "its forward was replaced, and may depend on the input in any way"
        )
    base = layer._modules["base_layer"]
    memo: dict[int, Any] = {id(base): plain}
    # Hooks, accelerate's forward and tied adapters refer to objects far outside the
    # layer.
    for name in HOOKED_FORWARD:
        if name in fields:
            memo[id(fields[name])] = None
    if "_tied_adapter" in fields:
        memo[id(fields["_tied_adapter"])] = []
    for _, module in layer.named_modules(memo={base}):
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(value)] = OrderedDict()
            # Views with a history, which a layer keeps of tied adapters, cannot be
            # copied.
            for leaf in tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and not leaf.is_leaf:
                    memo[id(leaf)] = leaf.detach().clone()
    copied = copy.deepcopy(layer, memo)
    for name in HOOKED_FORWARD:
        vars(copied).pop(name, None)
    for magnitude in copied._modules.get("lora_magnitude_vector", {}).values():
        if type(magnitude).__name__ == "DoraLinearLayer":
            vars(magnitude)["get_lora_weight"] = _product
    _let_base_be_plain(copied)
    device = next(plain.parameters()).device
    return copied.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def _let_base_be_plain(copied: Any) -> None:
    """Make a layer for a quantized base one for a plain base."""
    copied.quantization_backend = None
    if not type(copied).__module__.endswith(_QUANTIZED_MODULES):
        return
    method, _, name = _kind(copied).partition(".")
    copied.__class__ = getattr(
        importlib.import_module(f"peft.tuners.{method}.layer"), name
    )
    # A layer for bitsandbytes may lack this field: its weights are stored as those of
    # ``nn.Linear``.
    vars(copied).setdefault("fan_in_fan_out", False)


def _product(
    lora_A: nn.Linear,  # noqa: N803
    lora_B: nn.Linear,  # noqa: N803
    adapter_name: str | None = None,
) -> torch.Tensor:
    """Compute ``DoraLinearLayer.get_lora_weight`` without the unit matrix, as wide as the layer, that FSDP needs."""
    return lora_B.weight @ lora_A.weight


def _probe(plain: nn.Module) -> torch.Tensor:
    """An input for a plain module, always the same; torch's global generators are not used."""
    weight = plain.get_parameter("weight")
    fields = vars(plain)
    if isinstance(plain, nn.Embedding):
        step = math.ceil(plain.num_embeddings / _MOST_LOOKED_UP)
        return torch.arange(0, plain.num_embeddings, step, device=weight.device)[None]
    if "kernel_size" in fields:
        sizes = [2 * size + 1 for size in fields["kernel_size"]]
        shape = [fields["in_channels"], *sizes]
    else:
        # ``nx`` is the width of transformers' ``Conv1D``; a norm's is the last
        # dimension of its weight.
        width = fields.get("in_features", fields.get("nx", weight.shape[-1]))
        shape = [2, width]
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(
        2, *shape, generator=generator, dtype=torch.float32, device="cpu"
    )
    return drawn.to(weight.device)
