"""Models of Mistral's shapes in nf4 and bfloat16 whose quantized weights are drawn as they are stored.

No layer is ever held in half precision, so that a 7B fits where only its quantized weights do.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState, get_4bit_type
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import MistralConfig, MistralForCausalLM
from transformers.utils.quantization_config import QuantizationMethod

from kbitwrap.model.quantization import bitsandbytes_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MISTRAL = {  # Mistral-7B-v0.3
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
}
BLOCK_SIZE = 64  # values that share a scale
_WEIGHT_SCALE = 0.035  # times the deviation of uniformly drawn nf4 values, 0.57: weights deviate by 0.02


def build_model(shape: dict[str, Any], *, compute_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Build a model as `from_pretrained` leaves a checkpoint that it quantizes, in evaluation mode; always the same."""
    config = MistralConfig(**shape, max_position_embeddings=32768, sliding_window=None, attention_dropout=0.0)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model: Any = MistralForCausalLM(config).bfloat16()
    # The order of the draws decides the weights: a module's children, before the children of any of them.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in LINEARS:
                setattr(module, name, _linear(child, compute_dtype, generator))
            elif isinstance(child, nn.Linear | nn.Embedding):
                child.weight = _parameter(child.weight, 0.0, 0.02, generator)
            elif hasattr(child, "variance_epsilon"):  # a norm
                child.weight = _parameter(child.get_parameter("weight"), 1.0, 0.1, generator)
            elif hasattr(child, "inv_freq"):
                setattr(module, name, type(child)(config))
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    model.config.quantization_config = bitsandbytes_config("nf4", compute_dtype)
    return model.eval()


def _parameter(like: torch.Tensor, mean: float, deviation: float, generator: torch.Generator) -> nn.Parameter:
    """A parameter of the shape and dtype of one on the meta device, its values random."""
    values = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    return nn.Parameter(values.normal_(mean, deviation, generator=generator))


def _linear(linear: nn.Linear, compute_dtype: torch.dtype, generator: torch.Generator) -> Linear4bit:
    """A quantized layer of the same shape, its packed values random."""
    shape = linear.weight.shape
    with torch.device("meta"):
        layer = Linear4bit(shape[1], shape[0], bias=False, compute_dtype=compute_dtype, quant_type="nf4")
    words = torch.empty(shape.numel() // 16, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    absmax = torch.empty(shape.numel() // BLOCK_SIZE).uniform_(0.5, 1.5, generator=generator)
    layer.weight = Params4bit(
        words.view(torch.uint8).view(-1, 1),
        requires_grad=False,
        quant_state=QuantState(
            absmax=absmax.mul_(_WEIGHT_SCALE),
            shape=shape,
            code=get_4bit_type("nf4", device="cpu"),
            blocksize=BLOCK_SIZE,
            quant_type="nf4",
            dtype=torch.bfloat16,
        ),
        blocksize=BLOCK_SIZE,
        compress_statistics=False,
        quant_type="nf4",
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = layer.weight.quant_state
    return layer
