"""Lazy tensors: what is computed of them is what the operations give on the values, and nothing is computed before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import storage_ptr, storage_size
from torch import nn
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from kbitwrap.tensors.lazy import LazyTensor, keeping_last, materialize, pieces
from support import zoo


class Counted:
    """Values that know how often they were asked for."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self.values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        self.count = 0
        self.lazy = LazyTensor(shape, dtype, self.compute)

    def compute(self) -> torch.Tensor:
        self.count += 1
        return self.values


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "cpu": lambda t: t.cpu(),
    "transpose": lambda t: t.transpose(0, 1),
    "transpose, contiguous": lambda t: t.transpose(0, 1).contiguous(),
    "t": lambda t: t[0].t(),
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.transpose(0, 2).reshape(6, -1),
    "permute": lambda t: t.permute(2, 0, 1).contiguous(),
    "chunk": lambda t: t.chunk(2, dim=0),
    "split": lambda t: t.split([1, 3], dim=0),
    "unbind": lambda t: t.unbind(1),
    "index": lambda t: t[1:, ::2, -1],
    "ellipsis": lambda t: t[..., None, 1],
    "index with a tensor": lambda t: t[torch.tensor([2, 0])],
    "mask": lambda t: t[t > 10],
    "nonzero": lambda t: t.nonzero(),
    "cat": lambda t: torch.cat([t, t.flip(0)], dim=1),
    "cat with values": lambda t: torch.cat([t, torch.ones(1, 6, 4)]),
    "stack": lambda t: torch.stack([t, t]),
    "arithmetic": lambda t: (t * 2 + 1).sum(dim=-1),
    "to": lambda t: t.to(torch.bfloat16),
    "to and view as bytes": lambda t: t.half().view(torch.uint8),
    "max with indices": lambda t: t.max(dim=1).values,
    "zeros_like": lambda t: torch.zeros_like(t),
    "squeeze": lambda t: t[:1].squeeze(0),
    "expand": lambda t: t[:, :, :1].expand(4, 6, 5),
}

# The shapes of what they return may follow from values.
NEEDS_VALUES = {"mask", "nonzero", "index with a tensor"}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_give_what_they_give_on_values(name: str) -> None:
    counted = Counted(4, 6, 4)
    expected, found = OPERATIONS[name](counted.values), OPERATIONS[name](counted.lazy)
    is_lazy = name not in NEEDS_VALUES
    assert (counted.count == 0) == is_lazy
    if isinstance(expected, torch.Tensor):
        expected, found = [expected], [found]
    assert len(expected) == len(found)
    for values, lazy in zip(expected, found, strict=True):
        assert isinstance(lazy, LazyTensor) == is_lazy
        described = (lazy.shape, lazy.dtype, lazy.stride(), lazy.storage_offset(), lazy.device, lazy.is_contiguous())
        assert described == (
            *(values.shape, values.dtype, values.stride()),
            *(values.storage_offset(), values.device, values.is_contiguous()),
        )
        computed = materialize(lazy)
        assert type(computed) is torch.Tensor
        assert computed.is_contiguous()
        assert torch.equal(computed, values)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,)])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.ones(shape).to(dtype)
    lazy = LazyTensor(shape, dtype, lambda: values)
    assert (lazy.shape, lazy.dtype, lazy.device.type, lazy.requires_grad) == (shape, dtype, "cpu", False)
    assert (lazy.nbytes, lazy.untyped_storage().nbytes()) == (values.nbytes, values.nbytes)
    found = materialize(lazy.detach())
    assert (found.shape, found.dtype) == (shape, dtype)
    assert torch.equal(found.float(), values.float())


def test_values_are_computed_each_time_they_are_asked_for() -> None:
    counted = Counted(2, 2)
    materialize(counted.lazy)
    materialize(counted.lazy)
    assert counted.count == 2


