"""``export(merge_adapters=True)``: a plain checkpoint that computes what the model does, rounded once.

The references are computed in float64 from the formulas of the methods' papers, or, for methods without a short one, by
running the layer's own forward in float64 on the identity.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import peft
import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel, get_peft_model
from peft.helpers import DoraCaching
from torch import nn
from transformers import PreTrainedModel

import kbitwrap.export.adapters as adapters_module
import kbitwrap.export.merge as merge_module
from kbitwrap import ExportError, ExportReport, KbitPreparedModel
from support import pages, training, zoo
from support.files import tensors_of
from support.memory import allocations, peak
from support.merging import HALF_ULP, assert_rounded_once, layers_of
from support.pairwise import pairwise
from support.snapshot import Snapshot
from support.thorough import few

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
ARCHITECTURES = list(zoo.ARCHITECTURES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers as small as these by rows too, in a few blocks."""
    monkeypatch.setattr(merge_module, "_BLOCK_BYTES", 3000)


@pytest.fixture
def whole_layers(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge small layers whole, as they are outside of these tests."""
    monkeypatch.setattr(merge_module, "_BLOCK_BYTES", 1 << 20)


def export(model: nn.Module, folder: Path, *, base: nn.Module | None = None, **options: Any) -> ExportReport:
    """Export what was made of a model that is not prepared."""
    wrapper = KbitPreparedModel(base or model, gradient_checkpointing=False)
    return wrapper.export(folder, merge_adapters=True, model=model, **options)


def load(name: str, folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load an exported checkpoint as a user does; nothing may be missing, nothing left over."""
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    options = {} if dtype is None else {"dtype": dtype}
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model


def jitter(model: nn.Module, scale: float = 0.02) -> None:
    """Make every trainable value another one, so that no adapter is at its initial nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += (scale * torch.randn(parameter.shape, generator=generator)).to(parameter.dtype)


def base_weight(layer: nn.Module) -> torch.Tensor:
    """The weight of a live base layer in float64, shape ``(out_features, in_features)``."""
    weight = layer.weight
    if weight.dtype == torch.int8:
        scales = weight.SCB if weight.SCB is not None else layer.state.SCB
        return weight.data.double() * scales.double().view(-1, 1) / 127
    if getattr(weight, "quant_state", None) is not None:
        return dequantize_4bit(weight.data, weight.quant_state).double()
    return weight.detach().double()


def is_quantized(module: nn.Module) -> bool:
    return hasattr(module, "source_cls")  # transformers' mark on the layers that it replaced


def lora_weight(layer: Any, adapters: tuple[str, ...] = ("default",)) -> torch.Tensor:
    """W + sum of s B A (Hu et al. 2021), in float64."""
    weight = base_weight(layer.get_base_layer())
    for adapter in adapters:
        a, b = layer.lora_A[adapter].weight.detach().double(), layer.lora_B[adapter].weight.detach().double()
        weight = weight + (b @ a) * layer.scaling[adapter]
    return weight


# ----------------------------------------------------------------------------------------------------
# Every architecture.
# ----------------------------------------------------------------------------------------------------

QUANTIZED = [(name, "nf4") for name in ARCHITECTURES] + [
    (name, "int8") for name in ("llama", "gpt2", "t5", "opt", "mixtral", "bart", "whisper", "dbrx", "bert")
]
TIED = ["gemma2", "gpt2", "t5", "opt", "bart", "whisper", "bloom", "paligemma", "blip_2"]


# By default each architecture is merged by one of the next two tests.
@pytest.mark.parametrize(
    ("name", "quant"), few(QUANTIZED, [*((name, "nf4") for name in zoo.CORE), ("gpt2", "int8"), ("mixtral", "int8")])
)
def test_adapted_weights_are_rounded_once_and_all_else_is_the_original(
    name: str, quant: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if quant == "nf4":
        request.getfixturevalue("whole_layers")
    model = zoo.load(name, quant)
    checkpoints = zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    prepared = KbitPreparedModel(model, gradient_checkpointing=checkpoints).prepare()
    adapted = training.adapt(name, model)
    training.step(name, adapted)
    before = Snapshot(adapted)
    report = prepared.export(tmp_path / "merged", merge_adapters=True)
    assert before.diff(Snapshot(adapted)) == []
    layers = layers_of(adapted)
    assert set(report.merged) == set(layers)
    exact = {fqn: lora_weight(layer) for fqn, layer in layers.items()}
    quantized = {
        fqn.removeprefix("base_model.model.").replace(".base_layer", "")
        for fqn, module in adapted.named_modules()
        if is_quantized(module)
    }
    plain = load(name, tmp_path / "merged")
    assert type(plain) is type(model)
    assert plain.config.dtype == BFLOAT16
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    original = zoo.load(name, None)
    tensors = plain.state_dict()
    assert tensors.keys() == original.state_dict().keys()
    for fqn, tensor in original.state_dict().items():
        found, owner = tensors[fqn], fqn.rpartition(".")[0]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        if fqn.endswith("weight") and owner in exact:
            is_transposed = type(original.get_submodule(owner)).__name__ == "Conv1D"
            assert_rounded_once(found.T if is_transposed else found, exact[owner])
        elif fqn.endswith("weight") and owner in quantized:
            is_transposed = type(original.get_submodule(owner)).__name__ == "Conv1D"
            assert_rounded_once(found.T if is_transposed else found, base_weight(model.get_submodule(owner)))
        else:
            assert torch.equal(found, tensor), fqn


def same_outputs(name: str, adapted: nn.Module, folder: Path) -> PreTrainedModel:
    """Load the plain model, and check that it computes what the adapted one does."""
    plain = load(name, folder, FLOAT32).eval()
    batch = zoo.inputs(name, plain)
    with torch.no_grad():
        expected, found = adapted.eval()(**batch), plain(**batch)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
    return plain


def head_and_embeddings(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter]:
    return model.get_output_embeddings().weight, model.get_input_embeddings().weight


def trained_modules(name: str, model: PreTrainedModel) -> dict[str, list[str]]:
    """What an adapter trains whole beside its LoRA, by the name of the case; where nothing is tied, one case tells."""
    head = zoo.ARCHITECTURES[name].head
    try:
        embeddings = model.get_input_embeddings()
    except NotImplementedError:  # of sound and images
        return {"head": [head]}
    fqn = next(fqn for fqn, module in model.named_modules() if module is embeddings)
    both = {"both": [head, fqn]}
    return {"nothing": [], "head": [head], "embeddings": [fqn], **both} if name in TIED else both


@pytest.mark.usefixtures("whole_layers")
@pytest.mark.parametrize("name", few(ARCHITECTURES, ARCHITECTURES[len(zoo.CORE) :]))
def test_the_plain_model_computes_what_the_adapted_one_does_whatever_is_trained(name: str, tmp_path: Path) -> None:
    # Everything in float32, so that nothing but the merge makes a difference.
    model = zoo.load(name, "nf4", FLOAT32)
    adapted: PeftModel | None = None
    torch.manual_seed(0)
    for case, trained in trained_modules(name, model).items():
        config = zoo.lora_config(name)
        config.modules_to_save = trained or None
        if adapted is None:
            adapted = get_peft_model(model, config, case)
        else:
            adapted.add_adapter(case, config)
        adapted.set_adapter(case)
        jitter(adapted)
        export(adapted, tmp_path / case)
        plain = same_outputs(name, adapted, tmp_path / case)
        batch = zoo.inputs(name, plain)
        with torch.no_grad():
            expected = plain(**batch)[0]
            with adapted.disable_adapter():
                assert (adapted(**batch)[0] - expected).abs().max() > 1e-3
        if name in TIED:
            head, embeddings = head_and_embeddings(plain)
            assert torch.equal(head, embeddings) == (head is embeddings) == (case == "nothing")


@pytest.mark.parametrize("kind", ["SwitchTransformers", "LongT5"])
def test_a_config_that_says_more_than_what_is_tied_still_says_it(kind: str, tmp_path: Path) -> None:
    """Both families read from `tie_word_embeddings` whether to scale what the head gets: it may not become false."""
    sizes: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes, decoder_start_token_id=0)).eval()
    batch = {"input_ids": torch.arange(8, 20)[None], "decoder_input_ids": torch.arange(20, 27)[None]}
    for case, trained in {"head": ["lm_head"], "embeddings": ["shared"], "both": ["lm_head", "shared"]}.items():
        config = peft.LoraConfig(target_modules=["q"], modules_to_save=trained)
        adapted = get_peft_model(copy.deepcopy(model), config, case)
        jitter(adapted, 0.1)
        export(adapted, tmp_path / case)
        plain = model_class.from_pretrained(tmp_path / case)
        with torch.no_grad():
            torch.testing.assert_close(plain(**batch).logits, adapted.eval()(**batch).logits, rtol=1e-3, atol=1e-4)


def test_a_module_of_two_places_that_is_adapted_at_one_of_them_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), second=nn.Identity(), third=nn.Linear(4, 4)))
    model.second = model.first
    config = peft.LoraConfig(target_modules=["third"], modules_to_save=["first"])
    adapted = get_peft_model(model, config)
    with pytest.raises(ExportError, match=r"first: .*the module is second too, and is not adapted there"):
        export(adapted, tmp_path / "merged", base=model)


PRECISIONS = ["full", "compute", "norms", "none"]
# Each precision with each half dtype.
KINDS = [
    (quant, dtype, PRECISIONS[(i + j) % 4])
    for i, quant in enumerate(["nf4", "nf4-double", "fp4", "int8"])
    for j, dtype in enumerate([torch.bfloat16, torch.float16])
]


@pytest.mark.usefixtures("whole_layers")
@pytest.mark.parametrize(("quant", "dtype", "precision"), KINDS)
def test_neither_preparation_nor_use_makes_a_difference(
    quant: str, dtype: torch.dtype, precision: str, tmp_path: Path
) -> None:
    adapted = training.adapt("gemma2", zoo.load("gemma2", quant, dtype))
    report = export(adapted, tmp_path / "plain", max_shard_size="20kB")
    assert len([file for file in report.files if file.endswith(".safetensors")]) > 1
    tensors = tensors_of(tmp_path / "plain")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    for fqn, layer in layers_of(adapted).items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))
    load("gemma2", tmp_path / "plain")
    model = zoo.load("gemma2", quant, dtype)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    adapted = training.adapt("gemma2", model).eval()
    with torch.no_grad():
        adapted(**zoo.inputs("gemma2", adapted))
    prepared.export(tmp_path / precision, merge_adapters=True, max_shard_size="20kB")
    with prepared.suspended():
        prepared.export(tmp_path / "suspended", merge_adapters=True, max_shard_size="20kB")
    for folder in (precision, "suspended"):
        for file in report.files:
            assert (tmp_path / folder / file).read_bytes() == (tmp_path / "plain" / file).read_bytes(), (folder, file)


def test_it_loads_where_neither_bitsandbytes_nor_peft_is_installed(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama")).eval()
    export(adapted, tmp_path / "merged")
    program = (
        "import sys\n"
        "sys.modules.update({'bitsandbytes': None, 'peft': None})\n"
        "import torch, transformers\n"
        f"model, info = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path / 'merged')!r}, "
        "output_loading_info=True)\n"
        "assert not any(info.values()), info\n"
        "print(type(model).__name__, model.dtype, model(torch.arange(8, 16)[None]).logits.shape[-1])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["LlamaForCausalLM", "torch.bfloat16", str(zoo.VOCAB_SIZE)]


def test_a_base_that_was_loaded_quantized_from_a_checkpoint(tmp_path: Path) -> None:
    zoo.load("mixtral").save_pretrained(tmp_path / "quantized")
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "quantized")
    adapted = training.adapt("mixtral", model)
    export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    assert not any("absmax" in name or "quant" in name for name in tensors)
    for fqn, layer in layers_of(adapted).items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))
    load("mixtral", tmp_path / "merged")


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
@pytest.mark.parametrize("quant", ["nf4", "int8"])
@pytest.mark.parametrize("method", ["BOFT", "FourierFT", "Gralora", "Miss", "OFT", "Shira", "VBLoRA", "Vera", "WaveFT"])
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
@pytest.mark.parametrize("use_dora", [False, True])
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


# ----------------------------------------------------------------------------------------------------
# Which adapters are active.
# ----------------------------------------------------------------------------------------------------


def two_adapters(**fields: Any) -> PeftModel:
    adapted = training.adapt("llama", zoo.load("llama"), **fields)
    adapted.add_adapter("second", zoo.lora_config("llama", r=8, target_modules=["q_proj", "up_proj"]))
    return adapted


@pytest.mark.filterwarnings("ignore:no adapter of the model is active:UserWarning")
@pytest.mark.parametrize("active", [["default"], ["second"], ["default", "second"], []])
def test_the_active_adapters_are_merged_and_no_others(active: list[str], tmp_path: Path) -> None:
    adapted = two_adapters()
    adapted.base_model.set_adapter(active or ["default"])
    if not active:
        adapted.base_model.disable_adapter_layers()
    report = export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        here = tuple(name for name in active if name in layer.lora_A)
        assert (fqn in report.merged) == bool(here)
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer, here))


@pytest.mark.filterwarnings("ignore:no adapter of the model is active:UserWarning")
def test_a_temporarily_disabled_adapter_is_left_out_of_the_merge(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"), modules_to_save=True)
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    with adapted.disable_adapter():
        assert export(adapted, tmp_path / "disabled").merged == ()
    export(zoo.load("llama"), tmp_path / "base")
    base, disabled, merged = (tensors_of(tmp_path / folder) for folder in ("base", "disabled", "merged"))
    assert all(torch.equal(base[fqn], disabled[fqn]) for fqn in base)
    assert not torch.equal(base["lm_head.weight"], merged["lm_head.weight"])


def test_adapters_inside_the_model_are_found_without_naming_what_is_around_it(tmp_path: Path) -> None:
    model = zoo.load("llama")
    adapted = training.adapt("llama", model)
    wrapper = KbitPreparedModel(model)
    inside = wrapper.export(tmp_path / "inside", merge_adapters=True)
    around = wrapper.export(tmp_path / "around", merge_adapters=True, model=adapted)
    assert inside.merged == around.merged != ()
    first, second = tensors_of(tmp_path / "inside"), tensors_of(tmp_path / "around")
    assert all(torch.equal(first[fqn], second[fqn]) for fqn in first)


def test_different_methods_on_one_layer_are_merged(tmp_path: Path) -> None:
    # Of a model that is not quantized: PEFT mixes methods on no other.
    adapted = peft.PeftMixedModel(
        zoo.load("llama", None, FLOAT32), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False), "first"
    )
    adapted.add_adapter("second", peft.LoHaConfig(target_modules=["q_proj", "up_proj"], init_weights=False))
    adapted.set_adapter(["first", "second"])
    report = export(adapted, tmp_path / "merged")
    assert len(report.merged) == 4
    same_outputs("llama", adapted, tmp_path / "merged")


# ----------------------------------------------------------------------------------------------------
# Fused experts.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "jamba"])
def test_fused_experts(name: str, tmp_path: Path) -> None:
    model = zoo.load(name, "nf4", FLOAT32)
    experts = {fqn.rpartition(".")[2]: p for fqn, p in model.named_parameters() if ".experts." in fqn and p.dim() > 1}
    assert len(experts) > 1
    targets = [f"experts.{parameter}" for parameter in experts]
    adapted = training.adapt(name, model, target_parameters=targets).eval()
    jitter(adapted)
    before = Snapshot(adapted)
    report = export(adapted, tmp_path / "merged")
    assert before.diff(Snapshot(adapted)) == []
    assert any("experts" in fqn for fqn in report.merged)
    plain = load(name, tmp_path / "merged").eval()
    batch = zoo.inputs(name, plain)
    with torch.no_grad():
        expected, found = adapted(**batch).logits, plain(**batch).logits
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        with adapted.disable_adapter():
            assert (adapted(**batch).logits - expected).abs().max() > 1e-2


def test_fused_experts_are_rounded_once(tmp_path: Path) -> None:
    adapted = training.adapt("gpt_oss", zoo.load("gpt_oss"), target_parameters=["experts.gate_up_proj"])
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers_of(adapted).items():
        if not fqn.endswith("experts"):
            continue
        weight = layer.base_layer.gate_up_proj.detach().double()  # (experts, in, out)
        a = layer.lora_A["default"].weight.detach().double().view(len(weight), -1, weight.shape[1])
        b = layer.lora_B["default"].weight.detach().double().view(weight.shape[2], -1, len(weight))
        exact = weight + torch.einsum("ore,eri->eio", b, a) * layer.scaling["default"]
        assert_rounded_once(tensors[f"{fqn}.gate_up_proj"], exact)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("num_experts", [2, 3, 4, 5, 64, 65])
def test_stacks_of_any_number_of_experts(num_experts: int, is_transposed: bool, tmp_path: Path) -> None:
    """Merged a few rows of one expert at a time, which PEFT takes for a matrix, whose sides it exchanges."""
    stack = nn.Module()
    stack.up = nn.Parameter(torch.randn(num_experts, 8, 12))
    stack.is_transposed = is_transposed
    config = peft.LoraConfig(target_parameters=["0.up"], r=3, lora_alpha=2, init_lora_weights=False)
    adapted = get_peft_model(nn.Sequential(stack), config)
    (layer,) = [module for module in adapted.modules() if isinstance(module, peft.tuners.lora.layer.ParamWrapper)]
    export(adapted, tmp_path / "merged")
    a = layer.lora_A["default"].weight.detach().double().view(num_experts, 3, -1)
    b = layer.lora_B["default"].weight.detach().double().view(-1, 3, num_experts)
    delta = torch.einsum("ore,eri->eoi", b, a) * layer.scaling["default"]
    exact = stack.up.detach().double() + (delta.transpose(1, 2) if is_transposed else delta)
    assert_rounded_once(tensors_of(tmp_path / "merged")["0.up"], exact)


def test_fused_experts_of_two_dimensions_are_rounded_once(tmp_path: Path) -> None:
    adapted = training.adapt("dbrx", zoo.load("dbrx"), target_parameters=["mlp.w1"])
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    tensors, experts = tensors_of(tmp_path / "merged"), 0
    for fqn, layer in layers_of(adapted).items():
        if hasattr(layer, "parameter_name"):
            a, b = (getattr(layer, f"lora_{part}")["default"].weight.detach().double() for part in "AB")
            exact = layer.base_layer.w1.detach().double() + b @ a * layer.scaling["default"]
            assert_rounded_once(tensors[f"{fqn}.w1"], exact)
            experts += 1
    assert experts == 2


# ----------------------------------------------------------------------------------------------------
# Ties and trained copies.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_an_embedding_that_an_adapter_is_on_is_untied(name: str, tmp_path: Path) -> None:
    embedding = "embed_tokens" if name == "gemma2" else "shared"
    adapted = training.adapt(name, zoo.load(name, "nf4", FLOAT32), target_modules=["q_proj", "q", embedding])
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    head, embeddings = head_and_embeddings(same_outputs(name, adapted, tmp_path / "merged"))
    assert not torch.equal(head, embeddings)


@pytest.mark.parametrize("kind", ["modules_to_save", "trainable_token_indices", "target_modules"])
def test_tied_weights_that_are_trained_together_stay_tied(kind: str, tmp_path: Path) -> None:
    values: Any = {"trainable_token_indices": [9, 10], "target_modules": ["q_proj", "embed_tokens"]}
    # PEFT ties adapters of single rows without being asked.
    fields = {kind: values.get(kind, ["embed_tokens"]), "ensure_weight_tying": kind != "trainable_token_indices"}
    config = peft.LoraConfig(**{"target_modules": ["q_proj"], "init_lora_weights": False, **fields})
    adapted = get_peft_model(zoo.load("gemma2", "nf4", FLOAT32), config)
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    original = zoo.load("gemma2", None, FLOAT32)
    head, embeddings = head_and_embeddings(same_outputs("gemma2", adapted, tmp_path / "merged"))
    assert head is embeddings
    assert "lm_head.weight" not in tensors_of(tmp_path / "merged")  # the files hold it once
    assert not torch.equal(embeddings, original.get_input_embeddings().weight)


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_trained_copies_are_rounded_to_the_original_dtype(precision: str, tmp_path: Path) -> None:
    model = zoo.load("bert")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    adapted = training.adapt("bert", model, modules_to_save=True)
    training.step("bert", adapted)
    before = Snapshot(adapted)
    report = prepared.export(tmp_path / "merged", merge_adapters=True)
    assert before.diff(Snapshot(adapted)) == []
    assert "classifier" in report.merged
    trained = adapted.base_model.model.classifier.modules_to_save["default"]
    tensors = tensors_of(tmp_path / "merged")
    for name, parameter in trained.named_parameters():
        assert torch.equal(tensors[f"classifier.{name}"], parameter.detach().to(BFLOAT16))
    original = zoo.load("bert", None).classifier.weight
    assert not torch.equal(tensors["classifier.weight"], original)


@pytest.mark.parametrize("method", ["LoraConfig", "TrainableTokensConfig"])
def test_embeddings_with_a_padding_row(method: str, tmp_path: Path) -> None:
    """A block has few rows, and seldom this one."""
    model = nn.Sequential(nn.Embedding(64, 32, padding_idx=63))
    # Each block begins and ends with a trained row, wherever that is, but for the first.
    options: dict[str, Any] = {"token_indices": [*range(63, 1, -1)]} if method == "TrainableTokensConfig" else {}
    adapted = get_peft_model(model, getattr(peft, method)(target_modules=["0"], **options))
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    with torch.no_grad():
        expected = adapted(torch.arange(64))
    torch.testing.assert_close(tensors_of(tmp_path / "merged")["0.weight"], expected, rtol=1e-6, atol=1e-6)


def test_trained_rows_of_the_embeddings_are_merged(tmp_path: Path) -> None:
    adapted = get_peft_model(
        zoo.load("llama"), peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [9, 11]})
    )
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    found = tensors_of(tmp_path / "merged")["model.embed_tokens.weight"]
    rows = adapted.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"]
    original = zoo.load("llama", None).model.embed_tokens.weight.detach().clone()
    assert not torch.equal(found[[9, 11]], original[[9, 11]])
    original[[9, 11]] = rows.detach().to(BFLOAT16)
    assert torch.equal(found, original)


# ----------------------------------------------------------------------------------------------------
# What is refused, and what is left alone.
# ----------------------------------------------------------------------------------------------------


def adapted_llama(config: peft.PeftConfig, quant: str = "nf4") -> PeftModel:
    return get_peft_model(zoo.load("llama", quant, use_cache=False), config)


PROMPTS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "prompt tuning": (lambda: adapted_llama(peft.PromptTuningConfig(**PROMPTS)), "PROMPT_TUNING adds to the input"),
    "prefix tuning": (lambda: adapted_llama(peft.PrefixTuningConfig(**PROMPTS)), "PREFIX_TUNING adds to the input"),
    "p-tuning": (lambda: adapted_llama(peft.PromptEncoderConfig(**PROMPTS)), "P_TUNING adds to the input"),
    "adapted attention": (
        lambda: adapted_llama(peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")),
        "has no method that merges",
    ),
    "activated LoRA": (
        lambda: adapted_llama(
            peft.LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[9], task_type="CAUSAL_LM")
        ),
        "Linear4bit (lora) with the adapters ['default']",
    ),
    "a router of tasks": (lambda: adapted_llama(peft.PolyConfig(target_modules=["q_proj"])), "Linear (poly)"),
    "a method that is nowhere linear": (
        lambda: adapted_llama(peft.LilyConfig(target_modules=["q_proj"])),
        "Linear (lily)",
    ),
    # PEFT lets it read the int8 codes as though they were weights, so it is nothing that a merge could keep.
    "a method that reads what is quantized": (
        lambda: adapted_llama(peft.HRAConfig(target_modules=["q_proj"]), "int8"),
        "the merged layer computes another output",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_exactly_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, message = REFUSED[case]
    adapted = make()
    jitter(adapted)
    before = Snapshot(adapted)
    with pytest.raises(ExportError, match="cannot be merged exactly") as caught:
        export(adapted, tmp_path / "merged")
    assert message in str(caught.value)
    assert caught.value.fqn in ("", "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn")
    assert not (tmp_path / "merged").exists()
    assert before.diff(Snapshot(adapted)) == []


def exported_by_rows(config: peft.PeftConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Export what is merged in several blocks a layer; the rows of each module in which a merge was compared."""
    compared: list[int] = []
    monkeypatch.setattr(merge_module, "_BLOCK_BYTES", 16 * 64 * 4)
    probe = adapters_module._probe
    monkeypatch.setattr(
        adapters_module, "_probe", lambda plain: [compared.append(plain.weight.shape[0]), probe(plain)][1]
    )
    adapted = adapted_llama(config)
    jitter(adapted)
    export(adapted, folder)
    return compared


def test_a_merge_is_compared_in_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = exported_by_rows(peft.LoraConfig(target_modules=["q_proj"]), tmp_path / "merged", monkeypatch)
    assert compared == [16] * 9  # two layers of 64 rows; a block of the kind was tried out before


@pytest.mark.parametrize("block", range(4))
def test_a_block_that_is_merged_wrongly_is_refused(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge, calls = peft.tuners.lora.layer.Linear.merge, iter(range(1 << 30))

    def wrong(layer: Any, *args: Any, **kwargs: Any) -> None:
        merge(layer, *args, **kwargs)
        if next(calls) == 1 + block:  # after the one that is tried out
            layer.get_base_layer().weight.data *= 1.001

    monkeypatch.setattr(peft.tuners.lora.layer.Linear, "merge", wrong)
    with pytest.raises(ExportError, match="the merged layer computes another output"):
        exported_by_rows(peft.LoraConfig(target_modules=TARGETS), tmp_path / "merged", monkeypatch)
    assert not (tmp_path / "merged").exists()


def test_values_that_a_merge_left_of_earlier_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HiRA's keeps the base of the rows that it merged first, and merges others into that."""
    monkeypatch.setattr(adapters_module, "shallow_copy", lambda module: module)
    with pytest.raises(ExportError, match="the merged layer computes another output"):
        exported_by_rows(peft.HiraConfig(target_modules=TARGETS), tmp_path / "merged", monkeypatch)


def test_gates_that_see_the_input_are_refused(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"), task_type="CAUSAL_LM")
    adapted.save_pretrained(tmp_path / "adapter")
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=64, xlora_depth=1, adapters={"a": str(tmp_path / "adapter")}
    )
    mixture = get_peft_model(zoo.load("llama", use_cache=False), config)
    with pytest.raises(ExportError, match="the weights of its adapters depend on the input"):
        export(mixture, tmp_path / "merged")


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_layer_that_computes_zeros_is_merged(value: float, tmp_path: Path) -> None:
    """Of zeros, or adapted so that nothing is left but what rounding leaves of the output."""
    model = nn.Sequential(nn.Linear(48, 80, bias=False))
    config = peft.LoraConfig(target_modules=["0"], r=1, lora_alpha=1)
    adapted = get_peft_model(model, config)
    layer = layers_of(adapted)["0"]
    for parameter, filled in (
        (layer.base_layer.weight, -value),
        (layer.lora_A["default"].weight, 1),
        (layer.lora_B["default"].weight, value),
    ):
        nn.init.constant_(parameter, filled)
    export(adapted, tmp_path / "merged")
    assert not tensors_of(tmp_path / "merged")["0.weight"].any()


@pytest.mark.parametrize(
    ("options", "indices", "message"),
    [
        ({"max_norm": 1.0}, [3], "the embedding renormalizes the rows that it looks up"),
        ({}, [3, -1], "index -1 is out of bounds"),
        ({}, [3, 64], "index 64 is out of bounds"),
    ],
)
def test_embeddings_that_cannot_be_merged_exactly_are_refused(
    options: dict[str, Any], indices: list[int], message: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Embedding(64, 32, **options))
    adapted = get_peft_model(model, peft.TrainableTokensConfig(target_modules=["0"], token_indices=[3, 5]))
    layers_of(adapted)["0"].token_indices["default"] = indices
    with pytest.raises(ExportError, match=message) as caught:
        export(adapted, tmp_path / "merged")
    assert caught.value.fqn == "0"


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"))
    wrapper = KbitPreparedModel(adapted)
    adapted.merge_adapter()
    with pytest.raises(ExportError) as caught:
        wrapper.export(tmp_path / "merged", merge_adapters=True)
    assert caught.value.fqn == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(("value", "message"), [(math.nan, "not finite"), (1e6, "beyond the range of torch.float16")])
def test_values_that_the_dtype_cannot_hold_are_refused(value: float, message: str, tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama", "nf4", torch.float16))
    # The last layer, of a kind that is tried out elsewhere: found while the files are written.
    with torch.no_grad():
        layers_of(adapted)["model.layers.1.mlp.down_proj"].lora_B["default"].weight[3, 1] = value
    with pytest.raises(ExportError, match=message) as caught:
        export(adapted, tmp_path / "merged")
    assert caught.value.fqn == "model.layers.1.mlp.down_proj"
    assert list(tmp_path.iterdir()) == []


def test_a_forward_that_was_replaced_is_refused(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"))
    layer = layers_of(adapted)["model.layers.0.self_attn.q_proj"]
    layer.forward = lambda x: x
    with pytest.raises(ExportError, match="its forward was replaced"):
        export(adapted, tmp_path / "merged")


def test_autocast_makes_no_difference(tmp_path: Path) -> None:
    model = training.adapt("llama", zoo.load("llama"))
    jitter(model)
    export(model, tmp_path / "plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        export(model, tmp_path / "autocast")
        assert torch.is_autocast_enabled("cpu")
    plain, found = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "autocast")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {name: t.tolist() for name, t in plain.items()}


def test_random_numbers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(seed: int) -> None:
        raise AssertionError("the generators of every device would be seeded")

    adapted = training.adapt("llama", zoo.load("llama"), lora_dropout=0.5)
    adapted.train()
    layers = layers_of(adapted)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    state = torch.get_rng_state()
    export(adapted, tmp_path / "merged")
    assert torch.equal(torch.get_rng_state(), state)
    tensors = tensors_of(tmp_path / "merged")
    for fqn, layer in layers.items():
        assert_rounded_once(tensors[f"{fqn}.weight"], lora_weight(layer))


def test_hooks_on_an_adapted_layer_are_neither_run_nor_copied(tmp_path: Path) -> None:
    adapted = training.adapt("llama", zoo.load("llama"))
    layer = layers_of(adapted)["model.layers.0.self_attn.q_proj"]

    class Uncopyable:
        def __call__(self, *args: object) -> None:
            raise AssertionError("run")

        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError("copied")

    layer.register_forward_hook(Uncopyable())
    layer.lora_A["default"].register_forward_pre_hook(Uncopyable())
    export(adapted, tmp_path / "merged")


# ----------------------------------------------------------------------------------------------------
# What the documentation says.
# ----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "merge.md"


def test_the_comparison_with_merging_into_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = pages.program(PAGE, "float64, rounded to bfloat16")
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as output, torch.random.fork_rng(devices=[]):
        exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
    printed = re.findall(r"^(.+): error ([\d.]+)% .*, ([\d.]+)% as", output.getvalue(), re.MULTILINE)
    table = re.findall(r"^\| (.+?) \| ([\d.]+)% \| ([\d.]+)% \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [row[0] for row in printed] == [row[0] for row in table]
    for (_, *found), (_, *stated) in zip(printed, table, strict=True):
        assert [float(value) for value in found] == pytest.approx(
            [float(value) for value in stated], rel=0.03, abs=0.05
        )
    assert printed[0][1:] == printed[1][1:]


def layer_of(kind: str, width: int) -> nn.Module:
    """A layer with a weight of ``width * width`` elements."""
    if kind.endswith("experts"):
        count = int(kind.split()[0])
        experts = nn.Module()
        experts.up_proj = nn.Parameter(torch.randn(count, width // count, width).to(BFLOAT16))
        if "nf4" in kind:
            from bitsandbytes.nn.parametrize import replace_parameter_4bit  # newer than the oldest version

            replace_parameter_4bit(experts, "up_proj", quant_type="nf4")
        return experts
    if kind == "embedding":
        return nn.Embedding(width, width).to(BFLOAT16)
    if kind == "linear":
        return nn.Linear(width, width, bias=False).to(BFLOAT16)
    if kind == "nf4":
        return bitsandbytes.nn.Linear4bit(width, width, bias=False, quant_type="nf4").to(BFLOAT16).to("cpu")
    return bitsandbytes.nn.Linear8bitLt(width, width, bias=False, has_fp16_weights=False).to("cpu")


def adapted_layers(kind: str, width: int, method: str, **options: Any) -> PeftModel:
    """Three layers, the largest tensors, and a norm in the half dtype."""
    model = nn.Sequential(*(layer_of(kind, width) for _ in range(3)), nn.RMSNorm(width).to(BFLOAT16))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind == "int8"
    return get_peft_model(model, getattr(peft, method)(**{"target_modules": ["0", "1", "2"], **options}))


LORA: dict[str, Any] = {"method": "LoraConfig", "init_lora_weights": False}
LARGE_LAYERS = [
    ("nf4", LORA),
    ("nf4", {**LORA, "use_dora": True}),
    ("nf4", {"method": "AdaLoraConfig", "init_lora_weights": False, "total_step": 10}),
    ("nf4", {"method": "HiraConfig", "init_weights": False}),
    ("nf4", {"method": "IA3Config", "feedforward_modules": []}),
    ("nf4", {"method": "VeraConfig", "r": 64}),
    ("int8", LORA),
    ("int8", {**LORA, "use_dora": True}),
    ("linear", LORA),
    ("linear", {"method": "LoHaConfig", "init_weights": False}),
    ("embedding", LORA),
    ("embedding", {"method": "TrainableTokensConfig", "token_indices": [0, 63]}),
    # Of rank 1: that of 64 small experts, in float32, has an eighth of their bytes.
    *[
        (kind, {**LORA, "r": 1, "target_modules": None, "target_parameters": [f"{i}.up_proj" for i in range(3)]})
        for kind in ("4 experts", "16 experts", "64 experts", "4 nf4 experts", "16 nf4 experts", "64 nf4 experts")
    ],
]


@pytest.mark.parametrize(("kind", "options"), LARGE_LAYERS, ids=str)
def test_two_tensors_are_in_memory_at_most(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, tensor = 1024, 2 * 1024 * 1024
    # In as many blocks as a layer of 4096 times 4096 elements.
    monkeypatch.setattr(merge_module, "_BLOCK_BYTES", 4 * width * width // 32)
    wrapper = KbitPreparedModel(adapted_layers(kind, width, **options), gradient_checkpointing=False)
    reports: list[ExportReport] = []
    sizes = allocations(lambda: reports.append(wrapper.export(tmp_path / "merged", merge_adapters=True)))
    assert (len(reports[0].merged), reports[0].num_bytes) == (3, 3 * tensor + 2 * width)
    mapped = (tmp_path / "merged" / "model.safetensors").stat().st_size  # to read its header
    assert 0 < peak(size for size in sizes if abs(size) != mapped) <= 2 * tensor


MEMORY = """
import gc, re, sys
from pathlib import Path
from kbitwrap import KbitPreparedModel
from test_merge import LORA, adapted_layers

def status(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

for width in (64, 3072):  # what is loaded and cached once is so by the first
    wrapper = KbitPreparedModel(adapted_layers("nf4", width, **LORA), gradient_checkpointing=False)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    start = status("VmRSS")
    wrapper.export(f"{width}", merge_adapters=True)
print(status("VmHWM") - start)
"""


@pytest.mark.thorough
def test_the_process_grows_by_two_tensors_at_most(tmp_path: Path) -> None:
    folders = os.pathsep.join(map(str, (PAGE.parents[1], *Path(__file__).parents[:2])))
    # What is freed goes back to the system: which pieces the C library keeps is not measured.
    variables = {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    result = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **variables}
    )
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout) <= 2 * 2 * 3072 * 3072


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
