"""What a parameter stores: every bit comes back, in the layout and over the memory that it had."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from kbitwrap import ConfigError, KbitPreparedModel, RestoreError
from kbitwrap.edits.storage import StorageChange
from kbitwrap.model.records import ParameterRecord
from kbitwrap.tensors.bits import Layout, NanPayloads, differ
from support.cuda_rules import CudaRules
from support.snapshot import Snapshot
from support.strategies import HALF_DTYPES, all_patterns, bits, from_bits, half_tensors, module_trees

few = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))

# How many NaNs there are of either sign.
NAN_MAGNITUDES = {torch.bfloat16: 127, torch.float16: 1023}


class Holder(nn.Module):
    """A model that is nothing but its parameters, `p0`, `p1`, ..."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_parameter(f"p{i}", tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))


def changed_storage(parameter: nn.Parameter) -> StorageChange:
    """The change of one parameter's storage."""
    holder = Holder(parameter)
    return StorageChange(ParameterRecord("p0", [(holder, "p0")], parameter), parameter)


def full(model: nn.Module, **fields: Any) -> KbitPreparedModel:
    """Prepare at precision "full"; a model that is not quantized is warned about, which is tested elsewhere."""
    prepared = KbitPreparedModel(model, precision="full", **fields)
    with pytest.warns(UserWarning, match="neither a quantization attribute nor a quantized layer"):
        return prepared.prepare()


