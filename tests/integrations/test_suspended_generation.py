"""Generating from a suspended model changes nothing of a training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, LifecycleState
from support import zoo
from support.snapshot import tensor_digest
from support.thorough import few
from support.trainers import NUM_STEPS, adapt, load_base, outcome, prompt, train, train_prepared, trained_weights

PRECISIONS = ("full", "norms", "none")


pytestmark = [
    # These two names are those of every transformers that is supported; 5.23 calls them `activation_checkpointing…`.
    pytest.mark.filterwarnings(
        r"ignore:`gradient_checkpointing(_kwargs)?` is deprecated:FutureWarning:transformers\.training_args"
    ),
]


# ----------------------------------------------------------------------------------------------------
# An optimizer of one's own, and suspensions.
# ----------------------------------------------------------------------------------------------------

Between = Callable[[KbitPreparedModel, peft.PeftModel], None]


def generate_suspended(*, do_sample: bool) -> Between:
    def between(prepared: KbitPreparedModel, model: peft.PeftModel) -> None:
        random_state = torch.get_rng_state()
        with prepared.suspended():
            assert not any(module.training for module in model.get_base_model().modules())
            assert model.config.use_cache
            lora = [p for fqn, p in model.named_parameters() if "lora_" in fqn]
            others = [p for fqn, p in model.named_parameters() if "lora_" not in fqn]
            assert {p.dtype for p in others} == {torch.bfloat16, torch.uint8}
            assert {p.dtype for p in lora} == {torch.float32}
            tokens = model.generate(**prompt(model), max_new_tokens=8, min_new_tokens=8, do_sample=do_sample)
            assert tokens.shape == (1, 14)
            assert torch.equal(torch.get_rng_state(), random_state) != do_sample

    return between


def generate_prepared(prepared: KbitPreparedModel, model: peft.PeftModel) -> None:
    model.generate(**prompt(model), max_new_tokens=8, min_new_tokens=8, do_sample=True)


def do_nothing(prepared: KbitPreparedModel, model: peft.PeftModel) -> None:
    pass


def train_by_hand(precision: str, modules_to_save: bool, between: Between) -> list[Any]:
    """Train with one optimizer, and return everything that could tell one run from another."""
    prepared = KbitPreparedModel(load_base(), precision=precision).prepare()
    model = adapt(prepared.model, modules_to_save=modules_to_save).train()
    trainable = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=1e-2)
    losses = []
    for seed in range(NUM_STEPS):
        loss = zoo.loss("llama", model, zoo.inputs("llama", model, seed=seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        between(prepared, model)
    assert trainable == {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    assert len(set(losses)) == NUM_STEPS
    moments = [tensor_digest(value) for state in optimizer.state.values() for value in state.values()]
    return [losses, trained_weights(model), moments, tensor_digest(torch.get_rng_state())]


@functools.cache
def uninterrupted(precision: str, modules_to_save: bool) -> list[Any]:
    return train_by_hand(precision, modules_to_save, do_nothing)


@pytest.mark.parametrize(
    ("precision", "modules_to_save", "do_sample"),
    few(
        [(*one, does) for one in (("full", True), ("norms", False), ("none", False)) for does in (False, True)],
        [("full", True, True), ("norms", False, False)],
    ),
)
def test_an_optimizer_stays_valid_across_suspensions(precision: str, modules_to_save: bool, do_sample: bool) -> None:
    suspended = train_by_hand(precision, modules_to_save, generate_suspended(do_sample=do_sample))
    assert suspended == uninterrupted(precision, modules_to_save)


def test_sampling_without_a_suspension_changes_what_follows() -> None:
    assert train_by_hand("full", True, generate_prepared)[0] != uninterrupted("full", True)[0]


@pytest.mark.usefixtures("not_repacking")  # prepared layers never repack, and are to compute the same here
@pytest.mark.parametrize("precision", PRECISIONS)
def test_suspended_generation_is_that_of_the_restored_model(tmp_path: Path, precision: str) -> None:
    model = load_base()
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = train(model, tmp_path, modules_to_save=True).model
        exact = peft_model.get_base_model().lm_head.modules_to_save.default.weight.clone()
        with prepared.suspended(), torch.no_grad():
            suspended = peft_model(**prompt(model)).logits
        assert torch.equal(model.lm_head.modules_to_save.default.weight, exact)
        with torch.no_grad():
            still_prepared = peft_model.eval()(**prompt(model)).logits
    assert exact.dtype == (torch.float32 if precision == "full" else torch.bfloat16)
    assert torch.equal(model.lm_head.modules_to_save.default.weight, exact.bfloat16())
    with torch.no_grad():
        assert torch.equal(suspended, peft_model.eval()(**prompt(model)).logits)
    assert torch.equal(suspended, still_prepared) == (precision == "none")


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_generating_from_a_callback_changes_no_loss(tmp_path: Path, precision: str) -> None:
    prepared = KbitPreparedModel(load_base(), precision=precision).prepare()
    states = []

    def sample(model: nn.Module) -> None:
        with prepared.suspended():
            states.append(prepared.state)
            model.generate(**prompt(model), max_new_tokens=8, do_sample=True)

    with_samples = train(prepared.model, tmp_path, at_step_end=sample)
    assert states == [LifecycleState.SUSPENDED] * NUM_STEPS
    assert outcome(with_samples) == outcome(train_prepared(tmp_path, precision))
