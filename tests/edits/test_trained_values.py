"""Values that changed while they were stored in float32: rounded, discarded or refused, as asked."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from kbitwrap import ConfigError, RestoreError
from kbitwrap.tensors.bits import differ
from support.cuda_rules import CudaRules
from support.plain import Holder, changed_storage, full
from support.snapshot import Snapshot
from support.strategies import HALF_DTYPES, bits, from_bits, half_tensors

few = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


def numbered(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Distinct values, exact in either half dtype."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype) / 8


# ----------------------------------------------------------------------------------------------------
# Trained values.
# ----------------------------------------------------------------------------------------------------


def with_version_bump(parameter: nn.Parameter) -> None:
    version = parameter._version
    with torch.no_grad():
        parameter.add_(1 / 1024)
    assert parameter._version > version


def by_data_in_place(parameter: nn.Parameter) -> None:
    version = parameter._version
    parameter.data.add_(1 / 1024)
    assert parameter._version == version


def by_data_replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data + 1 / 1024


def by_one_element(parameter: nn.Parameter) -> None:
    parameter.data.view(-1)[-1] += 1 / 1024


def to_representable_values(parameter: nn.Parameter) -> None:
    # Exact in half: rounding alone cannot tell that it changed.
    parameter.data.add_(1.0)


def by_an_optimizer(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(True)
    optimizer = torch.optim.SGD([parameter], lr=1 / 1024)
    parameter.sum().backward()
    optimizer.step()
    parameter.grad = None


def rows_swapped(parameter: nn.Parameter) -> None:
    parameter.data[[0, 1]] = parameter.data[[1, 0]]


TRAININGS = [
    with_version_bump,
    by_data_in_place,
    by_one_element,
    to_representable_values,
    by_an_optimizer,
    rows_swapped,
]


every_training = pytest.mark.parametrize("train", TRAININGS, ids=[train.__name__ for train in TRAININGS])


def two_weights(dtype: torch.dtype = torch.float16) -> Holder:
    return Holder(numbered(4, 8, dtype=dtype), numbered(3, 2, dtype=dtype).t())


@every_training
@pytest.mark.parametrize("keep_originals", [False, True])
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_keep_rounds_the_trained_value(dtype: torch.dtype, keep_originals: bool, train: Any) -> None:
    model = two_weights(dtype)
    untouched = bits(model.p1).clone()
    prepared = full(model, keep_originals=keep_originals)
    model.p0.requires_grad_(True)
    train(model.p0)
    expected = bits(model.p0.detach().to(dtype)).clone()
    report = prepared.restore(trained="keep")
    assert report.trained == ("p0",)
    assert torch.equal(bits(model.p0), expected)
    assert torch.equal(bits(model.p1), untouched)


UNTRAINED = [*TRAININGS[:-2], by_data_replaced]


@pytest.mark.parametrize("train", UNTRAINED, ids=[train.__name__ for train in UNTRAINED])
def test_a_frozen_value_that_changed_is_reported_as_replaced(train: Any) -> None:
    model = two_weights()
    prepared = full(model)
    train(model.p0)
    expected = bits(model.p0.detach().half()).clone()
    named = () if torch.equal(expected, bits(numbered(4, 8, dtype=torch.float16))) else ("p0",)  # rounded away or not
    assert all({"value", "parameter"} & prepared.verify().differences[fqn].keys() for fqn in named)
    report = prepared.restore()
    assert (report.trained, report.replaced) == ((), named)
    assert torch.equal(bits(model.p0), expected)
    assert model.p0.requires_grad


@every_training
def test_discard_puts_the_original_bits_back(train: Any) -> None:
    model = two_weights()
    snapshot = Snapshot(model)
    prepared = full(model, keep_originals=True)
    model.p0.requires_grad_(True)
    train(model.p0)
    assert prepared.restore(trained="discard").trained == ("p0",)
    assert snapshot.diff(Snapshot(model), moved=True) == []


@every_training
def test_the_error_policy_names_the_trained_parameter_and_restores_the_rest(train: Any) -> None:
    model = two_weights()
    untouched = bits(model.p1).clone()
    prepared = full(model)
    model.p0.requires_grad_(True)
    train(model.p0)
    trained = model.p0.detach().clone()
    with pytest.raises(RestoreError, match=r"p0 was trained while it was stored in torch\.float32") as caught:
        prepared.restore(trained="error")
    assert set(caught.value.failures) == {"p0"}
    assert torch.equal(model.p0, trained)
    assert model.p0.dtype == torch.float32
    assert torch.equal(bits(model.p1), untouched)
    assert model.p0.requires_grad
    assert model.p1.requires_grad
    # What is left is settled by asking again.
    assert prepared.restore(trained="keep").trained == ("p0",)
    assert torch.equal(bits(model.p0), bits(trained.half()))


@pytest.mark.parametrize("policy", ["keep", "discard", "error"])
def test_nothing_trained_is_the_same_under_every_policy(policy: Any) -> None:
    model = two_weights()
    snapshot = Snapshot(model)
    assert full(model, keep_originals=True).restore(trained=policy).trained == ()
    assert snapshot.diff(Snapshot(model), moved=True) == []


def test_a_value_that_training_changed_back_is_not_trained() -> None:
    model = two_weights()
    prepared = full(model)
    model.p0.data.add_(1.0)
    model.p0.data.sub_(1.0)
    assert prepared.restore(trained="error").trained == ()


def test_discard_without_originals_is_refused_before_anything_changes() -> None:
    model = two_weights()
    prepared = full(model)
    with pytest.raises(ConfigError, match="keep_originals"):
        prepared.restore(trained="discard")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prepared.restore()
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_an_unknown_policy_is_refused() -> None:
    prepared = full(two_weights())
    with pytest.raises(ConfigError, match="'drop'"):
        prepared.restore(trained="drop")
    prepared.restore()


@pytest.mark.parametrize("keep_originals", [False, True])
def test_the_sign_of_a_zero_is_a_value(keep_originals: bool) -> None:
    model = Holder(torch.zeros(8).half())
    prepared = full(model, keep_originals=keep_originals)
    model.p0.requires_grad_(True).data.neg_()
    assert prepared.restore(trained="keep").trained == ("p0",)
    assert torch.signbit(model.p0).all()


@pytest.mark.parametrize("keep_originals", [False, True])
def test_a_resized_parameter_keeps_its_shape_and_gets_its_dtype(keep_originals: bool) -> None:
    model = two_weights()
    prepared = full(model, keep_originals=keep_originals)
    wider = torch.cat([model.p1.data, torch.full((2, 1), 1 / 3)], dim=1)
    model.p1.data = wider
    assert prepared.restore().replaced == ("p1",)
    assert model.p1.shape == (2, 4)
    assert torch.equal(bits(model.p1), bits(wider.half()))


def test_a_resized_parameter_with_payloads_comes_back_rounded() -> None:
    # The recorded positions mean nothing in another shape.
    model = Holder(from_bits([0x7F81] * 4, torch.bfloat16))
    prepared = full(model)
    model.p0.data = torch.ones(3)
    assert prepared.restore().replaced == ("p0",)
    assert torch.equal(model.p0.detach(), torch.ones(3, dtype=torch.bfloat16))


def test_discard_keeps_a_shape_that_others_gave() -> None:
    model = two_weights()
    prepared = full(model, keep_originals=True)
    model.p0.data = torch.full((5, 8), 1 / 3)
    assert prepared.restore(trained="discard").replaced == ("p0",)
    assert torch.equal(bits(model.p0), bits(torch.full((5, 8), 1 / 3).half()))


def test_a_parameter_that_is_gone_is_no_failure() -> None:
    model = two_weights()
    prepared = full(model)
    gone = weakref.ref(model.p0)
    del model.p0
    gc.collect()
    assert gone() is None
    assert prepared.restore().trained == ()
    assert model.p1.dtype == torch.float16


@every_training
@pytest.mark.parametrize("keep_originals", [False, True])
def test_a_suspension_brings_the_trained_value_back_bit_for_bit(train: Any, keep_originals: bool) -> None:
    model = two_weights()
    parameter = model.p0
    prepared = full(model, keep_originals=keep_originals)
    model.p0.requires_grad_(True)
    train(model.p0)
    trained = model.p0.detach().clone().view(torch.int32)
    for _ in range(2):
        with prepared.suspended():
            assert model.p0 is parameter
            assert torch.equal(bits(parameter), bits(trained.view(torch.float32).half()))
        assert torch.equal(parameter.detach().view(torch.int32), trained)
    # A suspension settles nothing: the policy is the restore's to apply.
    assert prepared.restore().trained == ("p0",)


def test_a_suspension_keeps_nan_and_infinities_that_training_made() -> None:
    model = two_weights()
    prepared = full(model)
    trained = model.p0.data
    trained.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    trained.view(torch.int32).view(-1)[4] = 0x7F800001  # a signalling NaN of float32
    expected = trained.clone().view(torch.int32)
    with prepared.suspended():
        pass
    assert torch.equal(model.p0.detach().view(torch.int32), expected)


def test_parameters_over_one_memory_resume_with_their_own_values() -> None:
    base = numbered(4, 6)
    model = Holder(base, base.t())
    prepared = full(model)
    model.p0.data.add_(1 / 1024)
    trained, untouched = model.p0.detach().clone(), model.p1.detach().clone()
    with prepared.suspended():
        assert torch.equal(bits(model.p0), bits(trained.bfloat16()))
        assert torch.equal(bits(model.p1), bits(untouched.bfloat16()))
    assert torch.equal(model.p0, trained)
    assert torch.equal(model.p1, untouched)


def test_the_record_holds_no_parameter_alive() -> None:
    model = two_weights()
    prepared = full(model)
    reference = weakref.ref(model.p0)
    model.p0 = nn.Parameter(torch.zeros(4, 8).half())
    gc.collect()
    assert reference() is None
    assert prepared.restore().replaced == ("p0",)


# ----------------------------------------------------------------------------------------------------
# Comparing values.
# ----------------------------------------------------------------------------------------------------


@few
@given(half_tensors())
def test_a_tensor_has_the_values_of_its_own_upcast(tensor: torch.Tensor) -> None:
    assert not differ(tensor, tensor.float())
    assert not differ(tensor.float(), tensor)


def test_values_differ_by_one_element_and_by_nan() -> None:
    tensor = numbered(4, 6).float()
    for value in (0.0, -0.0, float("nan"), float("inf")):
        changed = tensor.clone()
        changed[3, 5] = value
        assert differ(tensor, changed)
        assert not differ(changed, changed.clone())
    assert differ(torch.zeros(2), -torch.zeros(2))


def test_a_difference_beyond_the_first_piece_shows() -> None:
    left = torch.zeros((1 << 20) + 3, dtype=torch.float16)
    right = left.clone()
    assert not differ(left, right)
    right[-1] = 1
    assert differ(left, right)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_a_cast_weight_costs_a_device_one_read_in_prepare_and_few_in_suspend(keep: bool, is_trained: bool) -> None:
    model = Holder(torch.ones(3, (1 << 20) // 3 + 7).bfloat16(), torch.ones(3).bfloat16())
    with CudaRules() as preparing:
        prepared = full(model, keep_originals=keep, freeze=False)
    if is_trained:
        with torch.no_grad():
            next(model.parameters()).add_(1)
    with CudaRules() as suspending, prepared.suspended():
        pass
    assert len(preparing.syncs) == 2
    # the digest of what is there, and whether it is exact
    assert len(suspending.syncs) <= 2 * 2
    with CudaRules() as verifying:
        assert bool(prepared.verify()) == is_trained
    assert len(verifying.syncs) == 2  # one for each of the parameters
    assert len(prepared.restore().trained) == is_trained


def test_reading_the_original_writes_nothing() -> None:
    parameter = nn.Parameter(torch.tensor([0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16), False)
    change = changed_storage(parameter)
    parameter.data.view(torch.int16)[0] = 0x7FC5  # another NaN, written by somebody since
    original = change.original_of(parameter.data)
    assert original.view(torch.int16).tolist() == [0x7FC1, 0x3F80]
    assert parameter.view(torch.int16).tolist() == [0x7FC5, 0x3F80]