def test_operations_that_need_values_get_them() -> None:
    counted = Counted(2, 3)
    assert counted.lazy.sum().item() == 15
    assert torch.equal(counted.lazy, counted.values)
    assert not torch.equal(counted.lazy, counted.values + 1)
    assert torch.allclose(counted.lazy, counted.values)
    assert bool((counted.lazy >= 0).all())
    assert counted.lazy[1, 2].item() == 5


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t.zero_(), lambda t: t.__setitem__(0, 1)])
def test_writing_is_refused(write: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(
        TypeError, match="writes to a lazy tensor, whose values are not computed yet; materialize it first"
    ):
        write(Counted(2, 2).lazy)


def test_pickling_is_refused() -> None:
    with pytest.raises(pickle.PicklingError, match="materialize it first"):
        pickle.dumps(Counted(2).lazy)


def test_numpy_is_refused() -> None:
    # Torch's own message; what matters is that no made-up memory is read.
    with pytest.raises((RuntimeError, TypeError)):
        Counted(2).lazy.numpy()


def test_a_deep_copy_is_the_same() -> None:
    lazy = Counted(2).lazy
    assert copy.deepcopy({"a": lazy})["a"] is lazy


@pytest.mark.parametrize("values", [torch.ones(3), torch.ones(2, dtype=torch.float16)])
def test_other_values_than_said_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"of shape \(2,\) and dtype torch.float32 was computed with"):
        materialize(LazyTensor((2,), torch.float32, lambda: values))


def test_values_may_require_grad_and_be_laid_out_otherwise() -> None:
    values = torch.arange(6.0).view(2, 3).t().requires_grad_()
    found = materialize(LazyTensor((3, 2), torch.float32, lambda: values))
    assert found.is_contiguous()
    assert not found.requires_grad
    assert torch.equal(found, values)


def test_a_plain_tensor_is_its_own_values() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    found = materialize(parameter)
    assert (type(found), found.requires_grad, found.data_ptr()) == (torch.Tensor, False, parameter.data_ptr())
    assert materialize(torch.ones(2, 3).t()).is_contiguous()


# ----------------------------------------------------------------------------------------------------
# Pieces of one tensor.
# ----------------------------------------------------------------------------------------------------


def split_experts(fused: torch.Tensor) -> list[torch.Tensor]:
    """As transformers does: halves, each contiguous, and then the experts."""
    halves = [half.contiguous() for half in fused.chunk(2, dim=1)]
    return [expert.squeeze(0) for half in halves for expert in half.chunk(len(half), dim=0)]


def test_pieces_are_cut_from_values_computed_once() -> None:
    counted = Counted(4, 6, 4)
    with keeping_last():
        found = [materialize(piece) for piece in split_experts(counted.lazy)]
    assert counted.count == 1
    assert all(map(torch.equal, found, split_experts(counted.values)))
    materialize(counted.lazy)
    assert counted.count == 2


def test_another_tensor_takes_the_place_of_what_is_kept() -> None:
    first, second = Counted(4, 4), Counted(4, 4)
    with keeping_last():
        for counted in (first, second, first):
            for row in counted.lazy.unbind(0):
                materialize(row)
    assert (first.count, second.count) == (2, 1)


def test_nothing_is_kept_after_an_error() -> None:
    counted = Counted(4)

    def fail() -> None:
        with keeping_last():
            materialize(counted.lazy)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    materialize(counted.lazy)
    assert counted.count == 2


def test_lineage_names_what_values_are_made_from() -> None:
    counted = Counted(4, 6, 4)
    half = counted.lazy.chunk(2, dim=1)[0].contiguous()
    assert [id(t) for t in half[0].lineage] == [id(counted.lazy), id(half)]
    assert [id(t) for t in counted.lazy.detach().lineage] == [id(counted.lazy)]
    both = torch.cat([counted.lazy, half], dim=1)
    assert [id(t) for t in both.lineage] == [id(both)]


# ----------------------------------------------------------------------------------------------------
# What others read of a state dict.
# ----------------------------------------------------------------------------------------------------


