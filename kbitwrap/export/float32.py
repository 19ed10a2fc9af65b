"""A module of the base, and PEFT's layers on it, as copies in float32.

They share nothing with the live model that is written to: hooks, accelerate's forwards
and caches stay behind.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..model.bitsandbytes_layers import Rows
from ..model.quantization import is_quantized_layer
from ..model.tree import shallow_copy
from ..tensors.lazy import LazyTensor, values_of
from .adapters import ActiveLayer

# The attributes that accelerate sets: the forward between its hooks, the forward that
# this calls, and the hook.
HOOKED_FORWARD = ("forward", "_old_forward", "_hf_hook")
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
_LEAST_OUTPUTS = 16  # of a probe


def float32_module(plain: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Make a plain float32 module in evaluation mode over parameters by name.

    Their values are not copied.
    """
    made = shallow_copy(plain)
    made.training = False
    fields = vars(made)
    for name, value in fields.items():
        if name.endswith("_hooks"):
            fields[name] = type(value)()

    for name in HOOKED_FORWARD:
        fields.pop(name, None)

    for name in made._parameters:
        made._parameters[name] = None
        if name in values:
            made._parameters[name] = nn.Parameter(values[name], requires_grad=False)

    for name in ("out_features", "num_embeddings"):
        if name in fields:
            fields[name] = values["weight"].shape[0]

    if "padding_idx" in fields:
        # it matters to gradients alone, and the row may not be there
        fields["padding_idx"] = None

    return made


def lay_over(base: nn.Module, taken: Any) -> Any:
    """Lay what one of PEFT's layers is for some rows over a base, which may be adapted."""
    adapted: Any = shallow_copy(taken)
    adapted._modules["base_layer"] = base
    adapted.merged_adapters = []
    for magnitude in adapted._modules.get("lora_magnitude_vector", {}).values():
        vars(magnitude).get("_dora_cache", {}).clear()

    return adapted


def probe_of(plain: nn.Module) -> Tensor:
    """Return an input for a plain module, always the same.

    Torch's global generators are not used.
    """
    weight = plain.get_parameter("weight")
    fields = vars(plain)
    if isinstance(plain, nn.Embedding):
        step = math.ceil(plain.num_embeddings / _MOST_LOOKED_UP)
        return torch.arange(0, plain.num_embeddings, step, device=weight.device)[None]

    if "kernel_size" in fields:
        sizes = [2 * size + 1 for size in fields["kernel_size"]]
        shape = [2, fields["in_channels"], *sizes]
    else:
        # of transformers' ``Conv1D``, whose weight is transposed, and of all others
        width = fields.get("nx", weight.shape[-1])
        # One output alone may be near zero by chance, and its rounding then seem large.
        num_vectors = math.ceil(_LEAST_OUTPUTS * width / weight.numel())
        shape = [1, num_vectors, width]

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(weight.device)


class Float32Layer:
    """A float32 copy of one of PEFT's layers, without its base.

    What makes some rows is cut from the copy's tensors for each block of rows, and put
    in their place: their whole values are held beside them.

    Args:
        one: The layer and its active adapters.
        device: The device of the copy.
    """

    def __init__(self, one: ActiveLayer, device: torch.device) -> None:
        self.one = one
        self._copy = _float32_copy(one, device)
        tensors = (*self._copy.parameters(), *self._copy.buffers())
        self._wholes = {one: one.data for one in tensors}

    def take(self, rows: Rows) -> Any:
        """Return what the layer is for some rows: a copy, on which a merge may leave values."""
        taken: Any = shallow_copy(self._copy)
        taken._active_adapter = [*self.one.adapters]
        taken._disable_adapters = False
        if rows is not ... and self.one.parameter is not None:
            self._take_experts(taken, rows)
        elif rows is not ...:
            self._take_rows(taken, rows)
        return taken

    def _take_rows(self, adapted: Any, rows: slice) -> None:
        """Leave of an adapted layer what makes some rows."""
        for container, dim in _ROWS[self.one.kind].items():
            holder = getattr(adapted, container)
            for tensor in (*holder.parameters(), *holder.buffers()):
                whole = self._wholes[tensor]
                # One with a single row, as IA3's that scales the input, has it for all.
                if whole.shape[dim] > 1:
                    taken = whole.narrow(dim, rows.start, rows.stop - rows.start)
                    tensor.data = taken.clone()

        if "token_indices" not in vars(adapted):
            return

        # The trained rows are counted from the first of the block. Adapters without
        # any in it are not active.
        taken_by = {}
        for name, indices in adapted.token_indices.items():
            delta = adapted.trainable_tokens_delta[name]
            inside = range(rows.start, rows.stop)
            places = [place for place, index in enumerate(indices) if index in inside]
            delta.data = self._wholes[delta][places]
            taken_by[name] = [indices[place] - rows.start for place in places]

        adapted.token_indices = taken_by
        adapted._active_adapter = [name for name in self.one.adapters if taken_by[name]]

    def _take_experts(self, adapted: Any, rows: slice) -> None:
        """Leave a few experts of a stack, whose factors PEFT holds side by side.

        Those of the first, ``(experts * rank, in)``, lie one after the other. In the
        second, ``(out, rank * experts)``, each rank has all experts.
        """
        num_experts = adapted.num_experts
        adapted.num_experts = rows.stop - rows.start
        # PEFT takes a single expert for a matrix, (out, in), which it transposes where
        # it is told to.
        is_swapped = getattr(adapted, "_did_swap_in_out_features", False)
        adapted.fan_in_fan_out = not is_swapped

        for name in self.one.adapters:
            a, b = adapted.lora_A[name].weight, adapted.lora_B[name].weight
            stack_a = self._wholes[a].unflatten(0, (num_experts, -1))
            stack_b = self._wholes[b].unflatten(1, (-1, num_experts))
            a.data = stack_a[rows].flatten(0, 1)
            b.data = stack_b[:, :, rows].flatten(1)


