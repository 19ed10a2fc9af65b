"""A base that others changed: what restore would give is what verify, export and the manifest speak of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from kbitwrap import ExportError, KbitPreparedModel, ManifestError, Precision, RestoreError
from support import zoo
from support.snapshot import Snapshot
from support.training import adapt, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit linear may get different generations:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]

STORES_HALF = ["norms", "adapted", "none"]
UPCASTS = ["full", "compute"]
LM_HEAD = "lm_head.weight"


def merged_and_unmerged(model: nn.Module) -> peft.PeftModel:
    """A LoRA on the head, trained a step, merged into it and taken out again: what is left is rounded."""
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["lm_head"], r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    peft_model = peft.get_peft_model(model, config)
    peft_model.merge_adapter()
    peft_model.unmerge_adapter()
    return peft_model


@pytest.mark.parametrize("precision", UPCASTS)
def test_export_gives_what_restore_gives_after_a_merge_into_an_upcast_head(precision: str, tmp_path: Path) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    original = model.lm_head.weight.detach().clone()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    digest = prepared.manifest().tensors[LM_HEAD].digest
    peft_model = merged_and_unmerged(model)
    prepared.export(tmp_path / "base")
    recorded = prepared.manifest().tensors[LM_HEAD]
    assert (recorded.original_dtype, recorded.digest) == ("bfloat16", digest)
    exported = load_file(tmp_path / "base" / "model.safetensors")[LM_HEAD]
    assert not prepared.verify().differences.get(LM_HEAD, {}).keys() & {"value", "parameter"}
    report = prepared.restore()
    assert (report.trained, report.replaced) == ((), ())
    assert exported.dtype == torch.bfloat16
    assert torch.equal(exported.view(torch.int16), original.view(torch.int16))
    assert peft_model.unload() is model
    assert before.diff(Snapshot(model), moved=True) == []


@pytest.mark.parametrize("precision", STORES_HALF)
def test_a_head_that_a_merge_left_rounded_is_named_by_all(precision: str, tmp_path: Path) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    original = model.lm_head.weight.detach().clone()
    merged_and_unmerged(model)
    assert not torch.equal(model.get_submodule("lm_head").base_layer.weight, original)
    assert "value" in prepared.verify().differences[LM_HEAD]
    with pytest.raises(ExportError, match="is frozen, but its values have changed") as exporting:
        prepared.export(tmp_path / "base")
    with pytest.raises(ManifestError, match="is frozen, but its values have changed") as recording:
        prepared.manifest()
    assert exporting.value.fqn == recording.value.fqn == LM_HEAD
    report = prepared.restore()
    assert LM_HEAD in report.replaced
    assert report.trained == ()


def test_a_merge_inside_a_suspension_of_compute_is_named() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="compute").prepare()
    with prepared.suspended():
        merged_and_unmerged(model)
    assert "value" in prepared.verify().differences[LM_HEAD]
    assert LM_HEAD in prepared.restore().replaced


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("precision", Precision, ids=str)
def test_the_residual_of_an_adapter_is_named(precision: Precision, init: str, tmp_path: Path) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=init, task_type="CAUSAL_LM")
    peft.get_peft_model(model, config)
    assert {"value", "parameter"} & prepared.verify().differences[LM_HEAD].keys()
    with pytest.raises(ExportError) as exporting:
        prepared.export(tmp_path / "base")
    with pytest.raises(ManifestError) as recording:
        prepared.manifest()
    assert exporting.value.fqn == recording.value.fqn == LM_HEAD
    assert LM_HEAD in prepared.restore().replaced
    base = {fqn: p for fqn, p in model.named_parameters() if "lora_" not in fqn}
    assert torch.float32 not in {p.dtype for p in base.values()}


@pytest.mark.parametrize("precision", Precision, ids=str)
def test_what_is_trained_is_named_as_trained_and_exported(precision: Precision, tmp_path: Path) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision, freeze=False).prepare()
    weight = model.model.norm.weight
    assert weight.requires_grad
    with torch.no_grad():
        weight.mul_(1.5)
    prepared.export(tmp_path / "base")
    with pytest.raises(ManifestError, match="trained") as recording:
        prepared.manifest()
    assert recording.value.fqn == "model.norm.weight"
    report = prepared.restore()
    assert report.trained == ("model.norm.weight",)
    assert "model.norm.weight" not in report.replaced
    exported = load_file(tmp_path / "base" / "model.safetensors")["model.norm.weight"]
    assert torch.equal(exported, weight)


@pytest.mark.parametrize("precision", Precision, ids=str)
def test_a_trained_bias_of_a_quantized_layer_is_named_as_trained_and_exported(
    precision: Precision, tmp_path: Path
) -> None:
    model = zoo.load("gpt2")
    fqn = "transformer.h.0.attn.c_attn.bias"
    original = model.get_parameter(fqn).detach().clone()
    prepared = KbitPreparedModel(model, precision=precision, keep_originals=precision in UPCASTS).prepare()
    adapted = adapt("gpt2", model, bias="lora_only")  # bitsandbytes casts biases to the dtype of the input as it runs
    for seed in range(2):
        step("gpt2", adapted, seed=seed)
    prepared.export(tmp_path / "base")
    exported = load_file(tmp_path / "base" / "model.safetensors")[fqn]
    assert "parameter" not in prepared.verify().differences[fqn]
    with pytest.raises(ManifestError, match=f"{fqn} was trained"):
        prepared.manifest()
    if precision in UPCASTS:
        with pytest.raises(RestoreError, match=f"{fqn} was trained"):
            prepared.restore("error")
    report = prepared.restore()
    live = adapted.get_parameter(f"base_model.model.{fqn.replace('.bias', '.base_layer.bias')}")
    assert report.replaced == ()
    assert fqn in report.trained
    assert exported.dtype == live.dtype == original.dtype
    assert torch.equal(exported, live)
    assert not torch.equal(live, original)


@pytest.mark.parametrize("precision", UPCASTS)
def test_a_trained_bias_of_a_quantized_layer_is_discarded(precision: str) -> None:
    model = zoo.load("gpt2")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision, keep_originals=True).prepare()
    adapted = adapt("gpt2", model, bias="all")
    step("gpt2", adapted)
    prepared.restore("discard")
    adapted.unload()
    assert before.diff(Snapshot(model)) == []


@pytest.mark.parametrize("audit", [False, True])
def test_an_audit_sees_one_element_that_a_sample_misses(audit: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(4096, 64)).bfloat16()
    prepared = KbitPreparedModel(model, precision="norms", audit=audit).prepare()
    weight = model[0].weight
    weight.data[7, 1] += 1.0
    assert ("value" in prepared.verify().differences.get("0.weight", {})) is audit
    if audit:
        with pytest.raises(ExportError, match="is frozen, but its values have changed"):
            prepared.export(tmp_path / "base")
    assert ("0.weight" in prepared.restore().replaced) is audit


@pytest.fixture
def swapping() -> Iterator[None]:
    """Models are moved and cast by swapping their tensors, as torch does with tensor subclasses."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("precision", Precision, ids=str)
