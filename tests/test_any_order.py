"""Calls in any order leave a model as it was, and lose nothing that was trained; tests/campaign runs many more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from peft import LoraConfig, get_peft_model
from torch import nn

import kbitwrap
from campaign import sequences
from kbitwrap import KbitPreparedModel, RestoreError
from support import zoo
from support.snapshot import Snapshot
from support.thorough import few

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
PRECISIONS = ("full", "compute", "norms", "none")


class AnyOrder(RuleBasedStateMachine):
    """A rule for each operation of the campaign, so that a sequence that fails is made short."""

    @initialize(seed=st.integers(0, 1 << 16))
    def make(self, seed: int) -> None:
        self.world = sequences.World(seed)

    def teardown(self) -> None:
        if hasattr(self, "world") and not self.world.found:
            sequences.finish(self.world)
            assert self.world.found == []


def _rule(name: str) -> Any:
    def act(self: AnyOrder, seed: int) -> None:
        sequences.act(self.world, name, seed)
        assert self.world.found == []

    act.__name__ = name
    return rule(seed=st.integers(0, 1 << 16))(act)


for _name in sequences.OPS:
    setattr(AnyOrder, _name, _rule(_name))


AnyOrder.TestCase.settings = settings(
    max_examples=20,  # tests/campaign runs many more
    stateful_step_count=8,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.thorough
@pytest.mark.parametrize("number", few([30, 100], [30]))
def test_sequences_of_a_seed_leave_everything_as_it_was(number: int) -> None:
    assert [line for violations in sequences.trials(17, number) for line in violations] == []


# ----------------------------------------------------------------------------------------------------
# What sequences found, alone.
# ----------------------------------------------------------------------------------------------------


class Viewed(nn.Module):
    """A module that computes with a view of its weight, under another name."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(4).bfloat16())
        if as_buffer:
            self.register_buffer("seen", self.scale.detach()[:2], persistent=False)
        else:
            self.seen = self.scale.detach()[:2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum() + self.seen.sum()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("as_buffer", [False, True])
def test_a_tensor_that_views_a_parameter_views_it_again(as_buffer: bool, precision: str) -> None:
    model = Viewed(as_buffer)
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision) as prepared, prepared.suspended():
        assert model.seen.data_ptr() == model.scale.data_ptr()
    assert model.seen.data_ptr() == model.scale.data_ptr()
    assert before.diff(Snapshot(model)) == []


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("as_buffer", [False, True])
def test_a_tensor_that_views_a_parameter_sees_what_was_trained(as_buffer: bool, precision: str) -> None:
    model = Viewed(as_buffer)
    original = model.scale.detach().clone()
    prepared = KbitPreparedModel(model, precision=precision, freeze=False, keep_originals=True).prepare()
    with torch.no_grad():
        model.scale.sub_(0.3)
    trained = model.scale.detach().clone()
    with prepared.suspended():
        assert torch.equal(model.seen, model.scale[:2])
        assert torch.equal(model.scale, trained.bfloat16())
    assert torch.equal(model.scale, trained)
    if precision == "full":
        prepared.restore("discard")
        assert torch.equal(model.scale, original)
    else:
        prepared.restore()
        assert torch.equal(model.scale, trained.bfloat16())
    assert torch.equal(model.seen, model.scale[:2])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_parameters_of_which_one_could_be_upcast_at_use_share_memory_again(precision: str) -> None:
    model = nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4)).bfloat16()
    model.register_parameter("part", nn.Parameter(model[0].weight.data[1:3, ::2]))
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision) as prepared, prepared.suspended():
        assert model.part.untyped_storage().data_ptr() == model[0].weight.untyped_storage().data_ptr()
    assert before.diff(Snapshot(model), moved=True) == []


def test_a_view_of_a_parameter_of_a_model_prepared_twice_views_it_again() -> None:
    model = Viewed(as_buffer=False)
    kbitwrap.prepare_model_for_kbit_training(model)
    kbitwrap.prepare_model_for_kbit_training(model)
    kbitwrap.restore(model)
    assert model.seen.data_ptr() == model.scale.data_ptr()


def test_a_trained_copy_that_was_an_error_is_rounded_by_the_next_restore() -> None:
    model = zoo.load("llama", None)
    prepared = KbitPreparedModel(model, precision="full").prepare()
    peft_model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    head = peft_model.base_model.model.lm_head
    with pytest.raises(RestoreError, match=r"lm_head\.weight was trained"):
        prepared.restore("error")
    assert (head.original_module.weight.dtype, head.modules_to_save.default.weight.dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    assert prepared.restore().trained == ("lm_head.weight",)
    assert head.modules_to_save.default.weight.dtype == torch.bfloat16