def test_different_tensors_have_different_storages_and_the_same_one_has_one() -> None:
    first, second = Counted(4, 4).lazy, Counted(4, 4).lazy
    assert storage_ptr(first) != storage_ptr(second)
    assert storage_ptr(first) == storage_ptr(first.detach()) == storage_ptr(first[1:])
    assert storage_ptr(first) != storage_ptr(first.clone())
    assert storage_size(first[1:]) == 64
    assert first[1:].data_ptr() == first.data_ptr() + 16


def test_a_state_dict_holds_the_lazy_tensor_of_a_module() -> None:
    module = nn.Linear(3, 2)
    lazy = Counted(2, 3).lazy
    module._parameters["weight"] = lazy
    state = module.state_dict()
    assert isinstance(state["weight"], LazyTensor)
    assert state["weight"].lineage == (lazy,)
    assert module.state_dict(keep_vars=True)["weight"] is lazy


def lazy_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with lazy tensors; what shares memory is the same lazy tensor."""
    made: dict[int, LazyTensor] = {}
    return {
        name: made.setdefault(t.data_ptr() or id(t), LazyTensor(t.shape, t.dtype, t.detach))
        for name, t in state.items()
    }


@pytest.mark.parametrize("name", ["gemma2", "llama", "t5", "bart", "opt"])
def test_tied_weights_are_found_as_those_of_real_tensors(name: str) -> None:
    model = zoo.load(name, None)
    state = model.state_dict()
    expected = remove_tied_weights_from_state_dict(dict(state), model)
    found = remove_tied_weights_from_state_dict(lazy_state(state), model)
    assert list(found) == list(expected)
    assert (len(expected) < len(state)) == (name != "llama")


def test_shards_are_those_of_real_tensors() -> None:
    state = dict(zoo.load("gemma2", None).state_dict())
    expected = huggingface_hub.split_torch_state_dict_into_shards(state, max_shard_size=20_000)
    found = huggingface_hub.split_torch_state_dict_into_shards(lazy_state(state), max_shard_size=20_000)
    assert expected.is_sharded
    assert found == expected


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "dbrx", "jamba", "deepseek_v3", "llava", "qwen2_vl", "bert"])
def test_weight_conversion_stays_lazy_and_gives_the_same(name: str) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    model = zoo.load(name, None)
    expected = revert_weight_conversion(model, dict(model.state_dict()))
    found = revert_weight_conversion(model, lazy_state(model.state_dict()))
    assert list(found) == list(expected)
    for fqn, values in expected.items():
        assert isinstance(found[fqn], LazyTensor)
        assert torch.equal(materialize(found[fqn]), values)


class TestPieces:
    """Values that come one piece after the other."""

    def tensor(self) -> tuple[LazyTensor, list[str]]:
        called: list[str] = []
        values = torch.arange(6.0).view(2, 3)

        def compute() -> torch.Tensor:
            called.append("whole")
            return values

        def in_pieces() -> Iterator[torch.Tensor]:
            for piece in values.view(-1).split(4):
                called.append("piece")
                yield piece

        return LazyTensor((2, 3), torch.float32, compute, in_pieces), called

    def test_pieces_are_consecutive_and_computed_alone(self) -> None:
        lazy, called = self.tensor()
        assert torch.equal(torch.cat(list(pieces(lazy))), torch.arange(6.0))
        assert called == ["piece", "piece"]

    def test_a_state_dict_keeps_the_pieces(self) -> None:
        lazy, called = self.tensor()
        module = nn.Module()
        module.register_parameter("weight", None)
        module._parameters["weight"] = lazy  # type: ignore[assignment]
        held = module.state_dict()["weight"].contiguous()
        assert [piece.numel() for piece in pieces(held)] == [4, 2]
        assert called == ["piece", "piece"]

    def test_a_tensor_made_from_pieces_is_computed_whole(self) -> None:
        lazy, called = self.tensor()
        assert [piece.shape for piece in pieces(lazy.t())] == [(3, 2)]
        assert called == ["whole"]

    def test_an_ordinary_tensor_is_one_piece(self) -> None:
        tensor = torch.arange(6).view(2, 3).t()
        (piece,) = pieces(tensor)
        assert piece.is_contiguous()
        assert torch.equal(piece, tensor)
