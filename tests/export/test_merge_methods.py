"""A merged export of every method of PEFT, beside its formula in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from peft.helpers import DoraCaching
from torch import nn

import kbitwrap.export.merged as merged_module
from kbitwrap import ExportError, KbitPreparedModel
from support import training, zoo
from support.files import tensors_of
from support.merging import HALF_ULP, assert_rounded_once, base_weight, export, jitter, layers_of, load, lora_weight
from support.pairwise import pairwise
from support.snapshot import Snapshot
from support.thorough import each_once, every_other

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers as small as these by rows too, in a few blocks."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 3000)


@pytest.fixture
def whole_layers(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small layers whole, as they are outside of these tests."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 1 << 20)


# ----------------------------------------------------------------------------------------------------
# Every method.
# ----------------------------------------------------------------------------------------------------

TARGETS = ["q_proj", "down_proj"]


def dora_weight(layer: Any) -> torch.Tensor:
    """M (W + s B A) / norm of its rows (Liu et al. 2024)."""
    weight = lora_weight(layer)
    magnitude = layer.lora_magnitude_vector["default"].weight.detach().double()
    return magnitude.view(-1, 1) * weight / weight.norm(dim=1, keepdim=True)


def adalora_weight(layer: Any) -> torch.Tensor:
    """W + s B diag(E) A / rank (Zhang et al. 2023)."""
    a, b, e = (getattr(layer, f"lora_{part}")["default"].detach().double() for part in "ABE")
    rank = layer.ranknum["default"].double() + 1e-5
    return base_weight(layer.get_base_layer()) + b @ (a * e) * layer.scaling["default"] / rank


def ia3_weight(layer: Any) -> torch.Tensor:
    """Rows scaled by what scales the output; in a feed-forward layer columns, by what scales the input."""
    scale = layer.ia3_l["default"].detach().double()
    return base_weight(layer.get_base_layer()) * (scale.view(1, -1) if layer.is_feedforward else scale.view(-1, 1))


def hira_weight(layer: Any) -> torch.Tensor:
    """W times 1 + B A, element by element (Huang et al. 2025)."""
    a, b = layer.hira_A["default"].detach().double(), layer.hira_B["default"].detach().double()
    return base_weight(layer.get_base_layer()) * (1 + b @ a)


def road_weight(layer: Any) -> torch.Tensor:
    """Pairs of rows, rotated and scaled (Liao et al. 2024): of the first variant, one angle and scale for a pair."""
    weight = base_weight(layer.get_base_layer())
    theta, alpha = layer.road_theta["default"].detach().double(), layer.road_alpha["default"].detach().double()
    group = layer.group_size["default"]
    theta, alpha = (value.view(-1, 1, group // 2).expand(-1, 2, -1).reshape(-1, 1) for value in (theta, alpha))
    first, second = weight.view(-1, 2, group // 2, weight.shape[1]).unbind(1)
    turned = torch.stack([-second, first], 1).view_as(weight)
    return weight * alpha * theta.cos() + turned * alpha * theta.sin()


FORMULAS: dict[str, tuple[Callable[[], peft.PeftConfig], Callable[[Any], torch.Tensor]]] = {
    "lora": (lambda: peft.LoraConfig(target_modules=TARGETS), lora_weight),
    "rslora": (lambda: peft.LoraConfig(target_modules=TARGETS, use_rslora=True), lora_weight),
    # PEFT leaves what it quantizes again, whose values are float32
    "olora": (lambda: peft.LoraConfig(target_modules=TARGETS, init_lora_weights="olora"), lora_weight),
    "dora": (lambda: peft.LoraConfig(target_modules=TARGETS, use_dora=True), dora_weight),
    "adalora": (lambda: peft.AdaLoraConfig(target_modules=TARGETS, total_step=10), adalora_weight),
    "ia3": (lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]), ia3_weight),
    "hira": (lambda: peft.HiraConfig(target_modules=TARGETS), hira_weight),
    "road": (lambda: peft.RoadConfig(target_modules=TARGETS, group_size=16), road_weight),
}


BLOCKS = ["whole", "by rows"]


@pytest.mark.parametrize(("method", "quant", "blocks"), pairwise([*FORMULAS], ["nf4", "int8", None], BLOCKS))
def test_methods_with_a_formula(
    method: str, quant: str | None, blocks: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if blocks == "whole":
        request.getfixturevalue("whole_layers")
    config, formula = FORMULAS[method]
    base = zoo.load("llama", quant)
    adapted = get_peft_model(base, config())
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors, layers = tensors_of(tmp_path / "merged"), layers_of(adapted)
    assert len(layers) == 4
    assert {tensor.dtype for tensor in tensors.values()} == {BFLOAT16}
    for fqn, layer in layers.items():
        assert_rounded_once(tensors[f"{fqn}.weight"], formula(layer))


def float64_weight(layer: Any) -> torch.Tensor:
    """What a layer over a linear without a bias computes: its own forward in float64, over the exact base."""
    base = layer.get_base_layer()
    weight = base_weight(base)
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float64)
    linear.weight = nn.Parameter(weight)
    copied = copy.deepcopy(layer, {id(base): linear})
    copied.quantization_backend = None
    with torch.no_grad():
        return copied.double().eval()(torch.eye(weight.shape[1], dtype=torch.float64)).T


def config_of(name: str, targets: list[str], **fields: Any) -> peft.PeftConfig:
    extra = {
        "VBLoRAConfig": {"vector_length": 32, "num_vectors": 16},
        "OFTConfig": {"oft_block_size": 8},
        "BOFTConfig": {"boft_block_size": 8},
        "FourierFTConfig": {"n_frequency": 50},
        "C3AConfig": {"block_size": 16},
        "WaveFTConfig": {"n_frequency": 50},
    }
    config: peft.PeftConfig = getattr(peft, name)(target_modules=targets, **extra.get(name, {}), **fields)
    return config


# Those that dequantize by themselves, or add to the output of their base and read nothing of it.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # Shira's
@pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning")  # BOFT's, and the next
@pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor:UserWarning")
@pytest.mark.parametrize(
    ("method", "quant"),
    each_once(["BOFT", "FourierFT", "Gralora", "Miss", "OFT", "Shira", "VBLoRA", "Vera", "WaveFT"], ["nf4", "int8"]),
)
def test_methods_over_quantized_layers(method: str, quant: str, tmp_path: Path) -> None:
    adapted = get_peft_model(zoo.load("llama", quant), config_of(f"{method}Config", TARGETS))
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors, layers = tensors_of(tmp_path / "merged"), layers_of(adapted)
    assert len(layers) == 4
    for fqn, layer in layers.items():
        exact = float64_weight(layer)
        assert_rounded_once(tensors[f"{fqn}.weight"], exact)
        assert not torch.equal(exact, base_weight(layer.get_base_layer()))


# Those that read the weight of their base: adapted is the head, which is not quantized.
@pytest.mark.parametrize(
    "method", ["C3A", "Deft", "Delora", "HRA", "LoHa", "LoKr", "Road", "RandLora", "Peanut", "Psoft", "Supertuning"]
)
def test_methods_over_a_plain_layer_of_a_quantized_model(method: str, tmp_path: Path) -> None:
    adapted = get_peft_model(zoo.load("llama", "nf4", FLOAT32), config_of(f"{method}Config", ["lm_head"]))
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    (layer,) = layers_of(adapted).values()
    found, exact = tensors_of(tmp_path / "merged")["lm_head.weight"], float64_weight(layer)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found.double(), base_weight(layer.get_base_layer()), atol=1e-3)


VARIANTS: dict[str, dict[str, Any]] = {
    "patterns": {"rank_pattern": {"q_proj": 16, r".*\.1\..*\.down_proj": 2}, "alpha_pattern": {"v_proj": 64}},
    "replicated layers": {"layer_replication": [[0, 2], [1, 2]]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_lora_on_all_linear_layers(variant: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **VARIANTS[variant])
    adapted = get_peft_model(zoo.load("llama"), config)
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors, layers = tensors_of(tmp_path / "merged"), layers_of(adapted)
    assert len(layers) == (21 if "layer_replication" in VARIANTS[variant] else 14)
    for fqn, layer in layers.items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))
    load("llama", tmp_path / "merged")


def test_loha_over_int8(tmp_path: Path) -> None:
    """It does not know of quantization, and reads the shape of what is stored."""
    adapted = get_peft_model(zoo.load("llama", "int8"), peft.LoHaConfig(target_modules=TARGETS))
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        exact = base_weight(layer.get_base_layer()) + layer.get_delta_weight("default").detach().double()
        assert_rounded_once(tensors[f"{fqn}.weight"], exact)


@pytest.mark.usefixtures("not_repacking")  # PEFT reads the weights of layers that ran
def test_a_dora_that_keeps_its_norms(tmp_path: Path) -> None:
    adapted = get_peft_model(zoo.load("llama"), peft.LoraConfig(target_modules=TARGETS, use_dora=True))
    jitter(adapted)
    adapted.eval()
    with DoraCaching(), torch.no_grad():
        zoo.loss("llama", adapted, zoo.inputs("llama", adapted))
        export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        assert_rounded_once(tensors[f"{fqn}.weight"], dora_weight(layer))


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_a_dora_that_put_another_parameter_over_the_same_memory(quant: str, tmp_path: Path) -> None:
    model = zoo.load("llama", quant)
    model.save_pretrained(tmp_path / "original")
    names = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    prepared = KbitPreparedModel(model).prepare()
    weights = [model.get_submodule(name).weight for name in names]
    adapted = get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], use_dora=True))
    if quant == "nf4":  # of int8 the adapter's making does it
        training.step("llama", adapted)
    layers = layers_of(adapted)
    assert not any(layers[name].get_base_layer().weight is weight for name, weight in zip(names, weights, strict=True))
    prepared.manifest()
    prepared.export(tmp_path / "base")
    prepared.export(tmp_path / "merged", merge_adapters=True)
    tensors = tensors_of(tmp_path / "merged")
    for name in names:
        assert_rounded_once(tensors[f"{name}.weight"], dora_weight(layers[name]))
    assert (tmp_path / "base/model.safetensors").read_bytes() == (tmp_path / "original/model.safetensors").read_bytes()


def test_an_8_bit_layer_whose_scales_are_gone_is_refused(tmp_path: Path) -> None:
    adapted = get_peft_model(zoo.load("llama", "int8"), peft.LoraConfig(target_modules=["v_proj"], use_dora=True))
    training.step("llama", adapted)
    # On a CPU, PEFT's DoRA has put a weight without scales into the layer, and bitsandbytes takes them from there.
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'unsqueeze'"):
        training.step("llama", adapted)
    before = Snapshot(adapted)
    with pytest.raises(ExportError, match="the scales of its quantized weight are gone") as caught:
        export(adapted, tmp_path / "merged")
    assert caught.value.fqn == "model.layers.0.self_attn.v_proj"
    assert not (tmp_path / "merged").exists()
    assert before.diff(Snapshot(adapted)) == []


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # PEFT does not know RMS norms
def test_layer_norm_tuning(tmp_path: Path) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    adapted = get_peft_model(model, peft.LNTuningConfig(target_modules=["input_layernorm"]))
    jitter(adapted)
    report = prepared.export(tmp_path / "merged", merge_adapters=True)
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        assert fqn in report.merged
        assert torch.equal(tensors[f"{fqn}.weight"], layer.ln_tuning_layers["default"].weight.to(BFLOAT16))
        assert not torch.equal(tensors[f"{fqn}.weight"], layer.base_layer.weight)


@pytest.mark.parametrize(
    ("name", "targets"), [("whisper", ["conv1"]), ("vit", ["projection"]), ("convnext", ["pwconv1"])]
)
@pytest.mark.parametrize("use_dora", every_other([False, True]))
def test_convolutions(name: str, targets: list[str], use_dora: bool, tmp_path: Path) -> None:
    adapted = training.adapt(name, zoo.load(name), target_modules=targets, use_dora=use_dora)
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors, layers = tensors_of(tmp_path / "merged"), layers_of(adapted)
    assert layers
    for fqn, layer in layers.items():
        a, b = (getattr(layer, f"lora_{part}")["default"].weight.detach().double() for part in "AB")
        weight = base_weight(layer.get_base_layer())
        weight = weight + (b.flatten(1) @ a.flatten(1)).view_as(weight) * layer.scaling["default"]
        if use_dora:
            magnitude = layer.lora_magnitude_vector["default"].weight.detach().double().flatten()
            factors = magnitude / weight.flatten(1).norm(dim=1)
            weight = weight * factors.view(-1, *[1] * (weight.dim() - 1))
        found = tensors.get(f"{fqn}.weight", next(t for n, t in tensors.items() if n.endswith(f"{targets[0]}.weight")))
        assert_rounded_once(found, weight)


def test_trained_biases(tmp_path: Path) -> None:
    adapted = training.adapt("opt", zoo.load("opt"), lora_bias=True)
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        bias = layer.get_base_layer().bias.double() + layer.lora_B["default"].bias.double() * layer.scaling["default"]
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))
        assert_rounded_once(tensors[f"{fqn}.bias"], bias.detach())
        assert not torch.equal(tensors[f"{fqn}.bias"], layer.get_base_layer().bias)


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_adapter_that_left_a_rounded_residual_merges_to_within_two_units_of_the_largest_value(
    init: str, dtype: torch.dtype
) -> None:
    model = zoo.load("llama", None, dtype)
    before = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    targets = ["q_proj", "down_proj"]
    peft_model = get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=init))
    merged = dict(KbitPreparedModel(model, precision="none").prepare().merged_weights())
    for fqn, layer in layers_of(peft_model).items():
        exact, original = lora_weight(layer), before[f"{fqn}.weight"].double()
        assert_rounded_once(merged[f"{fqn}.weight"], exact)
        error = (exact - original).abs().max()
        unit = torch.exp2(torch.frexp(original.abs().max()).exponent.double() + HALF_ULP[dtype][0])
        assert unit / 8 < error <= 2 * unit  # what PEFT rounded
