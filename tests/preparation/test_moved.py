"""A parameter that others moved to another place while the model was prepared is found there again."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from kbitwrap import KbitPreparedModel
from support import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("precision", ["full", "norms"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_pruned_weight_gets_its_dtype_and_flag_and_keeps_its_mask(precision: str, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1, bias=bias)).bfloat16()
    convolution = model[1]
    weight = convolution.weight
    original = weight.detach().clone()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    prune.random_unstructured(convolution, "weight", amount=0.5)
    mask = convolution.weight_mask
    with prepared.suspended():
        assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, True)
    report = prepared.restore()
    assert convolution.weight_orig is weight
    assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, True)
    assert torch.equal(weight, original)
    assert convolution.weight_mask is mask
    assert convolution(torch.ones(1, 4, 3).bfloat16()).dtype == torch.bfloat16
    assert report.replaced == ("1.weight",)
    assert report.foreign == ("1: forward pre hook RandomUnstructured",)


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_parameters_of_replicated_layers_get_their_dtypes_and_flags(precision: str) -> None:
    model = zoo.load("llama")
    before = {id(p): (p, p.dtype, p.requires_grad) for p in model.parameters()}
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    config = peft.LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (0, 2)])
    peft_model = peft.get_peft_model(model, config)
    prepared.restore()
    assert {id(p) for p in model.parameters()} >= before.keys()
    assert all((p.dtype, p.requires_grad) == (dtype, flag) for p, dtype, flag in before.values())
    peft_model(**zoo.inputs("llama", model)).loss.backward()
