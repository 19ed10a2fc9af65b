"""What is stored in float32 comes back: bits, layouts, payloads of NaNs, and memory that is shared."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from kbitwrap import RestoreError
from kbitwrap.edits.storage import ParameterStorage
from kbitwrap.tensors.bits import Layout, NanPayloads
from support.memory import allocations
from support.plain import Holder, changed_storage, full
from support.snapshot import Snapshot
from support.strategies import HALF_DTYPES, all_patterns, bits, from_bits, half_tensors, module_trees

few = settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))


# How many NaNs there are of either sign.
NAN_MAGNITUDES = {torch.bfloat16: 127, torch.float16: 1023}


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


def test_a_preparation_holds_its_parameters_and_their_samples_and_no_more() -> None:
    made = []

    def make() -> None:
        model = Holder(numbered(300, 400), numbered(7), numbered(3, 5))
        made.append(full(model))

    held = sum(allocations(make))
    [prepared] = made
    stored = sum(parameter.nbytes for parameter in prepared.model.parameters())
    assert held == stored + prepared.plan.sample_bytes


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

    def fails(storage: ParameterStorage, current: torch.Tensor, **options: Any) -> Any:
        if storage.record.fqn != "p1":
            raise MemoryError("no room")
        return find(storage, current, **options)

    find = ParameterStorage.find
    monkeypatch.setattr(ParameterStorage, "find", fails)
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
