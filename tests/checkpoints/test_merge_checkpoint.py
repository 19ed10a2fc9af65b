"""``merge_checkpoint``: a saved adapter merged into the base it was trained on, as a live export merges it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kbitwrap import (
    ConfigError,
    ExportError,
    KbitPreparedModel,
    Manifest,
    ManifestMismatchError,
    QuantKind,
    doctor,
    merge_checkpoint,
)
from kbitwrap.export.export import save_model
from support import zoo
from support.files import read, tensors_of
from support.merging import assert_rounded_once, assert_same_model, jitter, layers_of, lora_weight
from support.thorough import few
from support.training import adapt, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:LlamaForCausalLM has neither a quantization attribute:UserWarning"),
]

SMALL = 100_000


class Run(NamedTuple):
    """What a training left on the disk."""

    adapter: Path
    manifest: Path
    merged: Path  # what the live export wrote
    quantization: Any


def train(name: str, quant: str | None, folder: Path, *, shard: int | str = "5GB", **options: Any) -> Run:
    """Train an adapter for one step, save it, and export the merged model."""
    model = zoo.load(name, quant)
    run = Run(folder / "adapter", folder / "kbitwrap.json", folder / "live", None)
    with KbitPreparedModel(model, **zoo.fields(name)) as prepared:
        peft_model = adapt(name, model, **options)
        step(name, peft_model)
        prepared.manifest().save(run.manifest)
        peft_model.save_pretrained(run.adapter)
        prepared.export(run.merged, merge_adapters=True, model=peft_model, max_shard_size=shard)
    row = zoo.ARCHITECTURES[name]
    return run._replace(quantization=quant and zoo._quantization_config(row, quant, torch.bfloat16))


LIVE = [
    ("llama", "nf4", SMALL),
    ("gemma2", "nf4", "5GB"),  # a tied head
    ("mixtral", "nf4", "5GB"),  # stacks of experts
    ("gpt2", "nf4-double", "5GB"),  # weights that lie transposed
    ("qwen3", "int8", SMALL),
    ("opt", "int8", "5GB"),
    ("t5", "nf4", "5GB"),  # kept in float32 in part
    ("bart", "nf4", "5GB"),
    ("bert", "int8", "5GB"),
    ("vit", "nf4", "5GB"),
    ("whisper", "nf4", "5GB"),
    ("mamba", "fp4", "5GB"),
    ("llama", None, "5GB"),
]


@pytest.mark.parametrize(("name", "quant", "shard"), few(LIVE, [*LIVE[2:5:2], LIVE[3], LIVE[-1]]))
def test_it_is_the_live_export_bit_for_bit(name: str, quant: str | None, shard: int | str, tmp_path: Path) -> None:
    run = train(name, quant, tmp_path, shard=shard)
    drawn = torch.get_rng_state()
    report = merge_checkpoint(
        zoo.checkpoint(name),
        run.adapter,
        tmp_path / "merged",
        quantization_config=run.quantization or False,
        dtype="bfloat16",
        max_shard_size=shard,
    )
    assert_same_model(tmp_path / "merged", run.merged)
    assert report.merged
    assert report.num_tensors == len(tensors_of(run.merged))
    assert set(report.files) == {*read(tmp_path / "merged")}
    assert torch.equal(torch.get_rng_state(), drawn)


UNUSUAL = [
    ("InternLM3Config", "LlamaForCausalLM"),  # a class of another kind of model
    ("HunYuanMoEV1Config", "HunYuanMoEV1ForCausalLM"),  # which builds layers in float32
]
UNUSUAL = [one for one in UNUSUAL if hasattr(transformers, one[0])]  # an older transformers has not all


@pytest.mark.parametrize(("config_name", "class_name"), UNUSUAL)
def test_a_base_that_is_built_in_an_unusual_way_is_loaded_as_the_run_had_it(
    config_name: str, class_name: str, tmp_path: Path
) -> None:
    config_class = getattr(transformers, config_name)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    config = config_class(num_attention_heads=4, num_key_value_heads=2, **sizes)
    if class_name != "LlamaForCausalLM":
        config.num_experts, config.moe_topk = 4, 2
    getattr(transformers, class_name)(config).bfloat16().save_pretrained(tmp_path / "base")
    options = {"quantization_config": zoo._quantization_config(zoo.ARCHITECTURES["llama"], "nf4", torch.bfloat16)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map={"": "cpu"}, **options)
    with KbitPreparedModel(model) as prepared:
        peft_model = adapt("llama", model)
        peft_model.save_pretrained(tmp_path / "adapter")
        prepared.manifest().save(tmp_path / "adapter" / "kbitwrap.json")
        prepared.export(tmp_path / "live", merge_adapters=True, model=peft_model)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", device="cpu")
    assert_same_model(tmp_path / "merged", tmp_path / "live")


@pytest.mark.parametrize("beside", [True, False])
def test_the_manifest_says_how_the_base_was_quantized_and_is_compared_with_it(beside: bool, tmp_path: Path) -> None:
    run = train("llama", "nf4-double", tmp_path, modules_to_save=True)
    if beside:
        shutil.copy(run.manifest, run.adapter / "kbitwrap.json")
    merge_checkpoint(
        zoo.checkpoint("llama"), run.adapter, tmp_path / "merged", manifest=None if beside else run.manifest
    )
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "were in nf4-double in training, which the manifest says" in card
    assert_same_model(tmp_path / "merged", run.merged)
    other = tmp_path / "other"
    shutil.copytree(zoo.checkpoint("llama"), other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ManifestMismatchError, match=r"layers\.0\.mlp\.up_proj"):
        merge_checkpoint(other, run.adapter, tmp_path / "none", manifest=Manifest.load(run.manifest))
    assert not (tmp_path / "none").exists()


def test_the_manifest_says_which_layers_were_left_unquantized(tmp_path: Path) -> None:
    skipped = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["lm_head", "q_proj"])
    model = zoo.load("llama", "nf4", quantization_config=skipped)
    with KbitPreparedModel(model) as prepared:
        peft_model = adapt("llama", model)
        peft_model.save_pretrained(tmp_path / "adapter")
        prepared.manifest().save(tmp_path / "adapter" / "kbitwrap.json")
        prepared.export(tmp_path / "live", merge_adapters=True)
    merge_checkpoint(zoo.checkpoint("llama"), tmp_path / "adapter", tmp_path / "merged")
    assert_same_model(tmp_path / "merged", tmp_path / "live")


def test_a_base_that_is_saved_quantized_keeps_its_own_quantization(tmp_path: Path) -> None:
    run = train("llama", "nf4", tmp_path)
    zoo.load("llama", "nf4").save_pretrained(tmp_path / "quantized")
    for number, given in enumerate((None, run.quantization)):
        merge_checkpoint(tmp_path / "quantized", run.adapter, tmp_path / str(number), quantization_config=given)
        assert_same_model(tmp_path / str(number), run.merged)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float16)
    if loaded.dtype == torch.bfloat16:  # older versions of transformers cast what is not quantized
        report = merge_checkpoint(tmp_path / "quantized", run.adapter, tmp_path / "float16", dtype="float16")
        assert "the base's files are bfloat16, which loading keeps" in " ".join(report.notes)
        assert_same_model(tmp_path / "float16", run.merged)
    for given, message in (
        (transformers.BitsAndBytesConfig(load_in_8bit=True), r"load_in_8bit: False, given: True"),
        ({"bnb_4bit_use_double_quant": True}, r"\(bnb_4bit_use_double_quant: False, given: True\): leave that out"),
        (False, r"not the one given \(none\)"),
        ("nf4", r"quantization_config: expected a config of transformers .*, found 'nf4'"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge_checkpoint(tmp_path / "quantized", run.adapter, tmp_path / "merged", quantization_config=given)
    assert not (tmp_path / "merged").exists()


def test_what_is_not_known_is_asked_for(tmp_path: Path) -> None:
    run = train("llama", "nf4", tmp_path)
    with pytest.raises(ConfigError, match=r"not known how the base .* was quantized in training"):
        merge_checkpoint(zoo.checkpoint("llama"), run.adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    run = train("llama", "nf4", tmp_path)
    options: dict[str, Any] = {"quantization_config": run.quantization, "dtype": "bfloat16"}
    base, path = zoo.checkpoint("llama"), run.adapter / "adapter_model.safetensors"
    shutil.copytree(run.adapter, tmp_path / "kept")
    tensors = load_file(path)
    first = min(tensors)
    for change, message in (
        ({first: None}, f"lacks tensors of this base .{re.escape(first)}.: give the base that was trained on"),
        (
            {first.replace("layers.0", "layers.9"): tensors[first].clone()},
            r"has no place for .*layers\.9\..*: give the base that was trained on",
        ),
        ({first: tensors[first][:1].clone()}, "does not fit the base"),
    ):
        save_file({k: v for k, v in {**tensors, **change}.items() if v is not None}, path)
        with pytest.raises(ConfigError, match=message):
            merge_checkpoint(base, run.adapter, tmp_path / "merged", **options)
    with pytest.raises(ConfigError, match=r"no adapter_config\.json"):
        merge_checkpoint(base, tmp_path, tmp_path / "merged", **options)
    (run.adapter / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adapter_config\.json: cannot be read as JSON"):
        merge_checkpoint(base, run.adapter, tmp_path / "merged", **options)
    path.unlink()
    with pytest.raises(ConfigError, match=r"no adapter_config\.json with adapter_model\.safetensors"):
        merge_checkpoint(base, run.adapter, tmp_path / "merged", **options)
    shutil.copytree(tmp_path / "kept", run.adapter, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="there is no model at"):
        merge_checkpoint(tmp_path / "nothing", run.adapter, tmp_path / "merged", **options)
    assert not (tmp_path / "merged").exists()


def test_a_destination_that_exists_is_said_before_anything_is_read(tmp_path: Path) -> None:
    run = train("llama", "nf4", tmp_path)
    options: dict[str, Any] = {"quantization_config": run.quantization, "dtype": "bfloat16"}
    with pytest.raises(ExportError, match="exists and is not empty"):
        merge_checkpoint(tmp_path / "not looked at", run.adapter, run.merged, **options)


@pytest.mark.parametrize("owner", ["base", "adapter"])
def test_the_tokenizer_and_a_card_are_beside_it(owner: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    run = train("llama", "nf4", tmp_path)
    base = tmp_path / "Tiny-Llama"
    shutil.copytree(zoo.checkpoint("llama"), base)
    for where, words in (("base", {"a": 0}), ("adapter", {"a": 0, "b": 1})):
        if where in ("base", owner):
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "a")))
            tokenizer.save_pretrained(base if where == "base" else run.adapter)
    (base / "preprocessor_config.json").write_text("{}")  # a processor's, whose tokenizer alone was saved
    config = json.loads((run.adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "someone/Tiny-Llama"
    (run.adapter / "adapter_config.json").write_text(json.dumps(config))
    merge_checkpoint(base, run.adapter, tmp_path / "out", quantization_config=run.quantization, dtype="bfloat16")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(found) == (2 if owner == "adapter" else 1)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    card = (tmp_path / "out" / "README.md").read_text()
    assert ModelCard(card).data.base_model == "someone/Tiny-Llama"
    assert "were in nf4 in training, which the caller said, and nothing recorded confirms." in card
    assert str(tmp_path) not in card
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16


def test_a_folder_is_no_base_model_of_a_card(tmp_path: Path) -> None:
    run = train("llama", "nf4", tmp_path)
    base = tmp_path / "my: model"
    shutil.copytree(zoo.checkpoint("llama"), base)
    for adapter in (run.adapter, None):
        merge_checkpoint(base, adapter, tmp_path / "out", quantization_config=run.quantization, overwrite=True)
        card = (tmp_path / "out" / "README.md").read_text()
        assert ModelCard(card).data.to_dict() == {"library_name": "transformers", "tags": ["merged"]}
        assert "# my: model, " in card or adapter is not None


def test_the_card_says_how_much_of_the_adapter_is_in_the_weights(tmp_path: Path) -> None:
    run = train("llama", "nf4", tmp_path, modules_to_save=True)
    given: dict[str, Any] = {"quantization_config": run.quantization, "dtype": "bfloat16"}
    merge_checkpoint(None, run.adapter, tmp_path / "out", check=True, **given)
    measured = doctor(tmp_path / "out", base=zoo.checkpoint("llama"), adapter=run.adapter, quant=run.quantization).merge
    assert measured is not None
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{measured.kept:.1%} of what the adapter adds is in these weights" in card
    assert f"off by {measured.error:.1%} of its length" in card


def test_a_check_refuses_files_that_are_no_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train("llama", "nf4", tmp_path)

    def save_wrongly(model: Any, writer: Any, *options: Any) -> None:
        save_model(model, writer, *options)
        path = writer.folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.1.self_attn.q_proj.weight"].neg_()
        save_file(tensors, path, {"format": "pt"})

    monkeypatch.setattr("kbitwrap.checkpoints.merge.save_model", save_wrongly)
    given: dict[str, Any] = {"quantization_config": run.quantization, "dtype": "bfloat16"}
    with pytest.raises(ExportError, match=r"not a merge: .* \(model\.layers\.1\.self_attn\.q_proj\.weight\)"):
        merge_checkpoint(None, run.adapter, tmp_path / "out", check=True, **given)
    assert not (tmp_path / "out").exists()
    merge_checkpoint(None, run.adapter, tmp_path / "out", **given)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize("quant", ["nf4", None])
def test_replicated_layers_are_merged_and_measured_apart(quant: str | None, tmp_path: Path) -> None:
    adapted = get_peft_model(zoo.load("llama", quant), zoo.lora_config("llama", layer_replication=[[0, 2], [1, 2]]))
    jitter(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    settings = False if quant is None else transformers.BitsAndBytesConfig(**QuantKind.NF4.settings)
    given: dict[str, Any] = {"quantization_config": settings, "dtype": "bfloat16"}
    merge_checkpoint(zoo.checkpoint("llama"), tmp_path / "adapter", tmp_path / "merged", check=True, **given)
    found = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        assert_rounded_once(found[f"{fqn}.weight"], lora_weight(layer))
    assert "model.layers.2.input_layernorm.weight" in found
