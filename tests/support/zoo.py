"""Tiny, real, quantized models for the tests.

Each entry of `ARCHITECTURES` is a transformers architecture with a configuration so small that loading it
and taking one training step needs a fraction of a second on one core. Nothing is downloaded: a model is built
from its configuration, its weights are drawn from a seed that depends on the name alone, it is saved once to a
temporary folder, and the first `load` reads it back through `from_pretrained`, which quantizes it with
bitsandbytes on the CPU as it would a real checkpoint. Later loads are copies of that model, made before anything
used it; a test compares them with a load from the checkpoint.

What the weights promise: no parameter is constant (norms and biases are perturbed) and all dropout is zero,
so two runs on the same batch are equal, and a change in any tensor can be seen in what the model computes.
(Three entries carry parameters that no forward uses, as their real checkpoints do: the last norm of LLaVA's
vision tower, wav2vec2's mask embedding, SigLIP's pooling head.)

Example:
    >>> model = load("llama", quant="nf4")
    >>> model = peft.get_peft_model(model, lora_config("llama"))
    >>> loss("llama", model, inputs("llama", model)).backward()
"""

from __future__ import annotations

import copyreg
import functools
import io
import itertools
import math
import os
import pickle
import shutil
import tempfile
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from bitsandbytes.nn import modules
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from support.shared import checkpoints

Batch = dict[str, torch.Tensor]

BATCH_SIZE = 2
SEQUENCE_LENGTH = 12
VOCAB_SIZE = 128
NUM_LABELS = 3
# Ids below the first ordinary one are special in every entry: padding, begin, end, and those of images.
VISION_START_ID, VISION_END_ID, IMAGE_TOKEN_ID, VIDEO_TOKEN_ID = 3, 4, 5, 6
FIRST_ORDINARY_ID = 8


# ----------------------------------------------------------------------------------------------------
# Training batches. One function for each kind of input; each takes the configuration, a seeded generator and
# the dtype of floating-point inputs.
# ----------------------------------------------------------------------------------------------------


def _floats(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Draw multiples of 1/8 in [-2, 2]: exact in every dtype, so the values do not depend on the dtype."""
    return (torch.randint(-16, 17, shape, generator=generator) / 8).to(dtype)


def _ids(generator: torch.Generator, length: int = SEQUENCE_LENGTH) -> torch.Tensor:
    return torch.randint(FIRST_ORDINARY_ID, VOCAB_SIZE, (BATCH_SIZE, length), generator=generator)


def _padded_ids(config: PretrainedConfig, generator: torch.Generator) -> Batch:
    """Draw token ids whose last row ends in two padding tokens: `padding_idx` is a path of its own."""
    input_ids = _ids(generator)
    attention_mask = torch.ones_like(input_ids)
    input_ids[-1, -2:] = config.get_text_config().pad_token_id
    attention_mask[-1, -2:] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _causal(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch = _padded_ids(config, generator)
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _causal_without_mask(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    input_ids = _ids(generator)
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _seq2seq(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return _padded_ids(config, generator) | {"labels": _ids(generator, 7)}


def _class_labels(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, NUM_LABELS, (BATCH_SIZE,), generator=generator)


def _text_classes(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return _padded_ids(config, generator) | {"labels": _class_labels(generator)}


def _images(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    return {"pixel_values": _floats(generator, dtype, BATCH_SIZE, 3, size, size)}


def _image_classes(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return _images(config, generator, dtype) | {"labels": _class_labels(generator)}


def _spectrogram(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    frames = 2 * config.max_source_positions  # The encoder's second convolution has stride 2.
    features = _floats(generator, dtype, BATCH_SIZE, config.num_mel_bins, frames)
    return {"input_features": features, "labels": _ids(generator, 7)}


def _waveform(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    return {"input_values": _floats(generator, dtype, BATCH_SIZE, 400), "labels": _ids(generator, 4)}


def _with_image_tokens(generator: torch.Generator, num_image_tokens: int) -> Batch:
    """Draw token ids that begin with one image's placeholders; the loss is on the text alone."""
    text = _ids(generator)
    image = torch.full((BATCH_SIZE, num_image_tokens), IMAGE_TOKEN_ID)
    input_ids = torch.cat([image, text], dim=1)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "labels": torch.cat([torch.full_like(image, -100), text], dim=1),
    }


