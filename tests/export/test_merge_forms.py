"""The forms of a merged export: partly quantized, and quantized as the base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn

from kbitwrap import ConfigError, ExportError, KbitPreparedModel, merge_checkpoint
from support import zoo
from support.files import read, tensors_of
from support.merging import assert_same_model, base_weight, export, layers_of, load, lora_weight
from support.thorough import each_once, every_other

QUANTS = ("nf4", "nf4-double", "fp4", "int8")
ATTENTION = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"], "mixtral": ["q_proj", "v_proj"], "t5": ["q", "v"]}
ENGINES = {"q_proj": ("q_proj", "k_proj", "v_proj"), "q": ("q", "k", "v")}


def adapted(name: str, quant: str, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and an adapter on it with a delta of a few hundredths of the weights."""
    model = zoo.load(name, quant)
    settings.setdefault("target_modules", ATTENTION.get(name, zoo.ARCHITECTURES[name].targets))
    adapter = get_peft_model(model, peft.LoraConfig(r=4, **settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for fqn, parameter in adapter.named_parameters():
            if "lora_B" in fqn:
                parameter += 0.005 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    return model, adapter


@pytest.mark.parametrize(("name", "quant"), each_once([*ATTENTION], QUANTS))
def test_a_quantized_merge_changes_nothing_but_codes_of_adapted_layers(name: str, quant: str, tmp_path: Path) -> None:
    model, adapter = adapted(name, quant)
    touched = {f"{fqn}.weight" for fqn in layers_of(adapter)}
    with KbitPreparedModel(model, **zoo.fields(name)) as prepared:
        prepared.export(tmp_path / "base", model=adapter)
        report = prepared.export(tmp_path / "merged", merge_adapters=True, merge_as="quantized", model=adapter)

    base, merged = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "merged")
    different = {fqn for fqn in base if not torch.equal(base[fqn], merged[fqn])}
    assert base.keys() == merged.keys()
    assert different == touched == report.tensors.keys()
    assert report.num_bytes == sum(tensor.nbytes for tensor in base.values())
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("base", "merged")]
    for config in configs:
        config["quantization_config"].pop("llm_int8_skip_modules")
    assert configs[0] == configs[1]


@pytest.mark.parametrize("quant", every_other(QUANTS))
def test_a_quantized_merge_loads_as_its_base_does_and_keeps_the_delta(quant: str, tmp_path: Path) -> None:
    model, adapter = adapted("llama", quant)
    report = export(adapter, tmp_path / "merged", base=model, merge_as="quantized")
    loaded = load("llama", tmp_path / "merged")
    delta = along = off = 0.0
    for fqn, layer in layers_of(adapter).items():
        base, exact = base_weight(layer.get_base_layer()), lora_weight(layer)
        found = base_weight(loaded.get_submodule(fqn))
        delta += float((exact - base).square().sum())
        along += float(((found - base) * (exact - base)).sum())
        off += float((found - exact).square().sum())
    assert (report.kept, report.error) == pytest.approx((along / delta, (off / delta) ** 0.5), rel=0.02)
    assert 0.8 < report.kept < 1.2
    with torch.no_grad():
        assert loaded(**zoo.inputs("llama", loaded)).logits.isfinite().all()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4")
    for folder, options in {"first": {}, "again": {"seed": 0}, "other": {"seed": 1}}.items():
        export(adapter, tmp_path / folder, base=model, merge_as="quantized", **options)
    torch.set_num_threads(4)
    try:
        export(adapter, tmp_path / "threads", base=model, merge_as="quantized")
    finally:
        torch.set_num_threads(1)
    assert read(tmp_path / "first") == read(tmp_path / "again") == read(tmp_path / "threads")
    assert read(tmp_path / "first") != read(tmp_path / "other")


@pytest.mark.parametrize("merge_as", ["mixed", "quantized"])
def test_a_saved_adapter_gives_the_bytes_of_the_live_export(merge_as: str, tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4")
    with KbitPreparedModel(model, **zoo.fields("llama")) as prepared:
        adapter.save_pretrained(tmp_path / "adapter")
        prepared.manifest().save(tmp_path / "adapter" / "kbitwrap.json")
        live = prepared.export(tmp_path / "live", merge_adapters=True, merge_as=merge_as, model=adapter)
    report = merge_checkpoint(zoo.checkpoint("llama"), tmp_path / "adapter", tmp_path / "merged", merge_as=merge_as)
    assert_same_model(tmp_path / "merged", tmp_path / "live")
    assert report.merged == live.merged
    for fqn, tensor in live.tensors.items():
        assert report.tensors[fqn] == tensor
    assert (report.kept, report.error) == pytest.approx((live.kept or report.kept, live.error or report.error))


def dequantized(layer: Any) -> torch.Tensor:
    """The values that a layer of bitsandbytes computes with."""
    if isinstance(layer, bitsandbytes.nn.Linear4bit):
        return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB  # which a first forward moves
    return bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, scales)


