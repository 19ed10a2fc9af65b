"""A wrapper leads back to one model: the model can be copied, the wrapper cannot, and no copy frees memory twice."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, prepared_of
from kbitwrap.model.records import MemoryRef
from support import zoo

COPIERS = (copy.copy, copy.deepcopy, pickle.dumps)


@pytest.mark.parametrize("copier", COPIERS, ids=lambda copier: copier.__name__)
@pytest.mark.parametrize("state", ["new", "prepared", "suspended", "restored"])
def test_a_wrapper_refuses_to_be_copied_and_says_what_to_copy(copier: Callable[[Any], Any], state: str) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"))
    if state != "new":
        prepared.prepare()
    if state == "suspended":
        prepared.suspend()
    if state == "restored":
        prepared.restore()
    for one in (prepared, {"held by": [prepared]}):
        if copier is copy.copy and one is not prepared:
            continue  # a shallow copy of a dict copies no wrapper
        with pytest.raises(TypeError, match=r"copy the model, copy\.deepcopy\(prepared\.model\) inside suspended"):
            copier(one)
    assert prepared.state.value == state


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**zoo.inputs("llama", model)).logits


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_a_prepared_model_is_copied_without_its_wrapper(precision: str) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, precision=precision) as prepared:
        copied = copy.deepcopy(prepared.model)
        assert prepared_of(copied) is None
        assert prepared_of(model) is prepared
        assert {name for name, _ in copied.named_parameters()} == {name for name, _ in model.named_parameters()}
        computed = logits(model)
        with prepared.suspended():
            original = copy.deepcopy(model)
            loaded = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert torch.equal(logits(copied), computed)  # nothing restores it
    has_float32 = torch.float32 in {parameter.dtype for parameter in copied.parameters()}
    assert has_float32 == (precision != "norms")
    assert {name: parameter.dtype for name, parameter in original.named_parameters()} == loaded
    assert torch.equal(logits(original), logits(zoo.load("llama")))


def test_copies_of_a_reference_to_memory_are_the_same_object_and_do_not_free_it_twice() -> None:
    weight = nn.Linear(2, 2).weight
    reference = MemoryRef(weight.untyped_storage())
    assert copy.copy(reference) is reference
    assert copy.deepcopy([reference])[0] is reference
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(reference)
    gc.collect()
    assert not reference.expired()