def _image_and_text(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    # A Q-Former (BLIP-2) gives a fixed number of tokens an image; otherwise each patch is a token.
    num_image_tokens = getattr(config, "num_query_tokens", num_patches)
    return _images(config, generator, dtype) | _with_image_tokens(generator, num_image_tokens)


def _image_prefix(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    """PaliGemma: token types tell the prefix, attended in both directions, from the text that is learned."""
    batch = _image_and_text(config, generator, dtype)
    return batch | {"token_type_ids": (batch["labels"] != -100).long()}


def _image_patches(config: PretrainedConfig, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    """Qwen2-VL: images come as flattened patches and a grid (time, height, width) for each image."""
    vision = config.vision_config
    grid = torch.tensor([[1, 4, 4]] * BATCH_SIZE)
    patch_values = 3 * vision.temporal_patch_size * vision.patch_size**2
    batch = _with_image_tokens(generator, 16 // vision.spatial_merge_size**2)
    return batch | {
        "pixel_values": _floats(generator, dtype, 16 * BATCH_SIZE, patch_values),
        "image_grid_thw": grid,
        "mm_token_type_ids": (batch["input_ids"] == IMAGE_TOKEN_ID).int(),
    }


# ----------------------------------------------------------------------------------------------------
# The table.
# ----------------------------------------------------------------------------------------------------

_HALVES = (torch.bfloat16, torch.float16)
_QUANTS = ("nf4", "nf4-double", "fp4", "int8", "fp4-double")
# For linears called with four-dimensional inputs: bitsandbytes' 8-bit CPU kernel takes at most three.
_FOUR_BIT = ("nf4", "nf4-double", "fp4", "fp4-double")


@dataclass(frozen=True)
class Architecture:
    """One row of the zoo.

    Attributes:
        name: The key in `ARCHITECTURES`.
        model_class: The name of the class in transformers; its `config_class` builds the configuration.
        batch: Makes a training batch from (configuration, generator, dtype of floating-point inputs).
        targets: Suffixes of the names of the linears that LoRA adapts. All are quantized, unless
            `is_quantized` is false, and all lie on the path from the batch to the loss.
        config: The configuration's arguments.
        head: The module that `lora_config(modules_to_save=True)` trains in full: output head or classifier.
        unquantized: What a user must name in `llm_int8_skip_modules`. By default transformers leaves the
            output embedding alone, but not a classifier with a bias; naming anything replaces that default.
        is_quantized: Whether bitsandbytes finds any linear to replace.
        supports_gradient_checkpointing: Whether transformers can checkpoint the architecture.
        has_loss: Whether the model returns a loss; `loss` makes one where it does not.
        dtypes: The half dtypes in which a training step works on the CPU.
        quants: The quantizations in which a training step works on the CPU.
    """

    name: str
    model_class: str
    batch: Callable[[PretrainedConfig, torch.Generator, torch.dtype], Batch]
    targets: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False, hash=False)
    head: str = "lm_head"
    unquantized: tuple[str, ...] = ()
    is_quantized: bool = True
    supports_gradient_checkpointing: bool = True
    has_loss: bool = True
    dtypes: tuple[torch.dtype, ...] = _HALVES
    quants: tuple[str, ...] = _QUANTS


# Every matrix has a multiple of 64 values, the block size of bitsandbytes' 4-bit formats. There are fewer key
# and value heads than query heads, as in the models that people use.
_SPECIAL = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_DECODER = (
    _SPECIAL
    | _WIDTHS
    | {
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
)
_ENCODER = (
    _SPECIAL
    | _WIDTHS
    | {
        "intermediate_size": 128,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "num_labels": NUM_LABELS,
    }
)
_SEQ2SEQ = _SPECIAL | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_GPT2 = _SPECIAL | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
_OPT = _SPECIAL | _WIDTHS | {"ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64}
_BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4}
_VISION = _WIDTHS | {"intermediate_size": 128, "image_size": 16, "patch_size": 8}
_LLAMA = {"model_type": "llama"} | _DECODER

_ATTENTION = ("q_proj", "v_proj")

_ROWS = [
    # The core: one of each kind of model that people fine-tune quantized.
    Architecture("llama", "LlamaForCausalLM", _causal, ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"), _DECODER),
    Architecture("qwen3", "Qwen3ForCausalLM", _causal, (*_ATTENTION, "up_proj"), _DECODER | {"head_dim": 16}),
    # Tied head, embeddings scaled by the square root of the hidden size.
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _causal,
        _ATTENTION,
        _DECODER | {"head_dim": 16, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    # Quantized from `Conv1D`, whose weight is transposed.
    Architecture("gpt2", "GPT2LMHeadModel", _causal, ("c_attn", "c_fc", "mlp.c_proj"), _GPT2),
    Architecture("opt", "OPTForCausalLM", _causal, (*_ATTENTION, "fc1"), _OPT),
    # Router logits are a side output of each layer and carry their own gradient. Fused experts stay half.
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        _causal,
        _ATTENTION,
        _DECODER
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        # The default coefficient of the auxiliary loss, 0.001, would hide that loss from every comparison.
        | {"output_router_logits": True, "router_aux_loss_coef": 0.1},
    ),
    # `wo` stays float32 in transformers' own loading. With checkpointing transformers makes the position bias
    # require a gradient, and torch then picks another attention kernel: to compare bits with and without
    # checkpointing, load with `attn_implementation="eager"`.
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        _seq2seq,
        ("q", "v", "wi"),
        _SPECIAL
        | {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    Architecture("bart", "BartForConditionalGeneration", _seq2seq, (*_ATTENTION, "fc1"), _SEQ2SEQ),
    Architecture(
        "bert",
        "BertForSequenceClassification",
        _text_classes,
        ("query", "value"),
        _ENCODER,
        head="classifier",
        unquantized=("classifier",),
    ),
    Architecture(
        "vit",
        "ViTForImageClassification",
        _image_classes,
        (*_ATTENTION, "fc1"),
        _VISION | {"num_labels": NUM_LABELS},
        head="classifier",
        unquantized=("classifier",),
    ),
    # The encoder starts with convolutions; a tied head named otherwise.
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        _spectrogram,
        _ATTENTION,
        _SEQ2SEQ
        | {
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 16,
            "begin_suppress_tokens": None,
        },
        head="proj_out",
    ),
    # The last vision layer is used (the default is the one before it), so that every adapter gets a gradient.
    Architecture(
        "llava",
        "LlavaForConditionalGeneration",
        _image_and_text,
        _ATTENTION,
        {
            "text_config": _LLAMA,
            "vision_config": {"model_type": "clip_vision_model"} | _VISION,
            "image_token_index": IMAGE_TOKEN_ID,
            "vision_feature_layer": -1,
        },
    ),
    # The rest: each is here for something that the core does not show.
    Architecture("mistral", "MistralForCausalLM", _causal, _ATTENTION, _DECODER | {"sliding_window": 8}),
    Architecture("phi3", "Phi3ForCausalLM", _causal, ("qkv_proj", "gate_up_proj"), _DECODER),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        _causal,
        _ATTENTION,
        _DECODER
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    # bitsandbytes replaces `nn.Linear` but no subclass, and all of Falcon's linears are `FalconLinear`.
    Architecture(
        "falcon",
        "FalconForCausalLM",
        _causal,
        ("query_key_value", "dense_h_to_4h"),
        _SPECIAL | _WIDTHS | {"max_position_embeddings": 64},
        is_quantized=False,
    ),
    Architecture("bloom", "BloomForCausalLM", _causal, ("query_key_value", "dense_h_to_4h"), _SPECIAL | _BLOOM),
    Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        _causal,
        ("query_key_value", "dense_h_to_4h"),
        _SPECIAL | _WIDTHS | {"intermediate_size": 128, "max_position_embeddings": 64},
    ),
    # transformers refuses to checkpoint it.
    Architecture(
        "ctrl",
        "CTRLLMHeadModel",
        _causal,
        ("Wq", "Wv"),
        _GPT2 | {"dff": 128},
        supports_gradient_checkpointing=False,
    ),
    # Fused experts; sinks.
    Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _causal,
        _ATTENTION,
        _DECODER | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    # Fused experts of two dimensions.
    Architecture(
        "dbrx",
        "DbrxForCausalLM",
        _causal,
        ("Wqkv", "out_proj"),
        _SPECIAL
        | {
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            # transformers reads `rope_theta` and `clip_qkv` from here and gives them no usable default.
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
            "ffn_config": {
                "hidden_size": 64,
                "ffn_hidden_size": 128,
                "moe_num_experts": 4,
                "moe_top_k": 2,
            },
        },
    ),
    # Low-rank attention, a dense layer before the one with experts.
    Architecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _causal,
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
        _DECODER
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
        quants=_FOUR_BIT,
    ),
    # State-space models. PEFT refuses `out_proj` in them, because fused kernels read its weight directly.
    Architecture(
        "mamba",
        "MambaForCausalLM",
        _causal_without_mask,
        ("in_proj", "x_proj"),
        _SPECIAL | {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
        # The mixer multiplies by the weight of `dt_proj` itself, which fails on one that is packed.
        unquantized=("lm_head", "dt_proj"),
    ),
    Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        _causal_without_mask,
        ("in_proj",),
        _SPECIAL
        | {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 4,
        },
    ),
    # A Mamba layer, then one with attention and experts.
    Architecture(
        "jamba",
        "JambaForCausalLM",
        _causal_without_mask,
        (*_ATTENTION, "in_proj", "x_proj"),
        _DECODER
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    # Scaled embeddings, in a model with an encoder.
    Architecture(
        "mbart",
        "MBartForConditionalGeneration",
        _seq2seq,
        (*_ATTENTION, "fc1"),
        _SEQ2SEQ | {"scale_embedding": True},
    ),
    Architecture(
        "roberta",
        "RobertaForSequenceClassification",
        _text_classes,
        ("query", "value"),
        _ENCODER,
        head="classifier",
        unquantized=("classifier",),
    ),
    # The encoder reads the weight of `rel_embeddings` and never calls the module.
    Architecture(
        "deberta_v2",
        "DebertaV2ForSequenceClassification",
        _text_classes,
        ("query_proj", "value_proj"),
        _ENCODER
        | {
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
        head="classifier",
        unquantized=("classifier",),
    ),
    Architecture(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        _waveform,
        _ATTENTION,
        _SPECIAL
        | _WIDTHS
        | {
            "intermediate_size": 128,
            "conv_dim": (32, 32),
            "conv_kernel": (10, 4),
            "conv_stride": (5, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        unquantized=("lm_head",),
    ),
    # A vision tower alone: it has no loss, and nearest to a head is the norm before its pooled output.
    Architecture(
        "clip",
        "CLIPVisionModel",
        _images,
        (*_ATTENTION, "fc1"),
        _VISION,
        head="post_layernorm",
        has_loss=False,
    ),
    # The pooling head is there and unused, and it has an `fc1` as well, which would get no gradient.
    Architecture(
        "siglip",
        "SiglipForImageClassification",
        _image_classes,
        _ATTENTION,
        {"vision_config": _VISION, "num_labels": NUM_LABELS},
        head="classifier",
        unquantized=("classifier",),
    ),
    # transformers refuses to checkpoint it.
    Architecture(
        "convnext",
        "ConvNextForImageClassification",
        _image_classes,
        ("pwconv1", "pwconv2"),
        {
            "hidden_sizes": (32, 64),
            "depths": (1, 1),
            "num_stages": 2,
            "image_size": 32,
            "layer_scale_init_value": 0.5,
            "num_labels": NUM_LABELS,
        },
        head="classifier",
        unquantized=("classifier",),
        supports_gradient_checkpointing=False,
        quants=_FOUR_BIT,
    ),
    Architecture(
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        _image_patches,
        (*_ATTENTION, "qkv"),
        {
            "text_config": _DECODER
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
            "vision_config": {
                "depth": 2,
                "embed_dim": 64,
                "hidden_size": 64,
                "num_heads": 4,
                "patch_size": 8,
            },
            "vision_start_token_id": VISION_START_ID,
            "vision_end_token_id": VISION_END_ID,
            "image_token_id": IMAGE_TOKEN_ID,
            "video_token_id": VIDEO_TOKEN_ID,
        },
    ),
    # Scaled and tied embeddings behind a vision tower.
    Architecture(
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        _image_prefix,
        _ATTENTION,
        {
            "text_config": {"model_type": "gemma"} | _DECODER | {"head_dim": 16, "tie_word_embeddings": True},
            "vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False} | _VISION,
            "projection_dim": 64,
            "hidden_size": 64,
            "vocab_size": VOCAB_SIZE,
            "image_token_index": IMAGE_TOKEN_ID,
        },
    ),
    # transformers keeps the Q-Former and its query tokens in float32.
    Architecture(
        "blip_2",
        "Blip2ForConditionalGeneration",
        _image_and_text,
        (*_ATTENTION, "qkv"),
        {
            "vision_config": _VISION,
            "qformer_config": _SPECIAL | _WIDTHS | {"intermediate_size": 128, "encoder_hidden_size": 64},
            "text_config": {"model_type": "opt"} | _OPT,
            "num_query_tokens": 4,
            "image_token_index": IMAGE_TOKEN_ID,
        },
    ),
]

ARCHITECTURES: dict[str, Architecture] = {row.name: row for row in _ROWS}
CORE: tuple[str, ...] = tuple(ARCHITECTURES)[:12]


# Every other one of the rest, which tests take by default whose cases hold much the same.
ODD: tuple[str, ...] = tuple(ARCHITECTURES)[len(CORE) + 1 :: 2]


def in_turn(
    values: Sequence[Any],
    is_possible: Callable[[str, Any], bool] = lambda name, value: True,
    names: Collection[str] = tuple(ARCHITECTURES),
) -> list[tuple[str, Any]]:
    """Every architecture with one value that it can have: the next one after that of the last with the same inputs."""
    turns: dict[object, Iterator[Any]] = {}
    pairs = []
    for index, (name, row) in enumerate(ARCHITECTURES.items()):
        if name not in names:
            continue
        shifted = [*values[index % len(values) :], *values[: index % len(values)]]
        turn = turns.setdefault(row.batch, itertools.cycle(shifted))
        pairs.append((name, next(value for value in turn if is_possible(name, value))))
    return pairs


# ----------------------------------------------------------------------------------------------------
# Building and loading.
# ----------------------------------------------------------------------------------------------------

# Larger than transformers' 0.02, with which a layer of width 64 adds next to nothing to the residual stream.
_INITIALIZER_RANGE = 0.08
_PERTURBATION = 0.1


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())  # `hash` of a string differs from one process to the next.


def _make_deterministic(config: PretrainedConfig) -> None:
    """Set all dropout to zero and widen the initialization, in `config` and the configurations inside it."""
    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            _make_deterministic(value)
        elif "drop" in key and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, key, 0.0)
        elif key in ("initializer_range", "init_std"):
            setattr(config, key, _INITIALIZER_RANGE)
        elif key == "apply_spec_augment":
            setattr(config, key, False)


def _configuration(name: str) -> PretrainedConfig:
    row = ARCHITECTURES[name]
    config = getattr(transformers, row.model_class).config_class(**row.config)
    _make_deterministic(config)
    return config


@torch.no_grad()
def _perturb(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Add noise to norms, biases and all else that is one-dimensional or constant: no change goes unseen."""
    for parameter in model.parameters():
        if parameter.ndim <= 1 or bool((parameter == parameter.flatten()[0]).all()):
            parameter += _PERTURBATION * torch.randn(parameter.shape, generator=generator)


@functools.cache
def checkpoint(name: str) -> Path:
    """The folder with the float32 checkpoint of an architecture, which is saved at the first call."""
    folder = checkpoints() / name
    if folder.exists():
        return folder
    model_class = getattr(transformers, ARCHITECTURES[name].model_class)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(name))
        model = model_class(_configuration(name))
    _perturb(model, torch.Generator().manual_seed(_seed(name)))
    unfinished = tempfile.mkdtemp(dir=checkpoints())
    model.save_pretrained(unfinished)
    try:
        os.rename(unfinished, folder)
    except OSError:  # another process was first
        shutil.rmtree(unfinished)
    return folder


def _quantization_config(row: Architecture, quant: str, dtype: torch.dtype) -> BitsAndBytesConfig:
    skip_modules = list(row.unquantized) or None
    if quant == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skip_modules)
    quant_type, _, double = quant.partition("-")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double == "double",
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skip_modules,
    )


def load(
    name: str,
    quant: str | None = "nf4",
    dtype: torch.dtype = torch.bfloat16,
    *,
    eval_mode: bool = True,
    num_hidden_layers: int | None = None,
    **from_pretrained_kwargs: Any,
) -> PreTrainedModel:
    """Load a fresh model, as a user loads a checkpoint.

    Args:
        name: A key of `ARCHITECTURES`.
        quant: `"nf4"`, `"nf4-double"` (double quantization), `"fp4"`, `"fp4-double"`, `"int8"`, or `None` for
            unquantized.
        dtype: The dtype of what is not quantized, and the compute dtype of what is.
        num_hidden_layers: How many layers to load; all where none is said.
        eval_mode: Leave the model in evaluation mode, as `from_pretrained` does; otherwise in training mode.
        **from_pretrained_kwargs: Passed on, over the defaults.

    Returns:
        A model that shares nothing with those of other calls, and has the same values as theirs.

    Raises:
        ValueError: The architecture does not support the quantization or the dtype on the CPU.
    """
    row = ARCHITECTURES[name]
    if quant is not None and quant not in row.quants:
        raise ValueError(f"{name} supports {row.quants}, not {quant!r}")
    if dtype in _HALVES and dtype not in row.dtypes:
        raise ValueError(f"{name} supports {row.dtypes}, not {dtype}")
    fewer = {} if num_hidden_layers is None else {"num_hidden_layers": num_hidden_layers}
    if from_pretrained_kwargs:
        model = _from_pretrained(checkpoint(name), row, quant, dtype, **fewer, **from_pretrained_kwargs)
    else:
        # each 4-bit layer is made with bitsandbytes' answer, which a test may have changed
        repacks = modules.has_avx512bf16()
        model = _pristine(checkpoint(name), row, quant, dtype, repacks, **fewer).copy()
    return model.train(not eval_mode)


def _from_pretrained(
    folder: Path, row: Architecture, quant: str | None, dtype: torch.dtype, **kwargs: Any
) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype, "device_map": {"": "cpu"}}
    if quant is not None:
        options["quantization_config"] = _quantization_config(row, quant, dtype)
    return getattr(transformers, row.model_class).from_pretrained(folder, **options | kwargs)


class _Pickler(pickle.Pickler):
    """Leaves out tensors, classes and functions, of which torch makes some: the place in a list stands for each."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.left_out: list[Any] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, (torch.Tensor, type, types.FunctionType)):
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.left_out)
            self.left_out.append(value)
        return self._places[id(value)]

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):  # parametrized ones refuse to be pickled
            return copyreg.__newobj__, (type(value),), vars(value)  # type: ignore[attr-defined]
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Puts a copy in each place that stands for what was left out."""

    def __init__(self, file: io.BytesIO, copies: Sequence[Any]) -> None:
        super().__init__(file)
        self._copies = copies

    def persistent_load(self, place: int) -> Any:
        return self._copies[place]


class Original:
    """A model that nothing runs or changes, kept to be copied: copying modules one by one takes three times as long."""

    def __init__(self, model: PreTrainedModel) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        # bitsandbytes keeps the statistics of a parameter, and its module, in attributes.
        tensors = [*model.parameters(), *model.buffers()]
        pickler.dump((model, tensors, [vars(tensor) for tensor in tensors]))
        self._pickled = file.getvalue()
        self._left_out = pickler.left_out

    def copy(self) -> PreTrainedModel:
        """A model that differs in nothing but identities."""
        storages: dict[int, Any] = {}
        copies = [_copy(value, storages) for value in self._left_out]
        unpickler = _Unpickler(io.BytesIO(self._pickled), copies)
        model, tensors, attributes = unpickler.load()
        for tensor, values in zip(tensors, attributes, strict=True):
            vars(tensor).update(values)
        return model


def _copy(value: Any, storages: dict[int, Any]) -> Any:
    """A tensor like this one, without its attributes, in the copy of its storage; anything else is its own copy."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    if storage._cdata not in storages:
        storages[storage._cdata] = storage.clone()
    data = torch.empty(0, dtype=value.dtype, device=value.device)
    data.set_(storages[storage._cdata], value.storage_offset(), value.shape, value.stride())
    return torch.Tensor._make_subclass(type(value), data, value.requires_grad)


@functools.lru_cache(maxsize=None, typed=True)  # bitsandbytes' answer is 1, that of a test True, and layers keep it
def _pristine(
    folder: Path, row: Architecture, quant: str | None, dtype: torch.dtype, repacks: bool, **kwargs: Any
) -> Original:
    return Original(_from_pretrained(folder, row, quant, dtype, **kwargs))


# ----------------------------------------------------------------------------------------------------
# What a training step needs.
# ----------------------------------------------------------------------------------------------------


def _input_dtype(model: torch.nn.Module) -> torch.dtype:
    """Return the dtype of the first convolution: images and sound enter there, mostly without a cast."""
    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
    for module in model.modules():
        if isinstance(module, convolutions):
            return module.weight.dtype
    return torch.float32


def inputs(name: str, model: torch.nn.Module, *, seed: int = 0) -> Batch:
    """Make a training batch of two examples, labels included.

    Args:
        name: A key of `ARCHITECTURES`.
        model: The model that will take the batch, adapted, wrapped or neither. The batch is on its device,
            and floating-point inputs have the dtype of its first convolution; their values do not depend on
            that dtype, so what is computed from them in two dtypes can be compared.
        seed: Another seed, another batch.

    Returns:
        Keyword arguments: `model(**inputs(name, model)).loss` is a differentiable scalar, save for entries
        without `has_loss`, for which `loss` makes one.
    """
    generator = torch.Generator().manual_seed(_seed(name) + seed)
    batch = ARCHITECTURES[name].batch(_configuration(name), generator, _input_dtype(model))
    # Offloaded parameters are on the meta device; the batch goes where the others are.
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    return {key: value.to(device) for key, value in batch.items()}


def _floating_outputs(output: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for value in output.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]


def loss(name: str, model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run the model and return its loss.

    Models that return no loss get a deterministic stand-in: the inner product of their outputs, in float32,
    with a fixed wave. (A mean of squares would not do: behind a norm it hardly depends on anything.)
    """
    output = model(**batch)
    if ARCHITECTURES[name].has_loss:
        return output.loss
    terms = []
    for tensor in _floating_outputs(output):
        wave = torch.cos(torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device))
        terms.append(tensor.float().flatten() @ wave / math.sqrt(tensor.numel()))
    return torch.stack(terms).sum()


def fields(name: str, **more: Any) -> dict[str, Any]:
    """The fields of a preparation with which an architecture can be prepared, and more of them."""
    return {"gradient_checkpointing": ARCHITECTURES[name].supports_gradient_checkpointing, **more}


def adapt_by_transformers(model: torch.nn.Module, config: peft.PeftConfig) -> None:
    """Put adapters on a model by transformers' own method, whose version 5.24 refuses every PEFT that is released."""
    try:
        model.add_adapter(config)
    except ValueError as refusal:
        if "please use a version >= 0.22" in str(refusal):
            pytest.xfail("transformers 5.24 asks for PEFT 0.22, which is not released")
        raise


def lora_config(name: str, *, modules_to_save: bool = False, **kwargs: Any) -> peft.LoraConfig:
    """Make a LoRA configuration whose A and B both get a non-zero gradient in the first step.

    PEFT draws the adapter's weights from torch's global generator when it makes the model: seed it where two
    adapters must be equal. It warns where `modules_to_save` names a head that is tied to the embeddings.

    Args:
        name: A key of `ARCHITECTURES`.
        modules_to_save: Also train a full copy of the output head or classifier.
        **kwargs: Passed to `peft.LoraConfig`, over the defaults.
    """
    row = ARCHITECTURES[name]
    defaults: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "init_lora_weights": False,
        "target_modules": list(row.targets),
        "modules_to_save": [row.head] if modules_to_save else None,
    }
    return peft.LoraConfig(**defaults | kwargs)
