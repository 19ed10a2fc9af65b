"""What others change in a suspended model is theirs when the suspension ends, and is not undone in silence."""

from __future__ import annotations

import peft
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

from kbitwrap import KbitPreparedModel
from support import zoo
from support.training import adapt, step

UPCASTING = pytest.mark.parametrize("precision", ["full", "compute"])
HEAD = "base_model.model.lm_head"


@UPCASTING
def test_an_adapter_that_is_loaded_while_suspended_stays_loaded(precision: str) -> None:
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = adapt("llama", prepared.model, modules_to_save=True)
        saved = {name: value.clone() for name, value in peft.get_peft_model_state_dict(model).items()}
        step("llama", model)
        copied = model.get_parameter(f"{HEAD}.modules_to_save.default.weight")
        trained = copied.detach().clone()
        with prepared.suspended():
            pass
        assert torch.equal(copied, trained)
        with prepared.suspended():
            peft.set_peft_model_state_dict(model, saved)
        assert not torch.equal(copied, trained)
        for name, value in peft.get_peft_model_state_dict(model).items():
            assert torch.equal(value, saved[name]), name
            assert value.dtype == torch.float32
        model.unload()


@pytest.mark.parametrize("keep_originals", [False, True])
@UPCASTING
def test_a_checkpoint_of_a_trained_base_that_is_loaded_while_suspended_stays_loaded(
    precision: str, keep_originals: bool
) -> None:
    settings = {"freeze": False, "keep_originals": keep_originals}
    prepared = KbitPreparedModel(zoo.load("llama"), precision=precision, **settings).prepare()
    model = prepared.model
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trainable.values():
            parameter += 0.1
    trained = {name: p.detach().clone() for name, p in trainable.items()}
    with prepared.suspended():
        checkpoint = {name: p.detach() + 1 for name, p in trainable.items() if "norm" in name}
        model.load_state_dict(checkpoint, strict=False)
    for name, parameter in trainable.items():
        expected = checkpoint[name].float() if name in checkpoint else trained[name]
        assert torch.equal(parameter, expected), name
    assert {*prepared.restore().trained} == trainable.keys()
    for name, parameter in trainable.items():
        assert torch.equal(parameter, checkpoint.get(name, trained[name].bfloat16())), name


@UPCASTING
def test_an_adapter_that_is_unmerged_while_suspended_is_counted_once(precision: str) -> None:
    with KbitPreparedModel(zoo.load("llama"), precision=precision) as prepared:
        model = adapt("llama", prepared.model, target_modules=["lm_head"], init_lora_weights=False)
        head = model.get_submodule(HEAD)
        before = head.weight.detach().clone()
        model.merge_adapter()
        delta = (head.weight - before).abs().max()
        assert delta > 0.1
        with prepared.suspended():
            model.unmerge_adapter()
        assert (head.weight - before).abs().max() < delta / 50  # what half rounds
        assert head.weight.dtype == torch.float32
        assert {"parameter", "value"} & prepared.verify().differences["lm_head.weight"].keys()
        model.unload()
    assert prepared.restore().replaced == ("lm_head.weight",)


def test_a_base_that_peft_froze_while_suspended_stays_frozen() -> None:
    with KbitPreparedModel(zoo.load("llama"), freeze=False) as prepared:
        with prepared.suspended():
            model = adapt("llama", prepared.model)
        assert not [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
        model.unload()


def test_a_hook_of_accelerate_that_comes_or_goes_while_suspended_leaves_the_forward_in_float32() -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model) as prepared:
        norm, x = model.model.norm, torch.randn(3, 64).bfloat16()
        expected = norm(x)
        for change in (lambda: add_hook_to_module(norm, ModelHook()), lambda: remove_hook_from_module(norm)):
            with prepared.suspended():
                change()
                assert not torch.equal(norm(x), expected)
            assert torch.equal(norm(x), expected)
