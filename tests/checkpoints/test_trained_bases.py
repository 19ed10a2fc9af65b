"""Merging an adapter whose run changed the base before it trained: a new head, or a vocabulary of another size."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from kbitwrap import ConfigError, KbitPreparedModel, ManifestMismatchError, doctor, merge_checkpoint
from support import zoo
from support.files import tensors_of
from support.merging import assert_same_model
from support.thorough import each_once, few
from support.training import step

NF4: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
NUM_ROWS = zoo.VOCAB_SIZE + 4


def run(name: str, model: Any, config: peft.LoraConfig, folder: Path, **saving: Any) -> None:
    """Train an adapter for one step, save it with a manifest beside it, and export the merged model."""
    with KbitPreparedModel(model, **zoo.fields(name)) as prepared:
        torch.manual_seed(0)
        adapted = get_peft_model(model, config)
        prepared.manifest().save(folder / "kbitwrap.json")
        step(name, adapted)
        adapted.save_pretrained(folder / "adapter", **saving)
        prepared.export(folder / "live", merge_adapters=True, model=adapted)


def merged(name: str, folder: Path, out: str, **options: Any) -> Path:
    given = options or {"quantization_config": NF4, "dtype": "bfloat16"}
    merge_checkpoint(zoo.checkpoint(name), folder / "adapter", folder / out, **given)
    return folder / out


pytestmark = [
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_reward_adapter_over_a_causal_base_is_merged_by_its_task(num_labels: int, tmp_path: Path) -> None:
    quantization = transformers.BitsAndBytesConfig(**NF4, llm_int8_skip_modules=["score"])
    model = transformers.LlamaForSequenceClassification.from_pretrained(
        zoo.checkpoint("llama"),
        num_labels=num_labels,
        quantization_config=quantization,
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
    )
    config = zoo.lora_config("llama", task_type="SEQ_CLS")
    with KbitPreparedModel(model) as prepared:
        adapted = get_peft_model(model, config)
        prepared.manifest().save(tmp_path / "kbitwrap.json")
        batch = zoo.inputs("llama", model)
        batch["labels"] = torch.ones(len(batch["input_ids"]), dtype=torch.bfloat16 if num_labels == 1 else torch.long)
        adapted(**batch).loss.backward()
        torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.01).step()
        adapted.save_pretrained(tmp_path / "adapter")
        prepared.export(tmp_path / "live", merge_adapters=True, model=adapted)
    assert tensors_of(tmp_path / "live")["score.weight"].shape == (num_labels, 64)
    assert_same_model(merged("llama", tmp_path, "told"), tmp_path / "live")
    assert_same_model(merged("llama", tmp_path, "recorded", manifest=tmp_path / "kbitwrap.json"), tmp_path / "live")


def test_a_head_that_the_adapter_does_not_hold_is_named(tmp_path: Path) -> None:
    model = zoo.load("llama")
    adapted = get_peft_model(model, zoo.lora_config("llama"))
    adapted.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(path.read_text().replace('"task_type": null', '"task_type": "SEQ_CLS"'))
    with pytest.raises(ConfigError, match=r"lacks weights that the adapter in .* does not hold: score\.weight"):
        merged("llama", tmp_path, "out")


@pytest.mark.parametrize("kind", ["Roberta", "Electra"])
def test_a_head_of_several_layers_that_the_adapter_holds_is_merged(kind: str, tmp_path: Path) -> None:
    base_class = getattr(transformers, f"{kind}ForMaskedLM")
    config = base_class.config_class(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    base_class(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    loading = getattr(transformers, f"{kind}ForSequenceClassification")
    model = loading.from_pretrained(tmp_path / "base", num_labels=3)
    adapted = get_peft_model(model, peft.LoraConfig(r=4, target_modules=["query"], task_type="SEQ_CLS"))
    adapted.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", quantization_config=False)
    found = tensors_of(tmp_path / "merged")
    for name, copy in adapted.classifier.modules_to_save["default"].named_parameters():
        assert torch.equal(found[f"classifier.{name}"], copy.data)


def resized(name: str) -> Any:
    model = zoo.load(name)
    torch.manual_seed(1)
    model.resize_token_embeddings(NUM_ROWS)
    return model


ROWS = [*range(zoo.VOCAB_SIZE - 1, NUM_ROWS)]
CASES: dict[str, dict[str, Any]] = {
    "copies": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "rows": {"trainable_token_indices": {"embed_tokens": ROWS, "lm_head": ROWS}},
    "LoRA on both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "neither": {},
}


@pytest.mark.parametrize(("case", "name"), each_once([*CASES], ["llama", "gemma2"]))
def test_a_resized_base_is_merged_as_the_live_model_is(name: str, case: str, tmp_path: Path) -> None:
    run(name, resized(name), zoo.lora_config(name, **CASES[case]), tmp_path, save_embedding_layers=case != "rows")
    live = tensors_of(tmp_path / "live")
    assert live["model.embed_tokens.weight"].shape[0] == NUM_ROWS
    if case != "rows":  # no size is in such an adapter
        assert_same_model(merged(name, tmp_path, "told"), tmp_path / "live")
    found = merged(name, tmp_path, "recorded", manifest=tmp_path / "kbitwrap.json")
    assert_same_model(found, tmp_path / "live")


@pytest.mark.parametrize(
    "fields",
    few(
        [
            {},
            {"trainable_token_indices": {"embed_tokens": ROWS[:-1], "lm_head": ROWS}},
            {"modules_to_save": ["lm_head"]},
        ],
        [{"trainable_token_indices": {"embed_tokens": ROWS[:-1], "lm_head": ROWS}}],
    ),
    ids=["none", "a part", "the head's alone"],
)
def test_new_rows_that_the_adapter_does_not_hold_are_asked_for_and_taken_from_a_resized_base(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    model = resized("llama")
    base = zoo.load("llama", None)
    torch.manual_seed(1)
    base.resize_token_embeddings(NUM_ROWS)
    base.save_pretrained(tmp_path / "base")
    run("llama", model, zoo.lora_config("llama", **fields), tmp_path, save_embedding_layers=False)
    recorded = {"manifest": tmp_path / "kbitwrap.json"}
    with pytest.raises(ConfigError, match=r"embed_tokens.weight had 132 rows .* model\.resize_token_embeddings\(132\)"):
        merged("llama", tmp_path, "none", **recorded)
    assert not (tmp_path / "none").exists()
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", **recorded)
    assert_same_model(tmp_path / "merged", tmp_path / "live")


def test_a_resized_base_is_compared_with_the_manifest_but_for_the_rows_that_it_lacks(tmp_path: Path) -> None:
    run("llama", resized("llama"), zoo.lora_config("llama", **CASES["rows"]), tmp_path, save_embedding_layers=False)
    adapter, base = tmp_path / "adapter", zoo.checkpoint("llama")
    shutil.copy(tmp_path / "kbitwrap.json", adapter)
    report = doctor(adapter, base=base)
    outcomes = {examined.what: examined.outcome for examined in report.looked_at}
    assert (report.findings, outcomes["base"]) == ((), "fine")
    other = shutil.copytree(zoo.checkpoint("llama"), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ManifestMismatchError, match=r"layers\.0\.mlp\.up_proj"):
        merge_checkpoint(other, adapter, tmp_path / "none")
    whats = [finding.what for finding in doctor(adapter, base=other).findings]
    assert "the base is not the one in the manifest, or it drifted" in whats


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit:UserWarning")
def test_a_merge_into_the_4_bit_weights_of_a_resized_base_is_measured(tmp_path: Path) -> None:
    model = resized("llama")
    with KbitPreparedModel(model) as prepared:
        adapted = get_peft_model(model, zoo.lora_config("llama", **CASES["rows"], init_lora_weights=False))
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        prepared.manifest().save(tmp_path / "adapter" / "kbitwrap.json")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    report = doctor(tmp_path / "merged", base=zoo.checkpoint("llama"), adapter=tmp_path / "adapter")
    (evidence,) = [f.evidence for f in report.findings if f.what == "an adapter was merged into 4-bit weights"]
    assert "of the delta survived" in evidence
