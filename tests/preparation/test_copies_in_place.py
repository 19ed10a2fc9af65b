"""A copy that PEFT made of a base module, and ``unload`` put in its place, is nobody's but the user's."""

from __future__ import annotations

import peft
import pytest
import torch

from kbitwrap import KbitPreparedModel
from support import zoo
from support.thorough import every_other
from support.training import adapt

PRECISIONS = pytest.mark.parametrize("precision", ["full", "compute", "norms", "none"])


@PRECISIONS
@pytest.mark.parametrize("flag", every_other([False, True]))
def test_its_flag_stays_as_it_is_in_every_suspension_and_after_each(precision: str, flag: bool) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"), precision=precision).prepare()
    model = prepared.model
    adapt("llama", model, modules_to_save=True).unload()
    copied = model.lm_head.weight
    copied.requires_grad_(flag)
    flags = []
    for _ in range(3):
        with prepared.suspended():
            flags.append(copied.requires_grad)
        flags.append(copied.requires_grad)
    prepared.restore()
    assert model.lm_head.weight is copied
    assert [*flags, copied.requires_grad] == [flag] * 7


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_it_gets_the_dtype_back_that_it_was_copied_in(precision: str) -> None:
    prepared = KbitPreparedModel(zoo.load("llama"), precision=precision).prepare()
    model = prepared.model
    adapted = adapt("llama", model, modules_to_save=True)
    peft.prepare_model_for_kbit_training(model)  # casts the copy too
    adapted.unload()
    assert model.lm_head.weight.dtype == torch.float32
    for _ in range(2):
        with prepared.suspended():
            assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.lm_head.weight.dtype == torch.float32
    prepared.restore()
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("num_rows", [zoo.VOCAB_SIZE - 4, zoo.VOCAB_SIZE + 4])
@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_a_trained_copy_of_a_resized_head_gets_the_original_dtype(precision: str, num_rows: int) -> None:
    model = zoo.load("llama")
    with KbitPreparedModel(model, precision=precision) as prepared:
        model.resize_token_embeddings(num_rows)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
        copy = adapted.base_model.model.lm_head.modules_to_save["default"].weight
        with prepared.suspended():
            assert copy.dtype == torch.bfloat16
            adapted(input_ids=torch.tensor([[1, 2, 3]]))
    assert copy.dtype == adapted.base_model.model.lm_head.original_module.weight.dtype == torch.bfloat16
    adapted(input_ids=torch.tensor([[1, 2, 3]]))


@PRECISIONS
def test_a_trained_copy_from_before_that_others_cast_stays_cast(precision: str) -> None:
    model = zoo.load("llama")
    adapted = adapt("llama", model, modules_to_save=True)
    copied = adapted.base_model.model.lm_head.modules_to_save["default"].weight
    assert copied.dtype == torch.bfloat16
    prepared = KbitPreparedModel(adapted, precision=precision).prepare()
    peft.prepare_model_for_kbit_training(adapted)  # casts adapters too
    assert copied.dtype == torch.float32
    for _ in range(2):
        with prepared.suspended():
            assert copied.dtype == torch.float32
    prepared.restore()
    assert copied.dtype == torch.float32
    assert adapted.base_model.model.lm_head.original_module.weight.dtype == torch.bfloat16
