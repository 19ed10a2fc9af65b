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

from ..model.quantization import PEFT_MODULES
from ..model.tree import shallow_copy
from ..tensors.lazy import LazyTensor, values_of
from .adapters import ActiveLayer

# The attributes that accelerate sets: the forward between its hooks, the forward that
# this calls, and the hook.
HOOKED_FORWARD = ("forward", "_old_forward", "_hf_hook")
QUANTIZED_MODULES = tuple(f".{name}" for name in PEFT_MODULES)
"""The ends of the names of PEFT's modules with layers for quantized bases."""
_MOST_LOOKED_UP = 4096  # rows of an embedding in which a merge is compared


def float32_module(plain: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    """A plain float32 module in evaluation mode over parameters by name.

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
            parameter = nn.Parameter(values[name], requires_grad=False)
            made._parameters[name] = parameter

    for name in ("out_features", "num_embeddings"):
        if name in fields:
            fields[name] = values["weight"].shape[0]

    if "padding_idx" in fields:
        # it matters to gradients alone, and the row may not be there
        fields["padding_idx"] = None

    return made


def float32_layer(one: ActiveLayer, plain: nn.Module) -> Any:
    """A copy of one of PEFT's layers in float32, without its base.

    It is on the device of a plain one.
    """
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
                    values = values_of(leaf)
                    memo[id(leaf)] = nn.Parameter(values, requires_grad=False)
                elif isinstance(leaf, Tensor) and not leaf.is_leaf:
                    memo[id(leaf)] = leaf.detach().clone()

    copied: Any = copy.deepcopy(bare, memo)
    for magnitude in copied._modules.get("lora_magnitude_vector", {}).values():
        if type(magnitude).__name__ == "DoraLinearLayer":
            vars(magnitude)["get_lora_weight"] = _product

    _let_base_be_plain(copied, one.kind)
    device = next(plain.parameters()).device
    return copied.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def _let_base_be_plain(copied: Any, kind: str) -> None:
    """Make a layer for a quantized base one for a plain base.

    Its class becomes the one that PEFT has for such, by the same name.
    """
    copied.quantization_backend = None
    if not type(copied).__module__.endswith(QUANTIZED_MODULES):
        return

    method, _, name = kind.partition(".")
    module = importlib.import_module(f"peft.tuners.{method}.layer")
    copied.__class__ = getattr(module, name)
    # A layer for bitsandbytes may lack this field: its weights are stored as those of
    # ``nn.Linear``.
    vars(copied).setdefault("fan_in_fan_out", False)


def _product(
    lora_A: nn.Linear,  # noqa: N803
    lora_B: nn.Linear,  # noqa: N803
    adapter_name: str | None = None,
) -> Tensor:
    """Compute ``DoraLinearLayer.get_lora_weight`` without a unit matrix.

    That is as wide as the layer, and FSDP alone needs it.
    """
    return lora_B.weight @ lora_A.weight


def probe_of(plain: nn.Module) -> Tensor:
    """An input for a plain module, always the same.

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
        # ``nx`` is the width of transformers' ``Conv1D``; a norm's is the last
        # dimension of its weight.
        width = fields.get("in_features", fields.get("nx", weight.shape[-1]))
        shape = [1, 2, width]

    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(weight.device)