def numbered(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Distinct values, exact in either half dtype."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(dtype) / 8


# ----------------------------------------------------------------------------------------------------
# Bits.
# ----------------------------------------------------------------------------------------------------


def plain_models(dtype: torch.dtype) -> Iterator[tuple[str, nn.Module]]:
    table = all_patterns(dtype)
    embedding = nn.Embedding(256, 256, dtype=dtype)
    linear = nn.Linear(256, 256, dtype=dtype)
    norm = nn.LayerNorm(1 << 16, dtype=dtype)
    convolution = nn.Conv1d(64, 64, 16, dtype=dtype)
    with torch.no_grad():
        # `copy_` between equal dtypes keeps bits; the first test asserts as much before it relies on it.
        embedding.weight.copy_(table)
        linear.weight.copy_(table.t())
        norm.weight.copy_(table.view(-1))
        convolution.weight.copy_(table.view(64, 64, 16))
    yield from {"embedding": embedding, "linear": linear, "norm": norm, "convolution": convolution}.items()


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("kind", range(4))
def test_every_pattern_comes_back(dtype: torch.dtype, kind: int) -> None:
    _, model = list(plain_models(dtype))[kind]
    before = bits(model.weight).clone()
    assert before.unique().numel() == 1 << 16
    snapshot = Snapshot(model)
    prepared = full(model)
    assert model.weight.dtype == torch.float32
    prepared.restore()
    assert model.weight.dtype == dtype
    assert torch.equal(bits(model.weight), before)
    assert snapshot.diff(Snapshot(model), moved=True) == []


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_pattern_comes_back_from_a_suspension(dtype: torch.dtype) -> None:
    model = Holder(all_patterns(dtype))
    before = bits(model.p0).clone()
    prepared = full(model)
    upcast = model.p0.detach().clone().view(torch.int32)
    with prepared.suspended():
        assert model.p0.dtype == dtype
        assert torch.equal(bits(model.p0), before)
    assert torch.equal(model.p0.detach().view(torch.int32), upcast)
    assert prepared.restore().trained == ()
    assert torch.equal(bits(model.p0), before)


@few
@given(half_tensors())
def test_any_tensor_comes_back_with_its_layout(tensor: torch.Tensor) -> None:
    model = Holder(tensor)
    parameter, before, stride = model.p0, bits(tensor).clone(), tensor.stride()
    prepared = full(model)
    assert parameter.dtype == torch.float32
    assert prepared.restore().trained == ()
    assert model.p0 is parameter
    assert parameter.dtype == tensor.dtype
    assert parameter.stride() == stride
    assert torch.equal(bits(parameter), before)


@few
@given(half_tensors(), st.booleans())
def test_any_tensor_comes_back_from_suspensions(tensor: torch.Tensor, keep_originals: bool) -> None:
    model = Holder(tensor)
    before, stride = bits(tensor).clone(), tensor.stride()
    prepared = full(model, keep_originals=keep_originals)
    upcast = model.p0.detach().clone().view(torch.int32)
    for _ in range(2):
        with prepared.suspended():
            assert torch.equal(bits(model.p0), before)
            assert model.p0.stride() == stride
        assert torch.equal(model.p0.detach().view(torch.int32), upcast)
    assert prepared.restore().trained == ()
    assert torch.equal(bits(model.p0), before)
    assert model.p0.stride() == stride


@few
@given(module_trees(), st.booleans())
def test_any_tree_comes_back(tree: nn.Module, keep_originals: bool) -> None:
    before = Snapshot(tree)
    prepared = full(tree, keep_originals=keep_originals)
    assert all(p.dtype == torch.float32 and not p.requires_grad for p in tree.parameters())
    with prepared.suspended():
        assert before.diff(Snapshot(tree), moved=True) == []
    report = prepared.restore()
    assert before.diff(Snapshot(tree), moved=True) == []
    assert (report.trained, report.replaced, report.foreign) == ((), (), ())


def test_a_sliced_parameter_does_not_pin_the_memory_around_it() -> None:
    around = numbered(1000)
    model = Holder(around[500:504])
    full(model).restore()
    assert model.p0.untyped_storage().nbytes() == 4 * 2


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_an_empty_parameter_comes_back(stride: int) -> None:
    model = Holder(torch.empty(8).half().as_strided((0,), (stride,)))
    full(model).restore()
    assert model.p0.dtype == torch.float16
    assert model.p0.shape == (0,)
    assert model.p0.stride() == (stride,)


def test_an_expanded_parameter_comes_back() -> None:
    # One element seen many times: the stride is 0, and writing through it is refused by torch.
    model = Holder(numbered(1).expand(5))
    before = bits(model.p0).clone()
    full(model).restore()
    assert torch.equal(bits(model.p0), before)


# ----------------------------------------------------------------------------------------------------
# NaN payloads.
# ----------------------------------------------------------------------------------------------------


@functools.cache
def lost_patterns(dtype: torch.dtype) -> frozenset[int]:
    """The patterns that the way to float32 and back changes, wherever in a tensor they are.

    torch converts whole vectors and single elements by different instructions, which treat float16's quiet NaNs
    differently. So whether a NaN survives depends on its place.
    """
    table = all_patterns(dtype).view(-1)
    in_vectors = table.repeat_interleave(32)
    changed = (bits(in_vectors.float().to(dtype)) != bits(in_vectors)).view(-1, 32).any(1)
    for index in table.isnan().nonzero().view(-1):
        alone = table[index : index + 1].clone()
        changed[index] |= bits(alone.float().to(dtype))[0] != bits(alone)[0]
    return frozenset(bits(table[changed]).tolist())


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_only_nan_is_changed_by_float32(dtype: torch.dtype) -> None:
    table = all_patterns(dtype).view(-1)
    assert 0 < len(lost_patterns(dtype)) <= 2 * NAN_MAGNITUDES[dtype]
    assert lost_patterns(dtype) <= set(bits(table[table.isnan()]).tolist())


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_payload_that_may_be_lost_is_stored(dtype: torch.dtype) -> None:
    payloads = NanPayloads.find(all_patterns(dtype))
    assert payloads is not None
    stored = payloads.bits.tolist()
    assert set(stored) >= lost_patterns(dtype)
    assert len(stored) == len(set(stored)) <= 2 * NAN_MAGNITUDES[dtype]
    assert torch.equal(bits(all_patterns(dtype)).view(-1)[payloads.positions], payloads.bits)


@few
@given(half_tensors())
def test_payloads_are_stored_for_nan_alone(tensor: torch.Tensor) -> None:
    flat = bits(tensor).reshape(-1)
    lost = {i for i, pattern in enumerate(flat.tolist()) if pattern in lost_patterns(tensor.dtype)}
    nan = set(tensor.isnan().reshape(-1).nonzero().view(-1).tolist())
    payloads = NanPayloads.find(tensor)
    stored = [] if payloads is None else payloads.positions.tolist()
    assert lost <= set(stored) <= nan
    assert len(stored) == len(set(stored))
    if payloads is not None:
        assert torch.equal(flat[payloads.positions], payloads.bits)


@few
@given(half_tensors(nan=False))
def test_nothing_is_stored_without_nan(tensor: torch.Tensor) -> None:
    assert NanPayloads.find(tensor) is None
    assert changed_storage(nn.Parameter(tensor)).kept is None


@pytest.mark.parametrize("pattern", [0x7C01, 0x7E00, 0x7E01, 0x7FFF, 0xFE00, 0xFFFF], ids=hex)
@pytest.mark.parametrize("num_numbers", range(9))
def test_a_nan_comes_back_wherever_it_is(num_numbers: int, pattern: int) -> None:
    # Sixteen NaNs behind some numbers: whole vectors when they are gathered, but not where they are.
    model = Holder(from_bits([0x3C00] * num_numbers + [pattern] * 16, torch.float16))
    before = bits(model.p0).clone()
    prepared = full(model)
    with prepared.suspended():
        assert torch.equal(bits(model.p0), before)
    assert prepared.restore().trained == ()
    assert torch.equal(bits(model.p0), before)


def test_a_nan_payload_is_not_written_over_a_number() -> None:
    signalling = from_bits([0x7F81, 0x7F82, 0x3F80], torch.bfloat16)
    model = Holder(signalling)
    prepared = full(model)
    model.p0.requires_grad_(True)
    with torch.no_grad():
        model.p0[0] = 2.0
    assert prepared.restore().trained == ("p0",)
    assert torch.equal(bits(model.p0), bits(from_bits([0x4000, 0x7F82, 0x3F80], torch.bfloat16)))


# ----------------------------------------------------------------------------------------------------
# Layout and memory.
# ----------------------------------------------------------------------------------------------------


@few
@given(half_tensors())
def test_a_layout_is_rebuilt_with_its_strides(tensor: torch.Tensor) -> None:
    contiguous = torch.empty(tensor.shape, dtype=tensor.dtype)
    bits(contiguous).copy_(bits(tensor))
    layout = Layout.of(tensor)
    (placed,) = Layout.place([(contiguous, layout)])
    assert placed.stride() == tensor.stride()
    assert torch.equal(bits(placed), bits(tensor))
    assert placed.untyped_storage().nbytes() == 2 * (layout.end - layout.offset)


def shares(*tensors: torch.Tensor) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def shared_pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    pairs = {}
    for name in ("same", "transposed", "part", "overlapping", "halves", "reshaped", "backwards"):
        base = numbered(4, 6)
        pairs[name] = {
            "same": (base, base.detach()),
            "transposed": (base, base.t()),
            "part": (base, base[1:3, ::2]),
            "overlapping": (base[:3], base[1:]),
            "halves": (base[:2], base[2:]),
            "reshaped": (base, base.view(-1)[3:]),
            "backwards": (base[2:], base[:2]),
        }[name]
    return pairs


@pytest.mark.parametrize("keep_originals", [False, True])
@pytest.mark.parametrize("kind", shared_pairs())
def test_shared_memory_is_shared_again(kind: str, keep_originals: bool) -> None:
    model = Holder(*shared_pairs()[kind])
    parameters = (model.p0, model.p1)
    before = Snapshot(model)
    distance = model.p1.storage_offset() - model.p0.storage_offset()
    prepared = full(model, keep_originals=keep_originals)
    with prepared.suspended():
        assert shares(model.p0, model.p1)
        assert before.diff(Snapshot(model), moved=True) == []
    report = prepared.restore()
    assert report.trained == ()
    assert model.p0 is parameters[0]
    assert model.p1 is parameters[1]
    assert shares(model.p0, model.p1)
    assert model.p1.storage_offset() - model.p0.storage_offset() == distance
    assert before.diff(Snapshot(model), moved=True) == []


def test_what_is_written_through_one_is_read_through_the_other_again() -> None:
    base = numbered(4, 6)
    model = Holder(base, base.t())
    full(model).restore()
    with torch.no_grad():
        model.p0[1, 2] = -3.0
    assert model.p1[2, 1] == -3.0


def test_a_tied_parameter_stays_one_object_at_both_places() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)}).half()
    model["head"].weight = model["embedding"].weight
    weight = model["embedding"].weight
    prepared = full(model)
    assert model["head"].weight is model["embedding"].weight is weight
    prepared.restore()
    assert model["head"].weight is model["embedding"].weight is weight
    assert weight.dtype == torch.float16


