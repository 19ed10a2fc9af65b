"""Builds the model: the exact shapes of a real one, its quantized weights drawn as they are stored."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.functional import QuantState, get_4bit_type
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.utils.quantization_config import QuantizationMethod

from ..model.quantization import bitsandbytes_config
from .settings import Shape

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BLOCK_SIZE = 64
# times the deviation of uniformly drawn nf4 values, 0.57: weights deviate by 0.02
_WEIGHT_SCALE = 0.035
_EMBEDDING_DEVIATION = 0.02


def build_model(
    shape: Shape, device: torch.device, *, compute_dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Build a Mistral model in nf4 and bfloat16, as ``from_pretrained`` leaves a checkpoint that it quantizes.

    The packed 4-bit values are drawn themselves, layer by layer: no layer is ever held
    in half, so that a 7B fits where only its quantized weights do.

    Args:
        shape: Its shape.
        device: Where to put it.
        compute_dtype: The dtype that quantized layers compute in.
        seed: Seed of the weights: the same seed, the same model.

    Returns:
        The model, in evaluation mode.
    """
    config = _config(shape)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        model: Any = MistralForCausalLM(config).bfloat16()
    # The order of the draws decides the weights: a module's children, before the
    # children of any of them.
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name in LINEARS:
                setattr(module, name, _linear(child, compute_dtype, generator))
            elif isinstance(child, nn.Linear | nn.Embedding):
                child.weight = _parameter(
                    child.weight, 0.0, _EMBEDDING_DEVIATION, generator
                )
            elif hasattr(child, "variance_epsilon"):  # a norm
                child.weight = _parameter(
                    child.get_parameter("weight"), 1.0, 0.1, generator
                )
            elif hasattr(child, "inv_freq"):
                setattr(module, name, type(child)(config).to(device))
    if shape.is_tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = QuantizationMethod.BITS_AND_BYTES
    model.config.quantization_config = bitsandbytes_config("nf4", compute_dtype)
    result: PreTrainedModel = model.eval()
    return result


def _config(shape: Shape) -> MistralConfig:
    return MistralConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.is_tied,
        head_dim=shape.hidden_size // shape.num_heads,
        max_position_embeddings=32768,
        sliding_window=None,
        attention_dropout=0.0,
    )


def _parameter(
    like: torch.Tensor, mean: float, deviation: float, generator: torch.Generator
) -> nn.Parameter:
    """A parameter of the shape and dtype of one on the meta device, on the generator's device, its values random."""
    values = torch.empty(like.shape, dtype=like.dtype, device=generator.device)
    return nn.Parameter(values.normal_(mean, deviation, generator=generator))


def _linear(
    linear: nn.Linear, compute_dtype: torch.dtype, generator: torch.Generator
) -> Linear4bit:
    """A quantized layer of the same shape, on the generator's device, its packed values random."""
    device = generator.device
    with torch.device("meta"):
        layer = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=False,
            compute_dtype=compute_dtype,
            quant_type="nf4",
        )
    num_values = linear.in_features * linear.out_features
    # 16 packed values each
    words = torch.empty(num_values // 16, dtype=torch.int64, device=device)
    words.random_(-(2**63), None, generator=generator)
    absmax = torch.empty(num_values // _BLOCK_SIZE, device=device).uniform_(
        0.5, 1.5, generator=generator
    )
    layer.weight = Params4bit(
        words.view(torch.uint8).view(-1, 1),
        requires_grad=False,
        quant_state=QuantState(
            absmax=absmax.mul_(_WEIGHT_SCALE),
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=get_4bit_type("nf4", device=device),
            blocksize=_BLOCK_SIZE,
            quant_type="nf4",
            dtype=torch.bfloat16,
        ),
        blocksize=_BLOCK_SIZE,
        compress_statistics=False,
        quant_type="nf4",
        module=layer,
        bnb_quantized=True,
    )
    layer.quant_state = layer.weight.quant_state
    return layer