def test_a_model_whose_tensors_were_swapped_is_restored(precision: Precision, swapping: None, tmp_path: Path) -> None:
    model = zoo.load("llama", None)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    model.to(torch.float64)
    model.to(torch.float32 if precision is Precision.FULL else torch.bfloat16)
    assert {"value", "parameter"}.isdisjoint({what for rows in prepared.verify().differences.values() for what in rows})
    prepared.export(tmp_path / "base")
    report = prepared.restore()
    assert (report.trained, report.replaced) == ((), ())
    # A swapped parameter is without the attributes that transformers gave it: torch takes those of the new tensor.
    assert before.diff(Snapshot(model), moved=True, ignore=(": _is_hf_initialized",)) == []


@pytest.mark.parametrize("precision", Precision, ids=str)
def test_no_tensor_has_a_weak_reference(precision: Precision) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt("llama", model, modules_to_save=True)
    prepared.adopt(peft_model)
    step("llama", peft_model)
    with prepared.suspended():
        assert [fqn for fqn, p in peft_model.named_parameters() if weakref.getweakrefcount(p)] == []
    tensors = [t for _, m in model.named_modules() for t in (*m._parameters.values(), *m._buffers.values())]
    assert not any(weakref.getweakrefcount(tensor) for tensor in tensors if tensor is not None)


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
def test_an_8_bit_layer_without_its_scales_is_refused_by_name(tmp_path: Path) -> None:
    model = zoo.load("llama", "int8")
    prepared = KbitPreparedModel(model).prepare()
    layer: Any = model.model.layers[0].self_attn.q_proj
    layer.weight.SCB = layer.state.SCB = None  # as PEFT's DoRA leaves it after two steps on a CPU
    for write in (lambda: prepared.export(tmp_path / "base"), prepared.manifest):
        with pytest.raises((ExportError, ManifestError), match="scales of its quantized weight are gone") as caught:
            write()
        assert caught.value.fqn == "model.layers.0.self_attn.q_proj"
    assert not (tmp_path / "base").exists()


def test_what_others_replace_is_freed_at_once() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    gc.disable()
    try:
        finalized: list[str] = []
        weakref.finalize(model.lm_head.weight.untyped_storage(), finalized.append, "storage")
        reference = weakref.ref(model.lm_head.weight)
        model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
        assert reference() is None
    finally:
        gc.enable()
    assert LM_HEAD in prepared.restore().replaced


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_every_tensor_of_a_merged_model_has_the_loaded_half_dtype(
    quant: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = zoo.load("llama", quant, dtype)
    prepared = KbitPreparedModel(model, precision="full").prepare()
    adapt("llama", model)
    prepared.export(tmp_path / "merged", merge_adapters=True)
    assert {t.dtype for t in load_file(tmp_path / "merged" / "model.safetensors").values()} == {dtype}


def test_the_cache_of_generation_is_as_it_was() -> None:
    model = zoo.load("llama")
    before = model.generation_config.use_cache
    with KbitPreparedModel(model):
        model.generation_config.use_cache = not before
    assert model.generation_config.use_cache == before
