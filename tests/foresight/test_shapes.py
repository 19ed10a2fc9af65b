"""The outputs of common operations without values lie in memory as those of a CPU do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kbitwrap.foresight.shapes import UNTOLD, told

aten = torch.ops.aten
ROWS = torch.rand(2, 3, 8, dtype=torch.bfloat16)
WIDE, WEIGHT = torch.rand(6, 8), torch.rand(5, 8)
HEADS = torch.rand(1, 5, 2, 8, dtype=torch.bfloat16).transpose(1, 2)  # as attention lays them
HALVES = [HEADS[..., 4:], HEADS[..., :4]]
POSITIONS = torch.rand(1, 1, 5, 8, dtype=torch.bfloat16)
IMAGES = torch.rand(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
EACH = [torch.rand(4, 3), torch.rand(5)]
PLAIN: list[tuple[Any, list[Any], dict[str, Any]]] = [
    (aten.add.Tensor, [ROWS, ROWS[:, :1].contiguous()], {}),
    (aten.sub.Tensor, [ROWS, 1.5], {}),
    (aten.div.Tensor, [ROWS[0, 0], ROWS], {}),
    (aten.mul.Tensor, [ROWS[0, 0], ROWS], {}),
    (aten.mul.Scalar, [WIDE, 2], {}),
    (aten.neg.default, [ROWS], {}),
    (aten.neg.default, [HALVES[0]], {}),  # with gaps between its rows
    (aten.neg.default, [IMAGES[:, :1]], {}),
    (aten.mul.Tensor, [HEADS, POSITIONS], {}),
    (aten.mul.Scalar, [HEADS.transpose(2, 3), 0.5], {}),
    (aten.add.Tensor, [HEADS, HEADS.contiguous()], {}),
    (aten.add.Tensor, [HEADS.contiguous(), HEADS], {}),
    (aten.div.Scalar, [WIDE, 3], {}),
    (aten.cat.default, [HALVES, -1], {}),
    (aten.cat.default, [[WIDE, WIDE]], {}),
    (aten.sum.dim_IntList, [ROWS, [1], True], {}),
    (aten.sum.dim_IntList, [HEADS, [1, -1]], {}),
    (aten.bmm.default, [HEADS[0], HEADS[0].transpose(1, 2)], {}),
    (aten.squeeze.dim, [POSITIONS, 1], {}),
    (aten._safe_softmax.default, [ROWS, -1], {}),
    (aten._softmax_backward_data.default, [ROWS, ROWS, -1, torch.bfloat16], {}),
    (aten.pow.Tensor_Scalar, [WIDE, 2], {}),
    (aten.rsqrt.default, [WIDE], {}),
    (aten.silu.default, [ROWS], {}),
    (aten.silu_backward.default, [ROWS, ROWS], {}),
    (aten.clone.default, [WIDE.t()], {}),
    (aten._to_copy.default, [ROWS.transpose(1, 2)], {"dtype": torch.float32}),
    (aten._to_copy.default, [ROWS], {"dtype": torch.float32, "device": torch.device("cpu")}),
    (aten.linear.default, [ROWS.float(), WEIGHT], {}),
    (aten.mm.default, [WIDE, WEIGHT.t()], {}),
    (aten.mean.dim, [ROWS, [-1], True], {}),
    (aten.slice_backward.default, [ROWS[..., :4], [2, 3, 8], 2, 0, 4, 1], {}),
    (aten.zeros_like.default, [WIDE], {"pin_memory": False, "memory_format": torch.preserve_format}),
    (aten.expand.default, [WIDE[:, None], [6, 4, 8]], {}),
    (aten.slice.Tensor, [ROWS, 2, 0, 4], {}),
    (aten.transpose.int, [ROWS, 0, 1], {}),
    (aten.unsqueeze.default, [ROWS, 0], {}),
    (aten.view.default, [ROWS, [6, 8]], {}),
    (aten._foreach_sqrt.default, [EACH], {}),
    (aten._foreach_mul_.Scalar, [EACH, 0.9], {}),
    (aten._foreach_lerp_.Scalar, [EACH, EACH, 0.1], {}),
]
OTHERS: list[tuple[Any, list[Any], dict[str, Any]]] = [
    (aten.mul.Tensor, [ROWS, WIDE[0]], {}),  # of two dtypes
    (aten.add.Tensor, [torch.arange(3), 1.5], {}),
    (aten.mul.Tensor, [POSITIONS, HEADS], {}),  # the second says how it lies
    (aten.mul.Tensor, [ROWS[:, :1].expand(2, 3, 8), ROWS.transpose(1, 2).contiguous().transpose(1, 2)], {}),
    (aten.neg.default, [torch.rand(4, 6, 8).as_strided((1, 4, 8), (3, 1, 4))], {}),  # a stride that says nothing
    (aten.cat.default, [[WIDE, torch.rand(6, 8, dtype=torch.float64)]], {}),
    (aten.cat.default, [[WIDE, torch.rand(0)]], {}),
    (aten.cat.default, [[IMAGES, IMAGES], 1], {}),
    (aten.sum.dim_IntList, [torch.arange(3), [0]], {}),
    (aten._softmax_backward_data.default, [WIDE, WIDE, -1, torch.bfloat16], {}),
    (aten.add.Tensor, [torch.rand(3, 1), torch.rand(1, 4)], {}),  # larger than both
    (aten.mean.dim, [WIDE, [0]], {}),
    (aten.zeros_like.default, [WIDE], {"dtype": torch.int64}),
    (aten.linear.default, [WIDE, WEIGHT, torch.rand(5)], {}),
]


def named(cases: list[tuple[Any, list[Any], dict[str, Any]]]) -> list[str]:
    return [f"{number}: {operation}" for number, (operation, *_) in enumerate(cases)]


def faked(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, list):
        return [faked(one, mode) for one in value]
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


def layout(value: Any) -> Any:
    """What memory an output takes, and how it lies there."""
    if isinstance(value, (list, tuple)):
        return [layout(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    return value.shape, value.dtype, value.stride(), value.untyped_storage().nbytes()


@pytest.mark.parametrize(("operation", "args", "kwargs"), PLAIN, ids=named(PLAIN))
def test_what_is_told_lies_in_memory_as_on_a_cpu(operation: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    found = told(operation, faked(args, FakeTensorMode()), kwargs)
    assert found is not UNTOLD
    assert layout(found) == layout(operation(*args, **kwargs))


@pytest.mark.parametrize(("operation", "args", "kwargs"), OTHERS, ids=named(OTHERS))
def test_what_is_no_plain_case_is_left_to_torch(operation: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    assert told(operation, faked(args, FakeTensorMode()), kwargs) is UNTOLD
