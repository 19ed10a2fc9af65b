"""A few blocks of each kind tell what all of a model's blocks take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from transformers import BitsAndBytesConfig

from kbitwrap import StepMemory, predict_step
from support.thorough import few

LORA = LoraConfig(target_modules=["q_proj", "q"])  # on one layer of a block: others do in each block what it does
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
WIDTHS = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "vocab_size": 96,
    "dtype": "bfloat16",
}


def config(name: str, **fields: Any) -> Any:
    """A config of the architecture with more blocks than have to be run."""
    cls = getattr(transformers, f"{name}Config")
    architecture = "T5ForConditionalGeneration" if name == "T5" else f"{name.removesuffix('Text')}ForCausalLM"
    return cls(architectures=[architecture], **{**WIDTHS, **fields})


MODELS = {
    "one kind": lambda: config("Llama", num_hidden_layers=6),
    "two kinds in turn": lambda: config("Gemma2", num_hidden_layers=12, sliding_window=8),
    "two of one kind and one of another": lambda: config(
        "Gemma3Text",
        num_hidden_layers=12,
        sliding_window=8,
        layer_types=[*["sliding_attention"] * 2, "full_attention"] * 4,
    ),
    "a few of one kind, then another": lambda: config(
        "Qwen2Moe",
        num_hidden_layers=8,
        mlp_only_layers=[0, 1],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    "an encoder and a decoder": lambda: config(
        "T5", num_layers=7, num_decoder_layers=7, d_model=32, d_kv=16, d_ff=64, num_heads=2, decoder_start_token_id=0
    ),
}


def both(model: Any, **settings: Any) -> list[StepMemory]:
    """The prediction from a few blocks, and that from all."""
    settings = {"kernels": "cpu", "batch_size": 2, "seq_len": 24, "lora": LORA, **settings}
    return [predict_step(model, exact=exact, **settings) for exact in (False, True)]


def figures(step: StepMemory) -> tuple[Any, ...]:
    return step.static_by_kind, step.phases, step.by_kind


@pytest.mark.parametrize(
    ("kind", "precision", "checkpointing"),
    few(
        [
            ("one kind", "compute", False),
            ("two of one kind and one of another", "peft", True),
            ("a few of one kind, then another", "none", False),
            ("an encoder and a decoder", "full", True),
        ],
        [("one kind", "compute", False)],
    ),
)
def test_a_few_blocks_of_each_kind_tell_the_bytes_of_all(kind: str, precision: str, checkpointing: bool) -> None:
    settings = {"quantization_config": NF4, "precision": precision, "gradient_checkpointing": checkpointing}
    cut, all_ = both(MODELS[kind](), **settings)
    assert cut.traced_blocks < all_.traced_blocks == cut.num_blocks == all_.num_blocks
    assert figures(cut) == figures(all_)


@pytest.mark.thorough
def test_all_blocks_are_run_where_something_grows_with_their_number() -> None:
    # Without checkpointing the model fills a cache, which allocates for each block with a sliding window beforehand.
    cut, all_ = both(MODELS["two kinds in turn"](), quantization_config=NF4, gradient_checkpointing=False)
    assert cut.traced_blocks == all_.traced_blocks == 12
    assert figures(cut) == figures(all_)


@pytest.mark.thorough
def test_adapters_on_some_blocks_alone_make_kinds_of_their_own() -> None:
    lora = LoraConfig(target_modules=["q_proj"], layers_to_transform=[1, 2, 3, 4, 5, 6])
    cut, all_ = both(config("Llama", num_hidden_layers=8), lora=lora, optimizer="sgd", gradient_checkpointing=False)
    assert cut.traced_blocks < all_.traced_blocks == 8
    assert figures(cut) == figures(all_)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*layers\.[2-5]\..*q_proj"},
        {"target_modules": ["layers.5.self_attn.q_proj", "layers.6.self_attn.q_proj"]},
        {"target_modules": ["q_proj"], "rank_pattern": {r"layers\.3\.self_attn\.q_proj": 32}},
        {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.4.self_attn.v_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": [r"layers\.4\.mlp"]},
    ],
    ids=str,
)
def test_adapters_that_name_blocks_by_number_are_made_of_all_of_them(fields: dict[str, Any]) -> None:
    cut, all_ = both(config("Llama", num_hidden_layers=10), lora=LoraConfig(**fields), quantization_config=NF4)
    assert figures(cut) == figures(all_)


@pytest.mark.thorough
def test_blocks_before_the_first_adapter_are_of_a_kind_of_their_own() -> None:
    kinds = [*["conv"] * 5, "full_attention"] * 2 + ["conv"] * 2
    model = config("Lfm2", num_hidden_layers=14, layer_types=kinds, block_multiple_of=8)
    lora = LoraConfig(target_modules=["q_proj"])  # in two blocks
    cut, all_ = both(model, lora=lora, quantization_config=NF4)
    assert cut.traced_blocks < all_.traced_blocks == 14
    assert figures(cut) == figures(all_)


@pytest.mark.thorough
def test_blocks_that_share_parameters_count_them_once() -> None:
    lora = LoraConfig(target_modules=["q_proj"], layer_replication=[[0, 3], [1, 4]])
    cut, all_ = both(config("Llama", num_hidden_layers=4), lora=lora, optimizer="sgd", gradient_checkpointing=False)
    assert figures(cut) == figures(all_)
