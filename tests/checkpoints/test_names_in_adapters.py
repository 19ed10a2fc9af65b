"""Which of an adapter's tensors a merge reads: all, under whatever names PEFT reads them, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from kbitwrap import ConfigError, KbitPreparedModel, doctor, merge_checkpoint
from support import zoo
from support.files import tensors_of
from support.merging import assert_same_model, export, jitter
from support.thorough import few

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=BFLOAT16)
SMALL: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
PREFIX = "base_model.model."


def train(model: Any, folder: Path, saving: Any = "auto", **lora: Any) -> None:
    """Make an adapter that does something, save it, and export the merged model."""
    with KbitPreparedModel(model, precision="none") as prepared:
        adapted = get_peft_model(prepared.model, LoraConfig(r=4, **lora))
        jitter(adapted)
        adapted.save_pretrained(folder / "adapter", save_embedding_layers=saving)
        prepared.manifest().save(folder / "kbitwrap.json")
        prepared.export(folder / "live", merge_adapters=True)


def merge(folder: Path, settings: Any, manifest: Path | None = None) -> Path:
    out = folder / ("merged" if manifest is None else "merged-by-manifest")
    options: dict[str, Any] = {"quantization_config": settings, "manifest": manifest, "check": True, "overwrite": True}
    merge_checkpoint(folder / "base", folder / "adapter", out, **options)
    return out


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.lm_head.modules_to_save.default.weight",
        "base_model.model.model.embed_tokens.modules_to_save.weight",
        "model.layers.0.input_layernorm.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.original_module.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight.absmax",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.SCB",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_C.weight",
        "base_model.model.model.norm.weight",  # this one is read
    ],
)
def test_what_nobody_reads_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    settings = BitsAndBytesConfig(load_in_8bit=True) if name.endswith("SCB") else NF4
    config = LlamaConfig(**SMALL, num_hidden_layers=1)
    LlamaForCausalLM(config).to(BFLOAT16).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings, device_map={"": "cpu"})
    train(model, tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    shapes = {"lm_head": (128, 64), "embed_tokens": (128, 64), "layer.weight": (64, 64), "_module.weight": (64, 64)}
    trained = torch.randn(next((shape for part, shape in shapes.items() if part in name), (64,)))
    save_file(load_file(file) | {name: trained}, file)
    if name.endswith("model.norm.weight"):
        found = tensors_of(merge(tmp_path, settings))["model.norm.weight"]
        assert torch.equal(found, trained.to(BFLOAT16))
        return
    with pytest.raises(ConfigError, match=rf"has no place for \({name}\): .* under the names that PEFT"):
        merge(tmp_path, settings)


def test_two_values_for_one_tied_tensor_are_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, num_hidden_layers=1, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(BFLOAT16).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=NF4, device_map={"": "cpu"})
    train(model, tmp_path, True, target_modules=["q_proj"])
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    name = f"{PREFIX}model.embed_tokens.weight"
    assert_same_model(merge(tmp_path, NF4), tmp_path / "live")
    save_file(load_file(file) | {name: torch.randn(128, 64)}, file)
    with pytest.raises(ConfigError, match=r"another name of the same tensor .*: the base ties what was trained apart"):
        merge(tmp_path, NF4)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_trainable_tokens_of_tied_weights_that_are_saved_whole_are_merged(tmp_path: Path) -> None:
    config = LlamaConfig(**SMALL, num_hidden_layers=1, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(BFLOAT16).save_pretrained(tmp_path / "base")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=NF4, device_map={"": "cpu"})
    model.resize_token_embeddings(136, mean_resizing=False)
    train(model, tmp_path, target_modules=["q_proj"], trainable_token_indices=[*range(128, 136)])
    head = f"{PREFIX}lm_head.token_adapter.trainable_tokens_delta"
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert head in load_file(file)
    assert_same_model(merge(tmp_path, NF4), tmp_path / "live")
    save_file(load_file(file) | {head: torch.randn(8, 64)}, file)
    with pytest.raises(ConfigError, match=rf"has no place for \({head}\)"):
        merge(tmp_path, NF4)


@pytest.mark.parametrize("options", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_an_adapter_on_a_quantized_head_that_is_saved_with_it_is_merged(
    options: dict[str, Any], tmp_path: Path
) -> None:
    LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=1)).to(BFLOAT16).save_pretrained(tmp_path / "base")
    settings = BitsAndBytesConfig(**options, llm_int8_skip_modules=["none"])
    model = LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings, device_map={"": "cpu"})
    train(model, tmp_path, True, target_modules=["q_proj", "lm_head"])
    assert f"{PREFIX}lm_head.base_layer.weight" in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert_same_model(merge(tmp_path, settings), tmp_path / "live")


QWEN = {
    "text_config": SMALL | {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16},
    "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 64},
}
QWEN["text_config"] |= {"layer_types": ["full_attention"], "pad_token_id": 0}
PARTS = [
    ("AutoModelForCausalLM", "CAUSAL_LM", "Qwen3_5ForCausalLM"),
    ("AutoModelForImageTextToText", "CAUSAL_LM", "Qwen3_5ForConditionalGeneration"),
    ("AutoModel", None, "Qwen3_5Model"),
]


@pytest.mark.parametrize(("auto_class", "task_type", "name"), few(PARTS, PARTS[:1]))
def test_an_adapter_of_a_part_of_the_base_is_merged_into_that_part(
    auto_class: str, task_type: str | None, name: str, tmp_path: Path
) -> None:
    config = transformers.Qwen3_5Config(**QWEN)
    transformers.Qwen3_5ForConditionalGeneration(config).to(BFLOAT16).save_pretrained(tmp_path / "base")
    loading = getattr(transformers, auto_class)
    model = loading.from_pretrained(tmp_path / "base", quantization_config=NF4, device_map={"": "cpu"})
    assert type(model).__name__ == name
    train(model, tmp_path, target_modules=["q_proj"], task_type=task_type)
    for merged in (merge(tmp_path, NF4), merge(tmp_path, None, tmp_path / "kbitwrap.json")):
        assert_same_model(merged, tmp_path / "live")
        # Nothing is missing of a part, which other parts of the base are not of.
        assert not doctor(merged, base=tmp_path / "base", adapter=tmp_path / "adapter", quant="nf4").findings


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern:RuntimeWarning")  # of PEFT's conversion
@pytest.mark.parametrize("name", few(["mixtral", "qwen3_moe"], ["qwen3_moe"]))
def test_an_adapter_on_each_expert_is_read_as_peft_converts_it(name: str, tmp_path: Path) -> None:
    if name == "mixtral":
        base = zoo.load(name, None, FLOAT32)
        projections, holder = {"w1": "in", "w3": "in", "w2": "out"}, "block_sparse_moe"
    else:
        config = transformers.Qwen3MoeConfig(
            **SMALL, num_hidden_layers=2, moe_intermediate_size=32, num_experts=4, num_key_value_heads=2, head_dim=16
        )
        base = transformers.Qwen3MoeForCausalLM(config)
        projections, holder = {"gate_proj": "in", "up_proj": "in", "down_proj": "out"}, "mlp"
    base.to(BFLOAT16).save_pretrained(tmp_path / "base")
    experts = base.model.layers[0].mlp.experts
    hidden, width = experts.down_proj.shape[1:]
    tensors = {}
    for layer in range(len(base.model.layers)):
        for expert in range(len(experts.down_proj)):
            for projection, side in projections.items():
                inputs, outputs = (hidden, width) if side == "in" else (width, hidden)
                module = f"{PREFIX}model.layers.{layer}.{holder}.experts.{expert}.{projection}"
                tensors[f"{module}.lora_A.weight"] = 0.1 * torch.randn(4, inputs)
                tensors[f"{module}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4)
    LoraConfig(r=4, target_modules=[*projections], task_type="CAUSAL_LM").save_pretrained(tmp_path / "adapter")
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    adapted: Any = PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    export(adapted, tmp_path / "live")
    assert_same_model(merge(tmp_path, False), tmp_path / "live")
    with pytest.raises(ConfigError, match=r"names of an older transformers \(.*experts\.0\..* in stacks, unquantized"):
        merge(tmp_path, NF4)
