"""PEFT's adapters on a prepared model: those that need more than LoRA does, and hints where PEFT is used wrongly."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from kbitwrap import KbitPreparedModel, Precision, UnsupportedModelError, build_plan
from support import zoo
from support.snapshot import Snapshot
from support.thorough import every_other
from support.training import adapt, step

# ----------------------------------------------------------------------------------------------------
# Hints.
# ----------------------------------------------------------------------------------------------------


def test_a_model_wrapped_for_several_devices_is_refused_with_what_it_wraps() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for wrapper in (DistributedDataParallel(zoo.load("llama")), nn.DataParallel(zoo.load("llama"))):
            with pytest.raises(UnsupportedModelError, match=r"Parallel has no method .* what it wraps, its \.module,"):
                KbitPreparedModel(wrapper)
            with KbitPreparedModel(wrapper.module) as prepared:
                assert not prepared.verify()
    finally:
        distributed.destroy_process_group()


def test_a_wrapper_given_for_its_model_says_that_the_model_is_meant(tmp_path: Path) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"))
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    for call, name in (
        (lambda: peft.get_peft_model(prepared, zoo.lora_config("llama")), "modules"),
        (lambda: peft.inject_adapter_in_model(zoo.lora_config("llama"), prepared), "named_modules"),
        (lambda: Trainer(model=prepared, args=args), "to"),
    ):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; it wraps a model"):
            call()
    with pytest.raises(TypeError, match="not callable"):
        prepared(**zoo.inputs("llama", prepared.model))


def test_a_wrapper_has_no_attribute_of_its_model() -> None:
    prepared = KbitPreparedModel(zoo.load("llama"))
    assert not hasattr(prepared, "named_modules")
    assert getattr(prepared, "hf_device_map", None) is None
    with pytest.raises(AttributeError, match=r"^'KbitPreparedModel' object has no attribute 'nowhere'"):
        prepared.nowhere  # noqa: B018


@pytest.mark.parametrize("has_adapter", [False, True], ids=["bare", "with an adapter"])
def test_a_model_that_peft_has_prepared_is_named(has_adapter: bool) -> None:
    model = peft.prepare_model_for_kbit_training(zoo.load("llama"))
    if has_adapter:
        model = adapt("llama", model, modules_to_save=True)
    said = r"config says torch\.bfloat16, and all that is not quantized is frozen and float32"
    plan = build_plan(model, precision="full")
    assert re.search(said, str(plan))
    assert plan.to_dict()["warnings"][0] == plan.warnings[0]
    with pytest.warns(UserWarning, match=said), KbitPreparedModel(model, precision="full") as prepared:
        assert prepared.plan.added_bytes == 0


def test_a_model_that_peft_has_prepared_is_named_when_it_has_run() -> None:
    model = adapt("gpt2", peft.prepare_model_for_kbit_training(zoo.load("gpt2"), use_gradient_checkpointing=False))
    step("gpt2", model)  # in which bitsandbytes rounds the biases of its layers to half
    with pytest.warns(UserWarning, match="is frozen and float32; nothing is left to cast"):
        KbitPreparedModel(model, precision="full").prepare()


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_as_it_was_loaded_is_not_taken_for_one_that_peft_prepared(name: str) -> None:
    frozen = zoo.load(name).requires_grad_(False)
    restored = zoo.load(name)
    with KbitPreparedModel(restored, precision="full"):
        pass
    for model in (zoo.load(name), frozen, zoo.load(name, "int8", torch.float32), restored):
        assert not build_plan(model).alarms
    unquantized = build_plan(peft.prepare_model_for_kbit_training(zoo.load(name, None)))
    assert not [alarm for alarm in unquantized.alarms if "upcast before" in alarm]


# ----------------------------------------------------------------------------------------------------
# aLoRA: its hooks on a block are taken away in backward, when the block has been computed again.
# ----------------------------------------------------------------------------------------------------

INVOCATION = 9


def with_alora(model: nn.Module, **kwargs: Any) -> peft.PeftModel:
    return adapt("llama", model, task_type="CAUSAL_LM", alora_invocation_tokens=[INVOCATION], **kwargs)


def alora_step(model: peft.PeftModel) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    batch = zoo.inputs("llama", model)
    batch["input_ids"][:, 6] = INVOCATION
    loss = model.train()(**batch).loss
    loss.backward()
    gradients = {fqn: p.grad for fqn, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("layers", [None, [1]], ids=["every block", "the last block"])
@pytest.mark.parametrize("precision", ["full", "compute"])
def test_alora_trains_as_after_pefts_function(precision: str, layers: list[int] | None) -> None:
    reentrant = {"use_reentrant": True}  # their default, of which torch warns where it is not given
    model = peft.prepare_model_for_kbit_training(zoo.load("llama"), gradient_checkpointing_kwargs=reentrant)
    theirs = alora_step(with_alora(model, layers_to_transform=layers))
    assert any(gradient.any() for gradient in theirs[1].values())
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = with_alora(prepared.model, layers_to_transform=layers)
        ours = alora_step(model)
        assert not prepared.verify()
        model.unload()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_alora_trains_with_the_defaults_before_and_after_a_suspension_and_leaves_no_hook() -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    with KbitPreparedModel(model) as prepared:
        assert not model.get_input_embeddings()._forward_hooks
        peft_model = with_alora(model)
        first = alora_step(peft_model)
        with prepared.suspended():
            assert not any(module._forward_pre_hooks for module in model.modules())
        torch.testing.assert_close(alora_step(peft_model), first, rtol=0, atol=0)
        peft_model.unload()
        assert prepared.restore().foreign == ()
    for block in model.model.layers:  # what PEFT's hooks leave on a block of any model, prepared or not
        del block._peft_gradient_checkpointing_forward_hooks
        block._is_full_backward_hook = None
    assert before.diff(Snapshot(model)) == []


def test_what_is_given_to_a_block_that_alora_hooks_stays_as_it_is() -> None:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        model = with_alora(prepared.model).train()
        batch = zoo.inputs("llama", model)
        embedded = model.get_input_embeddings()(batch["input_ids"]).detach()
        model(inputs_embeds=embedded, labels=batch["labels"], alora_offsets=[4, 4]).loss.backward()
        assert not embedded.requires_grad
        assert embedded.grad is None
        model.unload()


# ----------------------------------------------------------------------------------------------------
# Copies that PEFT makes of base modules while the model is suspended.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_a_copy_made_while_suspended_is_stored_and_trained_as_one_made_while_prepared(precision: str) -> None:
    results = {}
    for is_suspended in (False, True):
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision=precision) as prepared:
            with prepared.suspended() if is_suspended else contextlib.nullcontext():
                peft_model = adapt("llama", model, modules_to_save=True)
                copied = peft_model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight")
                assert copied.dtype == (torch.bfloat16 if is_suspended else torch.float32)
            assert copied.dtype == torch.float32
            found = step("llama", peft_model)
            value = copied.detach().clone()
            with prepared.suspended():
                assert copied.dtype == torch.bfloat16
            assert torch.equal(copied, value)
            assert copied.dtype == torch.float32
            assert not prepared.verify()
            report = prepared.restore()
            assert report.trained == ("lm_head.weight",)
            assert torch.equal(copied, value.bfloat16())
            results[is_suspended] = *found, report
        original = model.lm_head.original_module.weight
        torch.testing.assert_close(original, zoo.load("llama").lm_head.weight, rtol=0, atol=0)
    torch.testing.assert_close(results[True][:2], results[False][:2], rtol=0, atol=0)
    assert results[True][2] == results[False][2]


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_a_copy_that_somebody_keeps_in_half_stays_so_through_a_suspension(precision: str) -> None:
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = adapt("llama", prepared.model, modules_to_save=True)
        copied = model.get_parameter("base_model.model.lm_head.modules_to_save.default.weight")
        copied.data = copied.data.bfloat16()
        with prepared.suspended():
            pass
        assert copied.dtype == torch.bfloat16
        model.unload()


@pytest.mark.parametrize("precision", Precision)
def test_what_is_replaced_while_suspended_is_freed_at_once(precision: Precision) -> None:
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = adapt("llama", prepared.model, modules_to_save=True)
        copied = model.get_submodule("base_model.model.lm_head.modules_to_save.default")
        copied.weight.data = copied.weight.data.bfloat16()
        with prepared.suspended():
            for module in (copied, prepared.model.model.norm, prepared.model.model.embed_tokens):
                memory = StorageWeakRef(module.weight.untyped_storage())
                module.weight = nn.Parameter(module.weight.detach().clone())
                assert memory.expired()
        model.unload()


# ----------------------------------------------------------------------------------------------------
# DoRA: it makes a parameter of a view of the weight.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_dora_on_embeddings_trains_under_compute_as_under_full(name: str) -> None:
    results = []
    for precision in ("full", "compute"):
        with KbitPreparedModel(zoo.load(name), precision=precision) as prepared:
            model = adapt(name, prepared.model, use_dora=True, target_modules=["embed_tokens", "q_proj"])
            results.append([step(name, model, seed=seed) for seed in (0, 1)])
            assert not prepared.verify()
            assert prepared.restore().trained == ()
    assert any("lora_magnitude_vector" in fqn for fqn in results[0][0][1])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_parameter_made_of_an_upcast_weight_is_trained_by_itself() -> None:
    with KbitPreparedModel(zoo.load("llama"), precision="compute") as prepared:
        embeddings, layer = prepared.model.get_input_embeddings(), nn.Linear(64, 128, bias=False)
        layer.weight = nn.Parameter(embeddings.weight.view(128, 64))
        assert torch.equal(layer.weight, embeddings.weight)
        assert (layer.weight.dtype, layer.weight.requires_grad) == (torch.float32, True)
        layer(torch.ones(1, 64)).sum().backward()
        assert layer.weight.grad.eq(1).all()
        assert not prepared.verify()


# ----------------------------------------------------------------------------------------------------
# Adapters that return float32.
# ----------------------------------------------------------------------------------------------------

QKV = ["q_proj", "k_proj", "v_proj"]
FLOAT32_ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "ia3": lambda: peft.IA3Config(target_modules=QKV, feedforward_modules=[]),
    "ia3 on keys and values": lambda: peft.IA3Config(target_modules=QKV[1:], feedforward_modules=[]),
    "randlora": lambda: peft.RandLoraConfig(r=4, target_modules=QKV, projection_prng_key=0),
    "road": lambda: peft.RoadConfig(target_modules=QKV, group_size=4),
}
SAID = r"the adapter on model\.layers\.0\.self_attn\.._proj returns float32 .* autocast .* 'full' or 'compute'"


@pytest.mark.parametrize("name", every_other(FLOAT32_ADAPTERS))
def test_adapters_that_a_half_model_cannot_go_on_with_are_named_with_the_way_out(name: str) -> None:
    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(model, FLOAT32_ADAPTERS[name]())

    with pytest.raises(RuntimeError, match="same dtype"):
        step("llama", adapted(zoo.load("llama")))  # it is not the preparation's doing
    for precision in ("norms", "none"):
        with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
            model = adapted(prepared.model)
            with pytest.warns(UserWarning, match=SAID):
                prepared.adopt(model)
            assert re.search(SAID, str(prepared.plan))
            prepared.adopt(model)  # which is said once
            with pytest.raises(RuntimeError, match="same dtype"):
                step("llama", model)
            with torch.autocast("cpu", torch.bfloat16):
                assert torch.isfinite(step("llama", model)[0])
                assert not build_plan(adapted(zoo.load("llama")), precision=precision).warnings
    model = adapted(zoo.load("llama"))
    before = Snapshot(model)
    assert re.search(SAID, str(build_plan(model)))
    assert before.diff(Snapshot(model)) == []
    for precision in ("full", "compute"):
        with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
            model = adapted(prepared.model)
            prepared.adopt(model)
            assert torch.isfinite(step("llama", model)[0])


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_nothing_is_said_of_adapters_that_return_what_their_layer_returns(quant: str) -> None:
    for config in (
        zoo.lora_config("llama", modules_to_save=True),
        zoo.lora_config("llama", target_modules=["embed_tokens", "q_proj", "lm_head"]),
        peft.VeraConfig(r=4, target_modules=["q_proj"], projection_prng_key=0),
        peft.FourierFTConfig(target_modules=["q_proj"], n_frequency=8),
    ):
        with KbitPreparedModel(zoo.load("llama", quant)) as prepared:
            model = peft.get_peft_model(prepared.model, config)
            prepared.adopt(model)
            assert prepared.plan.warnings == ()
            assert torch.isfinite(step("llama", model)[0])


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_layers_that_peft_replicates_get_the_original_dtype(precision: str) -> None:
    config = zoo.lora_config("llama", layer_replication=[(0, 2), (1, 2)])  # copies, over the parameters of the old ones
    before = {fqn: parameter.detach().clone() for fqn, parameter in zoo.load("llama").named_parameters()}
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = peft.get_peft_model(prepared.model, config)
        step("llama", model)
        with prepared.suspended():
            assert {p.dtype for fqn, p in model.named_parameters() if "norm" in fqn} == {torch.bfloat16}
        step("llama", model)
    norms = {fqn.removeprefix("base_model.model."): p for fqn, p in model.named_parameters() if "norm" in fqn}
    assert len(norms) == 5
    assert all(p.dtype == torch.bfloat16 and torch.equal(p, before[fqn]) for fqn, p in norms.items())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's, once, of PEFT's own forward
def test_asking_an_adapter_that_keeps_tensors_what_it_returns_leaves_them_where_they_are() -> None:
    config = peft.ShiraConfig(r=4, target_modules=["lm_head"])  # its forward moves indices that are no parameter
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        model = peft.get_peft_model(prepared.model, config)
        before = Snapshot(model)
        prepared.adopt(model)
        assert before.diff(Snapshot(model)) == []
        assert torch.isfinite(step("llama", model)[0])


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_an_adaption_prompt_is_no_difference(precision: str) -> None:
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM")
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = peft.get_peft_model(prepared.model, config)
        assert not prepared.verify()
        step("llama", model)
        assert not prepared.verify()
        with model.disable_adapter():
            assert not prepared.verify()
        with prepared.suspended():
            pass
        assert not prepared.verify()
        model.base_model.disable_adapter_layers()  # as before it was made: PEFT cannot unload it
        assert prepared.restore().replaced == ()
