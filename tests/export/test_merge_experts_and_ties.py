"""A merged export of stacks of experts, of tied embeddings and of trained copies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import get_peft_model
from torch import nn
from transformers import PreTrainedModel

import kbitwrap.export.merged as merged_module
from kbitwrap import KbitPreparedModel, merge_checkpoint
from support import training, zoo
from support.files import tensors_of
from support.merging import assert_rounded_once, assert_same_model, export, jitter, layers_of, load, same_outputs
from support.snapshot import Snapshot
from support.thorough import every_other

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge layers as small as these by rows too, in a few blocks."""
    monkeypatch.setattr(merged_module, "_BLOCK_BYTES", 3000)


def head_and_embeddings(model: PreTrainedModel) -> tuple[nn.Parameter, nn.Parameter]:
    return model.get_output_embeddings().weight, model.get_input_embeddings().weight


# ----------------------------------------------------------------------------------------------------
# Fused experts.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("not_repacking")  # the repacking kernel rounds what it computes to bfloat16
@pytest.mark.parametrize("name", every_other(["mixtral", "gpt_oss", "deepseek_v3", "jamba"]))
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
    """Merged a few experts at a time; a single one PEFT takes for a matrix, whose sides it exchanges."""
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


@pytest.mark.usefixtures("not_repacking")  # the repacking kernel rounds what it computes to bfloat16
@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_an_embedding_that_an_adapter_is_on_is_untied(name: str, tmp_path: Path) -> None:
    embedding = "embed_tokens" if name == "gemma2" else "shared"
    adapted = training.adapt(name, zoo.load(name, "nf4", FLOAT32), target_modules=["q_proj", "q", embedding])
    jitter(adapted)
    export(adapted, tmp_path / "merged")
    head, embeddings = head_and_embeddings(same_outputs(name, adapted, tmp_path / "merged"))
    assert not torch.equal(head, embeddings)


@pytest.mark.usefixtures("not_repacking")  # the repacking kernel rounds what it computes to bfloat16
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
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=kind != "modules_to_save")
    settings = zoo._quantization_config(zoo.ARCHITECTURES["gemma2"], "nf4", FLOAT32)
    options: dict[str, Any] = {"quantization_config": settings, "dtype": FLOAT32, "check": True}
    merge_checkpoint(zoo.checkpoint("gemma2"), tmp_path / "adapter", tmp_path / "again", **options)
    assert_same_model(tmp_path / "again", tmp_path / "merged")


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
