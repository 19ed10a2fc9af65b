"""A processor's own output is taken as the batch: what a model reads has its values, and numbered blocks stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers.feature_extraction_utils import BatchFeature

from kbitwrap import ConfigError, KbitPreparedModel, StepTracker, predict_step

pytestmark = pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")

IMAGE = 5
LORA = LoraConfig(r=4, target_modules=r".*(q_proj|v_proj|qkv)")
NUM_BLOCKS = 6
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
PATCHES = {"depth": NUM_BLOCKS, "hidden_size": 64, "num_heads": 4, "patch_size": 8}
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
TOKENS = {"video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}


def ids(num_image_tokens: int) -> torch.Tensor:
    text = torch.randint(10, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.full((2, num_image_tokens), IMAGE), text], 1)


def with_pixels(num_image_tokens: int, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    input_ids = ids(num_image_tokens)
    pixels = torch.randn(2, 3, 32, 32)
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "pixel_values": pixels, **more}


def with_patches() -> dict[str, torch.Tensor]:
    batch = with_pixels(4, image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
    kinds = (batch["input_ids"] == IMAGE).int()
    return batch | {"pixel_values": torch.randn(32, 3 * 2 * 8 * 8), "mm_token_type_ids": kinds}


def with_a_missing_image() -> dict[str, torch.Tensor]:
    """Two places for images a sequence, of which the second sequence uses one: the other is all zeros."""
    batch = with_pixels(8, pixel_attention_mask=torch.ones(2, 2, 32, 32, dtype=torch.int64))
    batch["input_ids"][1, 4:8] = 9
    pixels = torch.randn(2, 2, 3, 32, 32)
    pixels[1, 1] = 0
    return batch | {"pixel_values": pixels}


def model(name: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> Any:
    cls: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    config = cls.config_class(text_config=TEXT | text, vision_config=vision, image_token_id=IMAGE, **fields)
    torch.manual_seed(0)
    return cls(config).bfloat16()


def types_of_tokens(num_image_tokens: int, *, of_images: int) -> torch.Tensor:
    is_image = ids(num_image_tokens) == IMAGE
    return is_image.long() if of_images else (~is_image).long()


CASES: dict[str, Any] = {
    "Qwen2VL": lambda: (
        model("Qwen2VL", SECTIONS, PATCHES | {"embed_dim": 64, "mlp_ratio": 2}, **TOKENS),
        with_patches(),
    ),
    "Qwen2_5_VL": lambda: (
        model(
            "Qwen2_5_VL",
            SECTIONS,
            PATCHES
            | {"out_hidden_size": 64, "intermediate_size": 128, "window_size": 16, "fullatt_block_indexes": [1, 4]},
            **TOKENS,
        ),
        with_patches(),
    ),
    "Qwen3VL": lambda: (
        model(
            "Qwen3VL",
            SECTIONS,
            PATCHES
            | {
                "out_hidden_size": 64,
                "intermediate_size": 128,
                "deepstack_visual_indexes": [0, 4],
                "num_position_embeddings": 64,
            },
            **TOKENS,
        ),
        with_patches(),
    ),
    "Llava": lambda: (
        model(
            "Llava",
            {"model_type": "llama"},
            TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
            image_token_index=IMAGE,
        ),
        with_pixels(16),
    ),
    "Idefics3": lambda: (
        model("Idefics3", {"model_type": "llama"}, TOWER, scale_factor=2, pad_token_id=0),
        with_a_missing_image(),
    ),
    "SmolVLM": lambda: (
        # before transformers 5.23 the tokens of an image come in multiples of the patch size
        model("SmolVLM", {"model_type": "llama"}, TOWER | {"patch_size": 4}, scale_factor=4, pad_token_id=0),
        with_a_missing_image(),
    ),
    "PaliGemma": lambda: (
        model(
            "PaliGemma",
            {"model_type": "gemma"},
            TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
            projection_dim=64,
            image_token_index=IMAGE,
        ),
        with_pixels(16, token_type_ids=types_of_tokens(16, of_images=False), labels=ids(16)),
    ),
    "Gemma3": lambda: (
        model(
            "Gemma3",
            {"sliding_window": 8},
            TOWER | {"vision_use_head": False},
            image_token_index=IMAGE,
            mm_tokens_per_image=4,
        ),
        with_pixels(4, token_type_ids=types_of_tokens(4, of_images=True)),
    ),
}


def tracked(model: Any, batch: dict[str, torch.Tensor]) -> StepTracker:
    """A real second step, with the labels that a collator adds."""
    prepared = KbitPreparedModel(model).prepare()
    adapted: Any = get_peft_model(model, LORA)
    prepared.adopt(adapted)
    optimizer = torch.optim.AdamW([one for one in adapted.train().parameters() if one.requires_grad])
    batch = {"labels": batch["input_ids"].clone(), **batch}
    for _ in range(2):
        optimizer.zero_grad()
        with StepTracker(adapted, optimizer, batch) as tracker:
            adapted(**batch).loss.backward()
            optimizer.step()
    return tracker


@pytest.mark.thorough
@pytest.mark.parametrize("name", list(CASES))
def test_a_step_with_images_equals_the_real_one_to_the_byte(name: str) -> None:
    model, batch = CASES[name]()
    given = copy.deepcopy(batch)
    step = predict_step(model, inputs=BatchFeature(batch), lora=LORA, kernels="cpu")
    assert all(torch.equal(batch[key], value) for key, value in given.items())
    assert (step.batch_size, step.seq_len) == tuple(batch["input_ids"].shape)
    assert any("labels" in note for note in step.notes) == ("labels" not in batch)
    tracker = tracked(model, batch)
    assert (step.static_bytes, step.phases) == (tracker.static_bytes, tracker.phases)


def test_a_batch_that_disagrees_with_its_size_is_refused_in_one_line() -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **TEXT)
    batch = BatchFeature({"input_ids": ids(0)})
    with pytest.raises(ConfigError, match=r"^seq_len: expected 12, as input_ids of shape \(2, 12\) say, found 64"):
        predict_step(config, inputs=batch, seq_len=64)
    with pytest.raises(ConfigError, match=r"^batch_size: give the number"):
        predict_step(config, inputs={"inputs_embeds": ((2, 12, 64), "float32")}, seq_len=12)
    with pytest.raises(ConfigError, match=r"return_tensors='pt'$"):
        predict_step(config, inputs=BatchFeature({"input_ids": [[9, 9]]}))
