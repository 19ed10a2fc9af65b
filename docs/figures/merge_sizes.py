"""The bytes of a merged model's tensors, from the shapes of its config: nothing is loaded or quantized."""

from __future__ import annotations

import re
from typing import Any

import torch
from bitsandbytes.functional import QuantState, get_4bit_type
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig

import drawn
from drawn import BLOCK_SIZE

MISTRAL = MistralConfig(**drawn.MISTRAL)
ALL, QKV, NONE = r".*_proj", r".*\.[qkv]_proj", r"(?!)"


def merged_bytes(config: Any, in_half: str = ALL) -> int:
    """The bytes of a causal language model in nf4 and bfloat16.

    Args:
        config: The model's config.
        in_half: A pattern of the names of the linear layers that are in half precision; the others are in nf4, as
            bitsandbytes saves them without double quantization. The output head is always in half precision.

    Returns:
        The bytes of all tensors that are saved.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    total = 0
    for name, module in model.named_modules():
        is_in_nf4 = isinstance(module, nn.Linear) and module is not head and not re.fullmatch(in_half, name)
        for parameter in module.parameters(recurse=False):
            if parameter is head.weight and config.tie_word_embeddings and module is head:
                continue
            total += nf4_bytes(parameter.shape) if is_in_nf4 and parameter.ndim == 2 else 2 * parameter.numel()
    return total


def nf4_bytes(shape: torch.Size) -> int:
    """The bytes that bitsandbytes saves of a weight in nf4: codes, scales, the table of codes, a description."""
    state = QuantState(
        absmax=torch.empty(-(-shape.numel() // BLOCK_SIZE)),
        shape=shape,
        code=get_4bit_type("nf4", device="cpu"),
        blocksize=BLOCK_SIZE,
        quant_type="nf4",
        dtype=torch.bfloat16,
    )
    beside: dict[str, torch.Tensor] = state.as_dict(packed=True)
    return shape.numel() // 2 + sum(tensor.nbytes for tensor in beside.values())
