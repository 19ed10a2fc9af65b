"""The configs of what is written: the base's own files, and what differs from them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig

from kbitwrap import KbitPreparedModel, merge_checkpoint
from support import zoo
from support.merging import export
from support.thorough import few

Clients = Callable[[str], Any]
GENERATION = {
    "": "a name without a letter",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "do_sample": True,
    "temperature": 0.6,
    "transformers_version": "4.42.3",
}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
LORA = {"target_modules": r".*(q_proj|query_key_value|c_attn)", "lora_alpha": 2, "init_lora_weights": False}


def read(folder: Path, name: str = "config.json") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def load(base: Path, **options: Any) -> Any:
    model_class = getattr(transformers, read(base)["architectures"][0])
    return model_class.from_pretrained(base, **options)


@pytest.mark.parametrize("name", few(["llama", "qwen3_moe", "gemma3_text", "gpt_neox"], ["gemma3_text"]))
def test_what_is_written_has_the_configs_of_the_base(name: str, figures: Clients, tmp_path: Path) -> None:
    clients = figures("clients")
    base = tmp_path / "base"
    clients.make_base(name, base)
    (base / "generation_config.json").write_text(json.dumps(GENERATION))
    model = load(base, quantization_config=NF4, device_map={"": "cpu"})
    with KbitPreparedModel(model, precision="full") as prepared:
        adapter = get_peft_model(model, LoraConfig(**LORA))
        adapter.save_pretrained(tmp_path / "adapter")
        prepared.export(tmp_path / "export", model=adapter)
        prepared.export(tmp_path / "live", model=adapter, merge_adapters=True)
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "merged", quantization_config=NF4)
    merge_checkpoint(base, None, tmp_path / "no-adapter", quantization_config=NF4)

    for written in ("live", "merged", "no-adapter", "export"):
        config = read(tmp_path / written)
        assert ("quantization_config" in config) == (written == "export")
        config.pop("quantization_config", None)
        assert config == clients.config_of(name)
        assert read(tmp_path / written, "generation_config.json") == GENERATION
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "live" / file).read_bytes() == (tmp_path / "merged" / file).read_bytes()


@pytest.mark.parametrize("name", ["llama", "llava", "bert"])
def test_the_cache_that_a_trainer_turns_off_is_as_the_base_has_it(name: str, tmp_path: Path) -> None:
    model = zoo.load(name, "nf4")
    model.config.use_cache = False  # which not every config has
    with KbitPreparedModel(model) as prepared:
        adapter = get_peft_model(model, LoraConfig(target_modules="all-linear"))
        prepared.export(tmp_path / "merged", model=adapter, merge_adapters=True)
    written, of_base = read(tmp_path / "merged"), read(zoo.checkpoint(name))
    assert written.keys() == of_base.keys()
    assert written.get("use_cache") == of_base.get("use_cache")


def test_a_field_without_a_name_is_no_obstacle(tmp_path: Path) -> None:
    zoo.load("llama", quantization_config=None).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"": 1, "eos_token_id": 2}')
    merge_checkpoint(tmp_path / "base", None, tmp_path / "merged", quantization_config=False)
    assert read(tmp_path / "merged", "generation_config.json")["eos_token_id"] == 2


def test_what_differs_is_written_by_the_name_that_the_file_has(figures: Clients, tmp_path: Path) -> None:
    base = tmp_path / "base"
    figures("clients").make_base("gemma2", base)
    model = load(base, dtype=torch.float16)
    model.resize_token_embeddings(130)
    model.config.final_logit_softcapping = None
    KbitPreparedModel(model).export(tmp_path / "export")
    changed = {"vocab_size": 130, "torch_dtype": "float16", "final_logit_softcapping": None}
    assert read(tmp_path / "export") == {**read(base), **changed}


def test_a_number_that_is_not_finite_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(zoo.checkpoint("mamba2"), base)
    config = read(base)
    assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    config = {**config, "torch_dtype": config.pop("dtype"), "transformers_version": "4.42.3"}
    (base / "config.json").write_text(json.dumps(config))
    KbitPreparedModel(load(base)).export(tmp_path / "export")
    assert read(tmp_path / "export") == config


def test_a_composite_config_is_that_of_the_base(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(zoo.checkpoint("llava"), base)
    config = read(base)
    text = config["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    config["torch_dtype"] = text["torch_dtype"] = config.pop("dtype")
    text.pop("dtype", None)
    (base / "config.json").write_text(json.dumps({**config, "transformers_version": "4.36.0"}))
    KbitPreparedModel(load(base)).export(tmp_path / "export")
    found, vision = read(tmp_path / "export"), config["vision_config"]
    assert found.pop("vision_config") == {**vision, "torch_dtype": config["torch_dtype"]}
    assert found == {**{name: config[name] for name in found}, "transformers_version": "4.36.0"}


@pytest.mark.parametrize("is_other", [False, True])
def test_old_and_new_fields_are_written_where_no_file_is_the_bases(
    is_other: bool, figures: Clients, tmp_path: Path
) -> None:
    clients = figures("clients")
    for name in ("llama", "qwen3_moe", "gemma3_text", "gpt_neox", "phi3"):
        model = clients.make_base(name, tmp_path / name)
        if is_other:  # another model lies where this one was loaded from
            model = load(tmp_path / name)
            other = {**read(tmp_path / name), "rope_theta": 7.0, "rotary_emb_base": 7.0}
            (tmp_path / name / "config.json").write_text(json.dumps(other))
        KbitPreparedModel(model).export(tmp_path / "export" / name)
        found, own = read(tmp_path / "export" / name), clients.config_of(name)
        assert "rope_parameters" in found
        assert "num_local_experts" in found or name != "qwen3_moe"
        for field in {
            "rope_theta",
            "rope_local_base_freq",
            "rotary_emb_base",
            "rotary_pct",
            "num_experts",
            "torch_dtype",
        }:
            assert found.get(field) == own.get(field), (name, field)
        if own.get("rope_scaling"):
            assert found["rope_scaling"].items() >= own["rope_scaling"].items()
        again = type(model).from_pretrained(tmp_path / "export" / name).config
        assert again.rope_parameters == model.config.rope_parameters


def test_layers_that_stay_plain_are_named_as_other_versions_name_them(figures: Clients, tmp_path: Path) -> None:
    expected = {
        "gpt_neox": {"lm_head", "embed_out"},
        "mixtral": {"model.layers.0.mlp.experts", "model.layers.0.block_sparse_moe.gate"},
    }
    for name, names in expected.items():
        figures("clients").make_base(name, tmp_path / name)
        model = load(tmp_path / name, quantization_config=NF4, device_map={"": "cpu"})
        adapter = get_peft_model(model, LoraConfig(**LORA))
        export(adapter, tmp_path / "quantized" / name, base=model, merge_as="quantized")
        settings = read(tmp_path / "quantized" / name)["quantization_config"]
        assert names <= set(settings["llm_int8_skip_modules"])
