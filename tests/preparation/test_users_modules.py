"""A module that the user put in the place of a half one is the user's, whatever its dtype."""

from __future__ import annotations

import copy
from pathlib import Path

import peft
import pytest
import torch
from torch import nn

from kbitwrap import ExportError, KbitPreparedModel
from support import zoo
from support.training import step


@pytest.mark.parametrize("precision", ["full", "compute"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_new_float32_head_is_left_alone_and_reported(precision: str, is_trained: bool, tmp_path: Path) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    head = nn.Linear(model.lm_head.in_features, 3, bias=False).requires_grad_(is_trained)
    values = head.weight.detach().clone()
    model.lm_head = head
    with prepared.suspended():
        assert (head.weight.dtype, torch.equal(head.weight, values)) == (torch.float32, True)
    with pytest.raises(ExportError, match="lm_head"):
        prepared.export(tmp_path / "base")
    report = prepared.restore()
    assert (head.weight.dtype, torch.equal(head.weight, values)) == (torch.float32, True)
    assert report.replaced == ("lm_head.weight",)
    assert report.trained == ()


@pytest.mark.parametrize("precision", ["full", "compute"])
@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_copy_that_peft_made_stands_as_the_module_after_a_merge_and_is_rounded(
    precision: str, is_suspended: bool
) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"], task_type="CAUSAL_LM")
    if is_suspended:
        with prepared.suspended():
            peft_model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    else:
        peft_model = peft.get_peft_model(model, config)
    step("llama", peft_model)
    merged = peft_model.merge_and_unload()
    assert {module.weight.dtype for module in (merged.lm_head, merged.model.norm)} == {torch.float32}
    trained = copy.deepcopy(merged.lm_head.weight.detach())
    prepared.restore()
    assert torch.equal(merged.lm_head.weight, trained.bfloat16())
    assert {module.weight.dtype for module in (merged.lm_head, merged.model.norm)} == {torch.bfloat16}
    assert not any("_kbitwrap_prepared" in vars(module) for module in merged.modules())