def merges_by_rows(one: ActiveLayer, module: nn.Module, num_rows: int) -> bool:
    """Return whether each row of the merged weight depends on that row of the base's alone.

    Args:
        one: A layer, and its active adapters.
        module: The base's module, which may be quantized.
        num_rows: The rows of its weight, or the experts of a stack.
    """
    if one.parameter is not None:
        return one.kind == "lora.ParamWrapper" and one.layer.num_experts == num_rows

    if not is_quantized_layer(module) and type(module).forward not in _PLAIN_FORWARDS:
        return False  # it may do anything with what it computes

    if one.kind not in _ROWS or one.variants - _VARIANTS_WITH_ROWS:
        return False

    # PEFT refuses other indices when it merges the whole.
    for indices in vars(one.layer).get("token_indices", {}).values():
        if not all(0 <= index < num_rows for index in indices):
            return False

    return True


def _float32_copy(one: ActiveLayer, device: torch.device) -> Any:
    """Copy one of PEFT's layers without its base, as a layer for a plain base."""
    fields = vars(one.layer)
    if "forward" in fields and "_hf_hook" not in fields:
        raise TypeError(
            "its forward was replaced, and may depend on the input in any way"
        )

    # Hooks, accelerate's forward and tied adapters refer to objects far outside the
    # layer.
    bare = shallow_copy(one.layer)
    base = bare._modules.pop("base_layer")
    for name in HOOKED_FORWARD:
        vars(bare).pop(name, None)

    if "_tied_adapter" in fields:
        vars(bare)["_tied_adapter"] = []

    memo: dict[int, Any] = {id(base): None}
    for module in bare.modules():
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                memo[id(value)] = OrderedDict()
            # Views with a history, which a layer keeps of tied adapters, cannot be
            # copied.
            for leaf in tree_leaves(value):
                if isinstance(leaf, LazyTensor):
                    memo[id(leaf)] = nn.Parameter(values_of(leaf), requires_grad=False)
                elif isinstance(leaf, Tensor) and not leaf.is_leaf:
                    memo[id(leaf)] = leaf.detach().clone()

    copied: Any = copy.deepcopy(bare, memo)
    for magnitude in copied._modules.get("lora_magnitude_vector", {}).values():
        if type(magnitude).__name__ == "DoraLinearLayer":
            vars(magnitude)["get_lora_weight"] = _product

    copied.quantization_backend = None
    if one.is_for_quantized:
        # PEFT has a class for a plain base by the same name.
        method, _, name = one.kind.partition(".")
        layers = importlib.import_module(f"peft.tuners.{method}.layer")
        copied.__class__ = getattr(layers, name)
        # A layer for bitsandbytes may lack this field: its weights are stored as those
        # of ``nn.Linear``.
        vars(copied).setdefault("fan_in_fan_out", False)

    return copied.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def _product(
    lora_A: nn.Linear,  # noqa: N803
    lora_B: nn.Linear,  # noqa: N803
    adapter_name: str | None = None,
) -> Tensor:
    """Compute ``DoraLinearLayer.get_lora_weight`` without a unit matrix.

    That is as wide as the layer, and FSDP alone needs it.
    """
    return lora_B.weight @ lora_A.weight
