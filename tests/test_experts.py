"""Stacks of experts that bitsandbytes' own function quantized, which `from_pretrained` leaves in half."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import nn
from transformers import MixtralForCausalLM, PreTrainedModel

from kbitwrap import ExportError, KbitPreparedModel, Manifest, Precision, build_plan
from support import pages, zoo
from support.merging import assert_rounded_once
from support.snapshot import Snapshot
from support.thorough import few
from support.training import adapt, is_checkpointing, step

STACKS = ("gate_up_proj", "down_proj")


def load(*, quant: str | None = "nf4", nested: bool = False) -> PreTrainedModel:
    model = zoo.load("mixtral", quant=quant)
    for layer in model.model.layers:
        for name in STACKS:
            replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=nested)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs("mixtral", model)).logits


def values(experts: nn.Module, name: str) -> torch.Tensor:
    stored = experts.parametrizations[name]
    return dequantize_4bit(stored.original, stored[0].quant_state)


def read_again(folder: Path) -> PreTrainedModel:
    """The program by which docs/export.md reads such an export."""
    program = pages.program(pages.DOCS / "export.md", "replace_parameter_4bit_prequantized")
    names: dict[str, object] = {}
    exec(program.replace('"run/base"', repr(str(folder))), names)
    model = names["model"]
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.usefixtures("not_repacking")  # bitsandbytes saves no layer rightly that it has repacked
@pytest.mark.parametrize("precision", few(Precision, ["compute", "norms"]), ids=str)
def test_a_journey_with_quantized_experts(precision: Precision, tmp_path: Path) -> None:
    nested = precision is Precision.NORMS
    model = load(nested=nested)
    expected = logits(model)
    before = Snapshot(model)
    state = {fqn: tensor.clone() for fqn, tensor in model.state_dict().items()}

    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt("mixtral", model)
    prepared.adopt(peft_model)
    for seed in range(2):
        _, gradients = step("mixtral", peft_model, seed=seed)
        assert all(gradient.any() and gradient.isfinite().all() for gradient in gradients.values())
    with prepared.suspended(), peft_model.disable_adapter():
        assert torch.equal(logits(peft_model), expected)
    assert not prepared.verify()

    prepared.manifest().save(tmp_path / "kbitwrap.json")
    manifest = Manifest.load(tmp_path / "kbitwrap.json")
    with KbitPreparedModel.from_manifest(load(nested=nested), manifest) as resumed:
        assert resumed.config == prepared.config

    prepared.export(tmp_path / "base")
    read = read_again(tmp_path / "base")
    assert torch.equal(logits(read), expected)
    found = read.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in state.items())

    prepared.export(tmp_path / "merged", merge_adapters=True)
    merged, info = MixtralForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info.values())
    assert merged.dtype == torch.bfloat16
    for layer, quantized in zip(merged.model.layers, model.model.layers, strict=True):
        for name in STACKS:
            assert torch.equal(getattr(layer.mlp.experts, name), values(quantized.mlp.experts, name))

    prepared.restore()
    assert peft_model.unload() is model
    assert before.diff(Snapshot(model), moved=precision.upcasts_all) == []
    assert torch.equal(logits(model), expected)


def test_a_lora_on_quantized_experts_is_merged_into_half_ones(tmp_path: Path) -> None:
    model = load()
    prepared = KbitPreparedModel(model).prepare()
    names = [f"model.layers.{index}.mlp.experts.{name}" for index in range(2) for name in STACKS]
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    peft_model = peft.get_peft_model(model, config)  # PEFT 0.21 leaves its parametrizations on these when it runs
    report = prepared.export(tmp_path, merge_adapters=True)
    assert report.merged == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    merged = MixtralForCausalLM.from_pretrained(tmp_path)
    for index, layer in enumerate(merged.model.layers):
        outer = peft_model.base_model.model.model.layers[index].mlp.experts
        for wrapper in (outer, outer.base_layer):
            name = wrapper.parameter_name
            weight = values(outer.get_base_layer(), name).double()
            a = wrapper.lora_A["default"].weight.detach().double().view(len(weight), -1, weight.shape[2])
            b = wrapper.lora_B["default"].weight.detach().double().view(weight.shape[1], -1, len(weight))
            exact = weight + torch.einsum("ore,eri->eoi", b, a) * wrapper.scaling["default"]
            assert_rounded_once(getattr(layer.mlp.experts, name), exact)
    assert not prepared.verify()


def test_experts_with_a_parametrization_of_their_own_are_not_merged(tmp_path: Path) -> None:
    model = load()
    experts = model.model.layers[1].mlp.experts
    nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())
    with pytest.raises(ExportError, match=r"layers\.1\.mlp\.experts") as caught:
        KbitPreparedModel(model).export(tmp_path / "merged", merge_adapters=True)
    assert caught.value.fqn == "model.layers.1.mlp.experts"
    assert not (tmp_path / "merged").exists()


def test_a_model_of_which_only_the_experts_are_quantized_is_quantized() -> None:
    model = load(quant=None)
    with KbitPreparedModel(model) as prepared:
        assert prepared.plan.quantization == "bitsandbytes_4bit"
        assert is_checkpointing(model)


def test_a_plan_names_experts_that_are_not_quantized_in_a_model_that_is() -> None:
    def found(model: nn.Module) -> list[str]:
        return [warning for warning in build_plan(model).warnings if "experts are not quantized" in warning]

    model = zoo.load("mixtral")
    (warning,) = found(model)
    assert "not quantized, model.layers.0.mlp.experts.gate_up_proj the first" in warning
    assert "replace_parameter_4bit" in warning
    replace_parameter_4bit(model.model.layers[0].mlp.experts, "gate_up_proj")
    (warning,) = found(model)
    assert "not quantized, model.layers.0.mlp.experts.down_proj the first" in warning
    assert not found(load())
    assert not found(zoo.load("mixtral", quant=None))
    assert not found(zoo.load("llama"))
