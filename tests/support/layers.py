"""Models of a few large layers, for tests of the memory that a merge takes."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import peft
import torch
from peft import PeftModel, get_peft_model
from torch import nn

from support.engines import FSDP2_STORAGE


def layer_of(kind: str, width: int) -> nn.Module:
    """A layer with a weight of ``width * width`` elements."""
    if kind.endswith("experts"):
        count = int(kind.split()[0])
        experts = nn.Module()
        experts.up_proj = nn.Parameter(torch.randn(count, width // count, width).to(torch.bfloat16))
        if "nf4" in kind:
            from bitsandbytes.nn.parametrize import replace_parameter_4bit  # newer than the oldest version

            replace_parameter_4bit(experts, "up_proj", quant_type="nf4")
        return experts
    if kind == "embedding":
        return nn.Embedding(width, width).to(torch.bfloat16)
    if kind == "linear":
        return nn.Linear(width, width, bias=False).to(torch.bfloat16)
    if kind == "nf4":
        layer = bitsandbytes.nn.Linear4bit(width, width, bias=False, quant_type="nf4", quant_storage=FSDP2_STORAGE)
        return layer.to(torch.bfloat16).to("cpu")
    return bitsandbytes.nn.Linear8bitLt(width, width, bias=False, has_fp16_weights=False).to("cpu")


def adapted_layers(kind: str, width: int, method: str, **options: Any) -> PeftModel:
    """Three layers, the largest tensors, and a norm in the half dtype."""
    model = nn.Sequential(*(layer_of(kind, width) for _ in range(3)), nn.RMSNorm(width).to(torch.bfloat16))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind == "int8"
    return get_peft_model(model, getattr(peft, method)(**{"target_modules": ["0", "1", "2"], **options}))


LORA: dict[str, Any] = {"method": "LoraConfig", "init_lora_weights": False}


LARGE_LAYERS = [
    ("nf4", LORA),
    ("nf4", {**LORA, "use_dora": True}),
    ("nf4", {"method": "AdaLoraConfig", "init_lora_weights": False, "total_step": 10}),
    ("nf4", {"method": "HiraConfig", "init_weights": False}),
    ("nf4", {"method": "IA3Config", "feedforward_modules": []}),
    ("nf4", {"method": "VeraConfig", "r": 64}),
    ("int8", LORA),
    ("int8", {**LORA, "use_dora": True}),
    ("linear", LORA),
    ("linear", {"method": "LoHaConfig", "init_weights": False}),
    ("embedding", LORA),
    ("embedding", {"method": "TrainableTokensConfig", "token_indices": [0, 63]}),
    # Of rank 1: that of 64 small experts, in float32, has an eighth of their bytes.
    *[
        (kind, {**LORA, "r": 1, "target_modules": None, "target_parameters": [f"{i}.up_proj" for i in range(3)]})
        for kind in ("8 experts", "16 experts", "64 experts", "8 nf4 experts", "16 nf4 experts", "64 nf4 experts")
    ],
]
