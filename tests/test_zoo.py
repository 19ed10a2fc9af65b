"""The zoo keeps its promises: each model loads, is quantized, is deterministic and trains."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from peft.tuners.lora import LoraLayer

from support import zoo
from support.pairwise import pairwise
from support.thorough import few

QUANTIZED = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
CASES = [(name, "nf4", torch.bfloat16) for name in zoo.ARCHITECTURES]
CASES += [(name, "int8", torch.float16) for name in zoo.CORE]


NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
VALUES = (type(None), bool, int, float, str, bytes, re.Pattern, torch.dtype, torch.device, torch.Size)


def structure(value: Any, path: str, seen: dict[Any, str]) -> Iterator[tuple[object, ...]]:
    """All that is reachable from a value: classes, attributes in order, bytes, and which places hold one object."""
    if isinstance(value, NAMED):
        yield path, value.__module__, value.__qualname__  # torch makes a class and hooks for each parametrized module
        return
    if isinstance(value, VALUES):
        yield path, repr(value)
        return
    if id(value) in seen:
        yield path, "the object at", seen[id(value)]
        return
    seen[id(value)] = path
    yield path, type(value).__qualname__
    if isinstance(value, types.MethodType):
        yield from structure([value.__func__, value.__self__], f"{path}()", seen)
        return
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        yield path, value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad
        yield path, seen.setdefault(("storage", storage._cdata), path)
        yield path, torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()
    elif isinstance(value, dict):
        is_of_hooks = path.endswith("_hooks")  # keys are numbers that no two hooks share
        for key, item in value.items():
            yield path, "" if is_of_hooks else repr(key)
            yield from structure(item, f"{path}[{'' if is_of_hooks else repr(key)}]", seen)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from structure(item, f"{path}[{index}]", seen)
    elif isinstance(value, (set, frozenset)):
        yield path, sorted(map(repr, value))
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    attributes = getattr(value, "__dict__", {}) | {name: getattr(value, name, "absent") for name in slots}
    if type(value).__name__ == "_WrappedHook":  # a copy lacks the name and the docstring of the hook
        attributes = {"hook": value.hook, "module": value.module() if value.with_module else None}
    for name, item in attributes.items():
        yield from structure(item, f"{path}.{name}", seen)


# What a copy is made of depends on the architecture and, alone, on the quantization.
OTHERS = pairwise(("llama", "gpt2", "mixtral"), ("nf4-double", "fp4", "int8", None), (torch.float16, torch.bfloat16))
FOUR_BIT = ("nf4", torch.bfloat16)
LOADS = [(name, "nf4", torch.bfloat16) for name in zoo.ARCHITECTURES] + OTHERS


@pytest.mark.parametrize(("name", "quant", "dtype"), few(LOADS, [(name, *FOUR_BIT) for name in zoo.CORE[::4]] + OTHERS))
def test_a_copied_model_equals_one_loaded_from_the_checkpoint(name: str, quant: str | None, dtype: torch.dtype) -> None:
    loaded, copied = zoo.load(name, quant, dtype, use_safetensors=True), zoo.load(name, quant, dtype)
    expected, found = list(structure(loaded, "", {})), list(structure(copied, "", {}))
    assert len(expected) > 500
    assert [(a, b) for a, b in zip(expected, found, strict=False) if a != b][:3] == []
    assert len(expected) == len(found)
    second = zoo.load(name, quant, dtype)
    pointers = [{t.untyped_storage().data_ptr() for t in (*m.parameters(), *m.buffers())} for m in (copied, second)]
    assert not pointers[0] & pointers[1] - {0}


def num_quantized(model: torch.nn.Module) -> int:
    return sum(isinstance(module, QUANTIZED) for module in model.modules())


def adapted(name: str, quant: str, dtype: torch.dtype, *, modules_to_save: bool = False) -> peft.PeftModel:
    torch.manual_seed(0)
    config = zoo.lora_config(name, modules_to_save=modules_to_save)
    return peft.get_peft_model(zoo.load(name, quant, dtype), config)


@pytest.mark.parametrize(("name", "quant", "dtype"), few(CASES, [*CASES[: len(zoo.CORE)], CASES[-1]]))
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


@pytest.mark.usefixtures("not_repacking")  # bitsandbytes repacks no layer that is narrower than a block
@pytest.mark.parametrize("modules_to_save", [False, True], ids=["lora", "lora-and-head"])
@pytest.mark.parametrize(("name", "quant", "dtype"), few(CASES, [("llama", *FOUR_BIT), ("bert", *FOUR_BIT)]))
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
def test_two_loads_of_a_model_compute_the_same_loss(name: str) -> None:
    first, second = (
        zoo.loss(name, model, zoo.inputs(name, model))
        for model in (zoo.load(name, eval_mode=False), zoo.load(name, eval_mode=False))
    )
    assert torch.equal(first, second)
