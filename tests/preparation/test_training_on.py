"""Training on after a restore, with the adapter still on the base, warns once that the base is trained too."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, prepare_model_for_kbit_training, restore
from kbitwrap.preparation import training_on
from support import zoo
from support.training import adapt

WARNING = r"restore\(\) made \d+ base parameters trainable again.* an adapter still sits on top"


def train(model: nn.Module, parameters: Any = None) -> None:
    optimizer = torch.optim.SGD(parameters or [p for p in model.parameters() if p.requires_grad], lr=0.01)
    model(**zoo.inputs("llama", model)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def restored() -> nn.Module:
    """A model that was trained under its adapter and restored."""
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        model = adapt("llama", prepared.model)
        train(model)
    return model


def test_the_first_step_after_a_restore_warns_and_the_second_does_not() -> None:
    model = restored()
    num_turned_on = sum(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name)
    with pytest.warns(UserWarning, match=WARNING) as caught:
        train(model)
    assert f"made {num_turned_on} base parameters" in str(caught[0].message)
    assert caught[0].filename == __file__
    train(model)


def test_a_step_of_the_drop_in_warns_too() -> None:
    model = adapt("llama", prepare_model_for_kbit_training(zoo.load("llama")))
    restore(model)
    with pytest.warns(UserWarning, match=WARNING):
        train(model)


def test_training_after_the_adapter_was_unloaded_does_not_warn() -> None:
    model = restored().unload()
    train(model)


def test_training_again_once_prepared_again_does_not_warn() -> None:
    model = restored()
    with KbitPreparedModel(model) as prepared:
        train(prepared.model)
    with pytest.warns(UserWarning, match=WARNING):
        train(model)
    train(model)


def test_training_another_model_does_not_warn() -> None:
    model = restored()
    model(**zoo.inputs("llama", model)).loss.backward()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
    other(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_warning_that_is_an_error_is_raised_once() -> None:
    model = restored()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=WARNING):
            train(model)
        train(model)


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    model = restored()
    turned_on = list(training_on._watched.values())[-1]
    assert not any("kbitwrap" in name for module in model.modules() for name in vars(module))
    del model
    gc.collect()
    assert not any(ref() is not None for ref in turned_on)
    assert all(refs is not turned_on for refs in training_on._watched.values())
    train(zoo.load("llama", None))
