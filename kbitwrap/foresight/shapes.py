"""The outputs of common operations on tensors without values, told without torch's own rules, which are slower.

Most of a step is a few operations, and most of the time that they take without values
is spent on what torch knows of every case. Here are the plain cases alone: what an
operation makes is as large, and lies in memory as it would. Others are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_aten = torch.ops.aten

_MADE_ON_META = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.slice.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}
"""Operations to whose meta kernels torch's mode of fake tensors adds nothing."""

_OF_EACH = {
    _aten._foreach_add_.Scalar,
    _aten._foreach_addcdiv_.ScalarList,
    _aten._foreach_addcmul_.Scalar,
    _aten._foreach_div_.ScalarList,
    _aten._foreach_lerp_.Scalar,
    _aten._foreach_mul_.Scalar,
    _aten._foreach_sqrt.default,
}
"""Operations on each tensor of a list, as Adam steps."""

_ELEMENTWISE = {
    _aten.add.Tensor,
    _aten.div.Tensor,
    _aten.mul.Scalar,
    _aten.mul.Tensor,
    _aten.neg.default,
    _aten.pow.Tensor_Scalar,
    _aten.rsqrt.default,
    _aten.silu.default,
    _aten.silu_backward.default,
    _aten.sub.Tensor,
}
"""Operations on each element, whose meta kernels are written in Python."""


UNTOLD = object()
"""Stands for an output that torch has to tell."""


def told(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The output of an operation on tensors without values, in a plain case.

    Args:
        func: The operation.
        args: Its arguments.
        kwargs: Those by name.

    Returns:
        The output; ``UNTOLD`` where torch has to tell it.
    """
    if func in _OF_EACH:
        return _told_of_each(func, args)
    output = _told_of_one(func, args, kwargs)
    return UNTOLD if output is None else output


def _told_of_each(func: Any, args: Any) -> Any:
    """The outputs of an operation on a list of floats, which are like these; of one in place there are none."""
    first = args[0]
    for value in first:
        is_plain = isinstance(value, FakeTensor) and value.is_contiguous()
        if not is_plain or not value.dtype.is_floating_point:
            return UNTOLD
    if not func._schema.returns:
        return None
    with in_kernel_invocation_manager(first[0].fake_mode):
        made = [_empty(value.shape, value.dtype) for value in first]
    outputs = []
    for value, output in zip(first, made, strict=True):
        outputs.append(FakeTensor(value.fake_mode, output, value.fake_device))
    return outputs


def _told_of_one(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    rule = _RULES.get(func) or _OF_BITSANDBYTES.get(func.name())
    if rule is None:
        return None
    if not all(isinstance(value, FakeTensor) for value in _tensors(args)):
        return None
    first = args[0]
    with in_kernel_invocation_manager(first.fake_mode):
        made = rule(func, args, kwargs)
    if made is None:
        return None
    return FakeTensor(first.fake_mode, made, first.fake_device)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    return [value for value in args if isinstance(value, Tensor)]


def _on_meta(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """The result of the operation's own kernel."""
    made: Tensor = func(*args, **kwargs)
    return made


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _copied(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """A copy in another dtype, on the same device."""
    device = kwargs.get("device")
    if device is not None and device != args[0].fake_device:
        return None
    others = {name: value for name, value in kwargs.items() if name != "device"}
    made: Tensor = func(*args, **others)
    return made


def _elementwise(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Floats of one dtype, one of which is as large as the output, and lies in memory as it does."""
    tensors = _tensors(args)
    largest = max(tensors, key=torch.Tensor.dim)
    for tensor in tensors:
        if tensor.numel() > largest.numel():
            largest = tensor
    shape = largest.shape
    dtype = largest.dtype
    if not dtype.is_floating_point:
        return None
    for tensor in tensors:
        is_plain = tensor.dtype == dtype and tensor.is_contiguous()
        if not is_plain or not _reaches(tensor.shape, shape):
            return None
    return _empty(shape, dtype)


def _reaches(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is broadcast to another."""
    if len(shape) > len(wanted):
        return False
    last = wanted[len(wanted) - len(shape) :]
    return all(one in (1, other) for one, other in zip(shape, last, strict=True))


def _product(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The product of two matrices."""
    left, right = args
    if left.dtype != right.dtype or left.shape[1] != right.shape[0]:
        return None
    return _empty((left.shape[0], right.shape[1]), left.dtype)


def _linear(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The product of rows with a weight, without a bias."""
    if len(args) > 2 and args[2] is not None:
        return None
    rows, weight = args[:2]
    if rows.dtype != weight.dtype or rows.shape[-1] != weight.shape[-1]:
        return None
    return _empty((*rows.shape[:-1], weight.shape[0]), rows.dtype)


def _mean(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The mean over the last dimension, which is kept."""
    if len(args) != 3 or kwargs or args[1] != [-1] or args[2] is not True:
        return None
    values = args[0]
    return _empty((*values.shape[:-1], 1), values.dtype)


def _zeros(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Zeros of a tensor's shape and dtype."""
    like = args[0]
    asked = {name for name, value in kwargs.items() if value}
    if asked - {"memory_format"} or not like.is_contiguous():
        return None
    return _empty(like.shape, like.dtype)


def _sliced_backward(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """Zeros of the shape that was sliced, with the gradient in them."""
    gradient, shape = args[:2]
    return _empty(shape, gradient.dtype)


def _dequantized(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """A weight of the shape and dtype that is asked for."""
    if kwargs or len(args) != _NUM_OF_DEQUANTIZE:
        return None
    shape, dtype = args[-2:]
    return _empty(shape, dtype)


_NUM_OF_DEQUANTIZE = 6  # packed values, scales, block size, type, shape, dtype

_RULES: dict[Any, Callable[[Any, Any, Mapping[str, Any]], Tensor | None]] = {
    **dict.fromkeys(_MADE_ON_META, _on_meta),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    _aten._to_copy.default: _copied,
    _aten.linear.default: _linear,
    _aten.mean.dim: _mean,
    _aten.mm.default: _product,
    _aten.slice_backward.default: _sliced_backward,
    _aten.zeros_like.default: _zeros,
}
_OF_BITSANDBYTES = {"bitsandbytes::dequantize_4bit": _dequantized}
"""The rules of operations that are there once bitsandbytes is imported, by name."""