def test_one_of_two_parameters_over_one_memory_can_be_trained() -> None:
    base = numbered(4, 6)
    model = Holder(base, base.detach())
    prepared = full(model)
    model.p0.requires_grad_(True)
    with torch.no_grad():
        model.p0.add_(1.0)
    trained = bits(model.p0.detach().to(torch.bfloat16)).clone()
    report = prepared.restore()
    assert report.trained == ("p0",)
    assert torch.equal(bits(model.p0), trained)
    # Sharing would give one of the two the other's value.
    assert torch.equal(bits(model.p1), bits(numbered(4, 6)))


def test_a_failing_restore_names_each_parameter_that_it_left(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Holder(numbered(4), numbered(5), numbered(6))
    prepared = full(model)

    def fails(change: StorageChange, current: torch.Tensor) -> Any:
        if change.record.fqn != "p1":
            raise MemoryError("no room")
        return find(change, current)

    find = StorageChange._find_original
    monkeypatch.setattr(StorageChange, "_find_original", fails)
    with pytest.raises(RestoreError, match="p0: no room") as caught:
        prepared.restore()
    assert set(caught.value.failures) == {"p0", "p2"}
    monkeypatch.undo()
    prepared.restore()
    assert all(torch.equal(bits(p), bits(numbered(n))) for p, n in zip(model.parameters(), (4, 5, 6), strict=True))


@pytest.mark.parametrize("policy", ["keep", "discard"])
def test_what_is_written_into_a_suspended_model_is_not_taken_for_the_original(policy: str) -> None:
    base = numbered(4, 6)
    model = Holder(base, base.t(), numbered(6))
    prepared = full(model, keep_originals=True, freeze=False)
    with prepared.suspended(), torch.no_grad():
        model.p0.add_(1.0)
        assert torch.equal(model.p1, model.p0.t())
        model.p2.add_(1.0)
    trained = [bits(parameter.detach().to(torch.bfloat16)).clone() for parameter in model.parameters()]
    report = prepared.restore(policy)
    assert set(report.trained) == {"p0", "p1", "p2"}
    expected = trained if policy == "keep" else [bits(t) for t in (numbered(4, 6), numbered(4, 6).t(), numbered(6))]
    assert all(torch.equal(bits(p), value) for p, value in zip(model.parameters(), expected, strict=True))


def test_the_error_policy_names_the_trained_one_of_two_over_one_memory() -> None:
    base = numbered(4, 6)
    model = Holder(base, base.detach())
    prepared = full(model)
    with torch.no_grad():
        model.p0.add_(1.0)
    with pytest.raises(RestoreError) as caught:
        prepared.restore(trained="error")
    assert set(caught.value.failures) == {"p0"}
    assert model.p1.dtype == torch.bfloat16


def test_discard_makes_parameters_share_their_memory_again() -> None:
    base = numbered(4, 6)
    model = Holder(base, base.t())
    prepared = full(model, keep_originals=True)
    model.p0.requires_grad_(True)
    with torch.no_grad():
        model.p0.add_(1.0)
    assert prepared.restore(trained="discard").trained == ("p0",)
    assert shares(model.p0, model.p1)
    assert torch.equal(bits(model.p0), bits(numbered(4, 6)))


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
    # the digest of what was there, that of what is there, each in words and a tail, and whether it is exact
    assert len(suspending.syncs) <= 2 * 5
    with CudaRules() as verifying:
        assert bool(prepared.verify()) == is_trained  # it counts writes
    assert len(verifying.syncs) == 1
    assert len(prepared.restore().trained) == is_trained


def test_reading_the_original_writes_nothing() -> None:
    parameter = nn.Parameter(torch.tensor([0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16), False)
    change = changed_storage(parameter)
    parameter.data.view(torch.int16)[0] = 0x7FC5  # another NaN, written by somebody since
    original = change.original_of(parameter.data)
    assert original.view(torch.int16).tolist() == [0x7FC1, 0x3F80]
    assert parameter.view(torch.int16).tolist() == [0x7FC5, 0x3F80]
