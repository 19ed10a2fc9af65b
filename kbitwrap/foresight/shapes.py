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
    _aten.squeeze.dim,
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
    _aten.div.Scalar,
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
    return [_faked(_empty(value.shape, value.dtype), value) for value in first]


def _told_of_one(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    rule = _RULES.get(func) or _OF_BITSANDBYTES.get(func.name())
    if rule is None:
        return None
    tensors = _tensors(args)
    if not all(isinstance(value, FakeTensor) for value in tensors):
        return None
    made = rule(func, args, kwargs)
    return None if made is None else _faked(made, tensors[0])


def _faked(made: Tensor, like: Any) -> Tensor:
    """The fake tensor on the device of another one that stands for one on the meta device.

    Torch's function takes longer than most operations: what it gives every tensor of a
    mode is taken from one that it made.
    """
    mode = like.fake_mode
    device = like.fake_device
    # no tensor, which would hold the mode that holds it
    blanks: dict[torch.device, dict[str, Any]] = vars(mode).setdefault(_BLANKS, {})
    if device not in blanks:
        blank = FakeTensor(mode, _empty((0,), torch.float32), device)
        blanks[device] = dict(vars(blank))
    output = Tensor._make_subclass(
        FakeTensor,
        made,
        dispatch_device=True,
        device_for_backend_keys=device,
    )
    vars(output).update(blanks[device])
    return output


_BLANKS = "_kbitwrap_blanks"
"""The attribute of a mode for the fields of fake tensors, by their device."""


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists of them."""
    found: list[Tensor] = []
    for value in args:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) is list:
            found += _tensors(value)
    return found


def _on_meta(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor:
    """The result of the operation's own kernel."""
    with in_kernel_invocation_manager(args[0].fake_mode):
        made: Tensor = func(*args, **kwargs)
    return made


def _empty(
    shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> Tensor:
    """A tensor on the meta device, contiguous or of given strides."""
    with torch._C._DisableTorchDispatch():
        if strides is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _copied(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """A copy in another dtype, on the same device."""
    device = kwargs.get("device")
    if device is not None and device != args[0].fake_device:
        return None
    others = {name: value for name, value in kwargs.items() if name != "device"}
    return _on_meta(func, args, others)


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
        if tensor.dtype != dtype or not _reaches(tensor.shape, shape):
            return None
    if all(tensor.is_contiguous() for tensor in tensors):
        return _empty(shape, dtype)
    strides = _strides_like(tensors[0], shape)
    return None if strides is None else _empty(shape, dtype, strides)


def _strides_like(first: Tensor, shape: torch.Size) -> list[int] | None:
    """The strides of an output that lies as the first input does, without gaps.

    Dimensions are in the order of the first input's strides: TensorIterator.cpp,
    ``reorder_dimensions``.

    Args:
        first: The first input.
        shape: The shape of the output.

    Returns:
        The strides; ``None`` where other inputs have a say in the order.
    """
    if first.shape != shape:
        return None
    own = first.stride()
    if 0 in own or len(set(own)) < len(own):
        return None
    strides = list(own)
    num_elements = num_spanned = 1
    for dim in sorted(range(len(own)), key=own.__getitem__):
        strides[dim] = num_elements
        num_elements *= shape[dim]
        num_spanned += (shape[dim] - 1) * own[dim]
    # without gaps, strides are kept, that of a dimension of one element too
    is_dense = num_spanned == num_elements
    return None if is_dense and strides != list(own) else strides


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


def _products(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The products of matrices in two batches."""
    left, right = args
    if left.dtype != right.dtype:
        return None
    return _empty((*left.shape[:2], right.shape[2]), left.dtype)


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


def _sum(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The sum of floats over some dimensions."""
    values, dims = args[:2]
    if kwargs or not dims or not values.dtype.is_floating_point:
        return None
    keeps = len(args) > 2 and args[2]
    shape = list(values.shape)
    for dim in dims:
        shape[dim] = 1 if keeps else 0
    return _empty([size for size in shape if size], values.dtype)


def _joined(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Tensors of one dtype, one after the other, whose channels do not lie together."""
    tensors = args[0]
    dim = args[1] if len(args) > 1 else 0
    first = tensors[0]
    shape = list(first.shape)
    shape[dim] = 0
    for tensor in tensors:
        is_alike = tensor.dtype == first.dtype and tensor.dim() == first.dim()
        if not is_alike or not tensor.numel() or _may_be_channels_last(tensor):
            return None
        shape[dim] += tensor.shape[dim]
    return _empty(shape, first.dtype)


def _may_be_channels_last(tensor: Tensor) -> bool:
    """Whether torch may take the strides of a tensor for those of images whose channels lie together."""
    return tensor.dim() in (4, 5) and tensor.stride(1) <= tensor.stride(-1)


def _softmax(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """A softmax, or its gradient, of what is contiguous and has the dtype that is asked for."""
    first = args[0]
    is_plain = first.is_contiguous() and first.dtype.is_floating_point
    others = [value for value in args if isinstance(value, torch.dtype)]
    if kwargs or not is_plain or others not in ([], [first.dtype]):
        return None
    return _empty(first.shape, first.dtype)


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
    _aten._safe_softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax,
    _aten._to_copy.default: _copied,
    _aten.bmm.default: _products,
    _aten.cat.default: _joined,
    _aten.linear.default: _linear,
    _aten.mean.dim: _mean,
    _aten.mm.default: _product,
    _aten.slice_backward.default: _sliced_backward,
    _aten.sum.dim_IntList: _sum,
    _aten.zeros_like.default: _zeros,
}
_OF_BITSANDBYTES = {"bitsandbytes::dequantize_4bit": _dequantized}
"""The rules of operations that are there once bitsandbytes is imported, by name."""