@pytest.mark.usefixtures("not_repacking")  # layers that ran are dequantized as they were loaded
@pytest.mark.parametrize(("name", "quant"), each_once([*ATTENTION], QUANTS))
def test_a_mixed_merge_keeps_the_bytes_of_untouched_layers_and_is_half_elsewhere(
    name: str, quant: str, tmp_path: Path
) -> None:
    model, adapter = adapted(name, quant)
    touched = set(layers_of(adapter))
    for fqn in [*touched]:  # engines compute these as one layer
        parent, _, layer = fqn.rpartition(".")
        touched |= {f"{parent}.{one}" for one in ENGINES.get(layer, ())}
    with KbitPreparedModel(model, **zoo.fields(name)) as prepared:
        prepared.export(tmp_path / "base", model=adapter)
        prepared.export(tmp_path / "half", merge_adapters=True, model=adapter)
        prepared.export(tmp_path / "mixed", merge_adapters=True, merge_as="mixed", model=adapter)

    base, half, mixed = (tensors_of(tmp_path / folder) for folder in ("base", "half", "mixed"))
    for fqn, tensor in mixed.items():
        expected = half if any(fqn.startswith(f"{layer}.") for layer in touched) else base
        assert torch.equal(tensor, expected[fqn]), fqn
    skipped = json.loads((tmp_path / "mixed/config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert touched <= set(skipped)

    loaded = load(name, tmp_path / "mixed").eval()
    for fqn, module in loaded.named_modules():
        if fqn in touched:
            assert module.weight.dtype == torch.bfloat16
    outputs = []
    for plain in (loaded, load(name, tmp_path / "half").eval().to(loaded.device)):
        with torch.no_grad():
            outputs.append(plain(**zoo.inputs(name, plain)).logits.cpu())
    for fqn, module in loaded.named_modules():
        if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            plain = half[f"{fqn}.weight"]
            weight = dequantized(module).to(plain)
            assert torch.equal(weight, plain.T if name == "gpt2" else plain), fqn  # which has Conv1D's layout
    if quant == "int8" and name == "mixtral":
        return  # its layers round their inputs to 8 bits, by which its router may choose another expert

    # A product may be added in another order, by where its factors lie; layers in 8 bits round their inputs too.
    found, expected = outputs
    off = (found - expected).norm() / expected.norm()
    assert off < (0.05 if quant == "int8" else 2**-8)


def test_layers_that_engines_fuse_have_one_format(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4", target_modules=["k_proj"])
    export(adapter, tmp_path / "mixed", base=model, merge_as="mixed")
    dtypes = {fqn: tensor.dtype for fqn, tensor in tensors_of(tmp_path / "mixed").items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        assert dtypes[f"model.layers.0.self_attn.{name}.weight"] == torch.bfloat16
    assert dtypes["model.layers.0.self_attn.o_proj.weight"] == torch.uint8
    load("llama", tmp_path / "mixed")


@pytest.mark.parametrize(("name", "inner"), [("llama", "LlamaModel"), ("bert", "BertModel"), ("gpt2", "GPT2Model")])
def test_the_model_inside_a_mixed_merge_is_loaded_as_it_was_written(name: str, inner: str, tmp_path: Path) -> None:
    model, adapter = adapted(name, "nf4")
    export(adapter, tmp_path / "mixed", base=model, merge_as="mixed")
    loaded = getattr(transformers, inner).from_pretrained(tmp_path / "mixed")
    prefix = f"{model.base_model_prefix}."
    for fqn in layers_of(adapter):
        assert not isinstance(loaded.get_submodule(fqn.removeprefix(prefix)), bitsandbytes.nn.Linear4bit)


def test_a_mixed_merge_names_the_layers_that_engines_fuse_where_all_of_one_are_half(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4", target_modules=["gate_proj"])
    export(adapter, tmp_path / "mixed", base=model, merge_as="mixed")
    config = json.loads((tmp_path / "mixed/config.json").read_text())
    skipped = config["quantization_config"]["llm_int8_skip_modules"]
    assert "model.layers.0.mlp.gate_up_proj" in skipped
    assert "model.layers.0.self_attn.qkv_proj" not in skipped  # which stay quantized


def test_a_mixed_merge_keeps_the_layers_whose_adapters_are_not_active(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4", target_modules=["q_proj"])
    adapter.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    adapter.set_adapter("default")
    export(adapter, tmp_path / "mixed", base=model, merge_as="mixed")
    tensors = tensors_of(tmp_path / "mixed")
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert tensors["model.layers.0.self_attn.o_proj.weight"].dtype == torch.uint8


def test_other_forms_of_a_model_that_is_not_quantized_are_refused(tmp_path: Path) -> None:
    adapter = get_peft_model(zoo.load("llama", None), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with pytest.raises(ExportError, match="the model is not quantized; merge it as 'half'"):
        export(adapter, tmp_path / "merged", merge_as="mixed")
    base = zoo.checkpoint("llama")
    with pytest.raises(ExportError, match="the model is not quantized; merge it as 'half'"):
        merge_checkpoint(base, None, tmp_path / "merged", merge_as="quantized", quantization_config=False)
    assert not (tmp_path / "merged").exists()


def test_files_with_other_names_than_the_modules_are_measured_too(tmp_path: Path) -> None:
    zoo.load("llava", "nf4").save_pretrained(tmp_path / "base")
    _, adapter = adapted("llava", "nf4")
    adapter.save_pretrained(tmp_path / "adapter")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", merge_as="quantized", check=True)


def test_a_mixed_merge_without_a_gain_says_both_sizes(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4", target_modules="all-linear")
    with pytest.warns(UserWarning, match="'mixed' is the same as 'half'; merge_as='quantized' keeps the size"):
        report = export(adapter, tmp_path / "mixed", base=model, merge_as="mixed")
    assert "is the same as 'half'" in report.notes[0]
    assert export(adapter, tmp_path / "half", base=model).notes == ()
    assert read(tmp_path / "mixed") == read(tmp_path / "half")


def test_a_delta_beyond_the_range_of_the_codes_is_refused(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4")
    with torch.no_grad():
        for fqn, parameter in adapter.named_parameters():
            if "layers.1.self_attn.v_proj.lora_B" in fqn:
                parameter *= 100
    with pytest.raises(
        ExportError,
        match=r"layers\.1\.self_attn\.v_proj\.weight: \d.* beyond the range.*'half', or as 'mixed'",
    ):
        export(adapter, tmp_path / "merged", base=model, merge_as="quantized")
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("options", [{"merge_as": "int4"}, {"merge_as": "quantized", "seed": -1}, {"seed": 1.5}])
def test_a_form_that_does_not_exist_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"merge_as: expected one of 'half'|seed: expected an integer"):
        export(nn.Linear(2, 2), tmp_path / "merged", **options)


def test_a_form_without_a_merge_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give merge_adapters=True"):
        KbitPreparedModel(nn.Linear(2, 2)).export(tmp_path / "base", merge_as="quantized")


def test_a_trained_head_is_whole_in_every_form(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4", modules_to_save=["lm_head"])
    with torch.no_grad():
        adapter.get_output_embeddings().modules_to_save["default"].weight += 0.5
    tensors = {}
    for merge_as in ("half", "mixed", "quantized"):
        export(adapter, tmp_path / merge_as, base=model, merge_as=merge_as)
        tensors[merge_as] = tensors_of(tmp_path / merge_as)["lm_head.weight"]
        load("llama", tmp_path / merge_as)
    assert torch.equal(tensors["half"], tensors["mixed"])
    assert torch.equal(tensors["half"], tensors["quantized"])


def test_the_dequantized_base_alone_is_what_a_merge_without_a_delta_is(tmp_path: Path) -> None:
    model, adapter = adapted("llama", "nf4")
    settings = model.config.quantization_config
    with torch.no_grad():
        for fqn, parameter in adapter.named_parameters():
            if "lora_B" in fqn:
                parameter.zero_()
    export(adapter, tmp_path / "live", base=model)
    report = merge_checkpoint(
        zoo.checkpoint("llama"), None, tmp_path / "base", quantization_config=settings, dtype="bfloat16"
    )
    assert_same_model(tmp_path / "base", tmp_path / "live")
    assert (report.merged, report.kept) == ((), None)
    card = (tmp_path / "base" / "README.md").read_text()
    assert ", dequantized\n" in card
    assert "were in nf4 in training" in card
    assert "of what the adapter adds" not in card


def test_a_layer_that_computes_other_values_than_its_codes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A stand-in for a kernel of bitsandbytes that only CPUs with AVX512 have: where a row is no multiple of a block, it
    # takes the scales of other blocks.
    dequantize = bitsandbytes.functional.dequantize_4bit
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", lambda *given: dequantize(*given).roll(1))
    model = nn.Sequential(bitsandbytes.nn.Linear4bit(96, 64, bias=False, quant_type="nf4")).to(torch.bfloat16).to("cpu")
    model.is_loaded_in_4bit = True
    adapter = get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"]))
    with pytest.raises(ExportError, match="computes other values on cpu than the codes"):
        export(adapter, tmp_path / "merged", merge_as="quantized")
