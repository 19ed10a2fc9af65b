"""The zoo keeps its promises: each model loads, is quantized, is deterministic and trains."""

from __future__ import annotations

import bitsandbytes as bnb
import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer

import zoo

QUANTIZED = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
CASES = [(name, "nf4", torch.bfloat16) for name in zoo.ARCHITECTURES]
CASES += [(name, "int8", torch.float16) for name in zoo.CORE]


def num_quantized(model: torch.nn.Module) -> int:
    return sum(isinstance(module, QUANTIZED) for module in model.modules())


def adapted(name: str, quant: str, dtype: torch.dtype, *, modules_to_save: bool = False) -> peft.PeftModel:
    torch.manual_seed(0)
    config = zoo.lora_config(name, modules_to_save=modules_to_save)
    return peft.get_peft_model(zoo.load(name, quant, dtype), config)


@pytest.mark.parametrize(("name", "quant", "dtype"), CASES)
def test_model_is_quantized_and_sees_every_parameter(name: str, quant: str, dtype: torch.dtype) -> None:
    model = zoo.load(name, quant, dtype)
    assert (num_quantized(model) > 0) == zoo.ARCHITECTURES[name].is_quantized
    head = [module for fqn, module in model.named_modules() if fqn.endswith(zoo.ARCHITECTURES[name].head)]
    assert len(head) == 1
    assert not any(isinstance(module, QUANTIZED) for module in head[0].modules())
    assert model.supports_gradient_checkpointing == zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    constant = [fqn for fqn, parameter in model.named_parameters() if parameter.unique().numel() == 1]
    assert constant == []


@pytest.mark.parametrize("modules_to_save", [False, True], ids=["lora", "lora-and-head"])
@pytest.mark.parametrize(("name", "quant", "dtype"), CASES)
def test_first_step_reaches_every_adapter_weight(
    name: str, quant: str, dtype: torch.dtype, modules_to_save: bool
) -> None:
    model = adapted(name, quant, dtype, modules_to_save=modules_to_save)
    value = zoo.loss(name, model, zoo.inputs(name, model))
    value.backward()

    assert value.ndim == 0
    assert torch.isfinite(value)
    trainable = {fqn: parameter for fqn, parameter in model.named_parameters() if parameter.requires_grad}
    if zoo.ARCHITECTURES[name].is_quantized:
        adapters = [module for module in model.modules() if isinstance(module, LoraLayer)]
        assert all(isinstance(module.get_base_layer(), QUANTIZED) for module in adapters)
    assert any("modules_to_save" in fqn for fqn in trainable) == modules_to_save
    assert [fqn for fqn, parameter in trainable.items() if parameter.grad is None] == []
    assert [fqn for fqn, parameter in trainable.items() if not parameter.grad.isfinite().all()] == []
    assert [fqn for fqn, parameter in trainable.items() if not parameter.grad.any()] == []


@pytest.mark.parametrize("name", zoo.CORE)
def test_two_loads_compute_the_same(name: str) -> None:
    first, second = (
        zoo.loss(name, model, zoo.inputs(name, model))
        for model in (zoo.load(name, eval_mode=False), zoo.load(name, eval_mode=False))
    )
    assert torch.equal(first, second)
