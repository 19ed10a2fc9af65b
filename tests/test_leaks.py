"""After a restore nothing is kept alive: no tensor, no model, no wrapper, no hook."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import kbitwrap
from campaign import cycles
from kbitwrap import KbitPreparedModel, Precision, prepare_model_for_kbit_training
from support import zoo
from support.thorough import every_other
from support.training import adapt, step

PRECISIONS = tuple(Precision)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors_held(root: object, but: nn.Module) -> list[torch.Tensor]:
    """The tensors that an object holds otherwise than through a model."""
    found, seen, stack = [], {id(but)}, [root]
    while stack:
        one: Any = stack.pop()
        if id(one) in seen or isinstance(one, (type, types.ModuleType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, types.FunctionType):
            stack += [one.__closure__, one.__defaults__]
        else:
            stack += gc.get_referents(one)
    return found


@pytest.mark.parametrize("precision", every_other(PRECISIONS), ids=str)
def test_a_restored_wrapper_holds_no_tensor_but_through_its_model(precision: Precision) -> None:
    model = zoo.load("gemma2")
    prepared = KbitPreparedModel(model, precision=precision, keep_originals=True).prepare()
    assert tensors_held(prepared, model)
    peft_model = adapt("gemma2", model)
    prepared.adopt(peft_model)
    step("gemma2", peft_model)
    with prepared.suspended():
        pass
    prepared.manifest()
    prepared.restore()
    assert tensors_held(prepared, model) == []


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("way", ["restored", "failed", "drop-in"])
@pytest.mark.usefixtures("no_collection")
def test_deleting_a_restored_model_frees_it_at_once(
    way: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("llama")
    references = [weakref.ref(module) for module in model.modules()]
    prepared = None
    if way == "drop-in":
        prepare_model_for_kbit_training(model, precision=precision)
        references.append(weakref.ref(kbitwrap.prepared_of(model)))
        kbitwrap.restore(model)
    else:
        prepared = KbitPreparedModel(model, precision=precision)
        references.append(weakref.ref(prepared))
        if way == "failed":
            monkeypatch.setattr("kbitwrap.preparation.preparation.ModelState", None)
            with pytest.raises(kbitwrap.EditError):
                prepared.prepare()
        else:
            with prepared, prepared.suspended():
                pass
    del model, prepared
    # A 4-bit layer and its weight hold each other, prepared or not.
    assert {type(one).__name__ for reference in references if (one := reference()) is not None} == {"Linear4bit"}


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_preparing_over_and_over_holds_no_more(seed: int) -> None:
    assert [line for violations in cycles.trials(seed, 100) for line in violations] == []
