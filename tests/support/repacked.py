"""4-bit weights in the layout that bitsandbytes gives them on a CPU with AVX512-BF16."""

from __future__ import annotations

from typing import TypeVar

import bitsandbytes as bnb
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def repacked(model: Model) -> Model:
    """The model, after what each of its `Linear4bit.forward` does there in eval mode."""
    num_repacked = 0
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit) and module.weight.quant_state.shape[0] % 32 == 0:
            weight = module.weight
            weight.data, _ = bnb.functional._convert_weight_packed_for_cpu(weight.data, weight.quant_state)
            num_repacked += 1
    assert num_repacked
    return model
