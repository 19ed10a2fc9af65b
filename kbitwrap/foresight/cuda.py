"""Differences of CUDA from a CPU that change the memory of a step, for fake tensors, which stand on a CPU.

Each rule names the source in PyTorch (``aten/src/ATen``) that it follows. Left out, as
less than a thousandth of a step: the dtype of a layer norm's saved statistics, the
indices that an embedding's backward and an ``index_put`` sort, the split sums of flash
attention for very few queries, and what cuDNN takes for a convolution. A fused
``F.rms_norm`` would keep less than the parts that are followed here; transformers'
models have norms of their own. Losses, products of experts, ``topk`` and ``index_add``
hold on CUDA what they hold on a CPU. What cannot be known is in `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import (
    flash_sdp_enabled,
    mem_efficient_sdp_enabled,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..tensors.allocator import rounded_up
from ..tensors.dtypes import HALF_DTYPES
from . import quantization

_aten = torch.ops.aten
# as they are, whatever others put in their place
_ATTENTION, _DROPOUT = F.scaled_dot_product_attention, F.dropout

# The lists of ATen/autocast_mode.h for CUDA; for a CPU they are shorter. `promote`
# changes no dtype that lives long.
_FLOAT32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss cross_entropy
    binary_cross_entropy_with_logits dist cdist renorm logsumexp interpolate __pow__ __rpow__
"""
_FLOAT32_RESULT = "prod softmax log_softmax cumprod cumsum sum norm"


def _named(names: str) -> set[Any]:
    """Return the functions and methods of torch of these names."""
    found: set[Any] = set()
    for space in (torch, torch.Tensor, F):
        found.update(getattr(space, name, None) for name in names.split())
    return found - {None}


_IN_FLOAT32, _TO_FLOAT32 = _named(_FLOAT32), _named(_FLOAT32_RESULT)
_SOFTMAX = dict.fromkeys(_named("softmax"), _aten._softmax)
_SOFTMAX |= dict.fromkeys(_named("log_softmax"), _aten._log_softmax)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value if value.dtype == torch.float64 else value.to(dtype)


class CudaFunctions(TorchFunctionMode):
    """Runs the functions of torch that CUDA computes by other operations, by those; each with its own backward."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run one function."""
        kwargs = kwargs or {}
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = _autocast(func, args, kwargs)
        if func is torch.Tensor.backward:
            with self:  # what checkpoints run again is under the mode too
                return _run_engine(*args, **kwargs)
        if func is _ATTENTION:
            return attention(*args, **kwargs)
        if func is _DROPOUT:
            return _dropout(*args, **kwargs)
        if func in _SOFTMAX:
            return _softmax(func, args, kwargs)
        return func(*args, **kwargs)


def _run_engine(loss: Tensor, *_: Any, **__: Any) -> None:
    """Run the backward pass of a loss by autograd's engine itself: torch's functions would turn the mode off."""
    engine = torch.autograd.Variable._execution_engine
    gradient = torch.ones_like(loss)
    engine.run_backward(
        (loss,),
        (gradient,),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _autocast(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Apply autocast's policies for CUDA where those for a CPU leave a function alone.

    They are ``fp32`` and ``fp32_set_opt_dtype``. Arguments by position and by name are returned.
    """
    if func in _IN_FLOAT32:
        args = [_cast(value, torch.float32) for value in args]
        kwargs = {key: _cast(value, torch.float32) for key, value in kwargs.items()}
    elif func in _TO_FLOAT32 and kwargs.get("dtype") is None:
        given = args[0] if args else kwargs.get("input")
        if isinstance(given, Tensor) and given.dtype in HALF_DTYPES:
            kwargs = {**kwargs, "dtype": torch.float32}
    return args, kwargs


def _softmax(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Compute a float32 softmax of float16 in one operation, without a copy: native/SoftMax.cpp, ``softmax``.

    bfloat16 is copied to float32 first, as on a CPU.
    """
    given = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    value, dim = given["input"], given.get("dim")
    is_wider = torch.float32 in (*args[2:], given.get("dtype"))
    if value.dtype == torch.float16 and is_wider and dim is not None:
        return _SOFTMAX[func](value, dim, True)  # type: ignore[no-any-return]
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Dropout keeps a mask of one byte an element: native/Dropout.cpp, ``is_fused_kernel_acceptable``."""
    if training and 0 < p < 1 and input.numel() and not inplace:
        return _aten.native_dropout(input, p, True)[0]  # type: ignore[no-any-return]
    return _DROPOUT(input, p, training, inplace)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend by the kernel that CUDA chooses, with what it keeps: flash, else memory-efficient, else plain products.

    The order and the conditions are those of native/transformers/cuda/sdp_utils.cpp for
    compute capability 8.0 and up, with the switches of
    ``torch.nn.attention.sdpa_kernel``. cuDNN's kernel, which newer devices take first,
    keeps what flash keeps.

    Args:
        query: ``(batch, heads, length, size)``, or of other dimensions.
        key: ``(batch, key heads, key length, size)``.
        value: ``(batch, key heads, key length, value size)``.
        attn_mask: As for ``F.scaled_dot_product_attention``, as are the others.
        dropout_p: The probability of dropout.
        is_causal: Whether no query sees a later key.
        scale: What products are multiplied with, which changes no size.
        enable_gqa: Whether several heads may share a key.

    Returns:
        ``(batch, heads, length, value size)``, in the dtype of ``value``.
    """
    if torch.is_autocast_enabled("cpu"):
        lower = torch.get_autocast_dtype("cpu")
        query, key, value = (_cast(tensor, lower) for tensor in (query, key, value))
        attn_mask = _cast(attn_mask, lower)
    is_dense = query.ndim == key.ndim == value.ndim == 4
    is_even = is_dense and query.shape[1] == key.shape[1] == value.shape[1]
    takes_heads = is_even or (is_dense and enable_gqa)
    is_plain = attn_mask is None and takes_heads
    if is_plain and _takes_flash(query, key, value, is_causal):
        return _flash(query, key, value, dropout_p, is_causal)
    if is_even and _takes_efficient(query, value):
        keeps = query.requires_grad or key.requires_grad or value.requires_grad
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            bias,
            keeps and torch.is_grad_enabled(),
            dropout_p,
            is_causal,
        )[0]
    return _aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa
    )[0]


def _takes_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Return whether the flash kernel is switched on and takes tensors of such shapes, without a mask.

    Its conditions are those of native/transformers/cuda/sdp_utils.cpp, of which those that
    hold for the tensors of a model are left out.
    """
    size = query.shape[-1]
    is_square = query.shape[-2] == key.shape[-2]
    return (
        flash_sdp_enabled()
        and query.dtype in HALF_DTYPES
        and size == key.shape[-1] == value.shape[-1]
        and size <= 256
        and (is_square or not is_causal)
    )


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool
) -> Tensor:
    """Attend by the flash kernel, which pads heads to a multiple of 8: ``pad_last_dim`` of attention.cpp."""
    size = query.shape[-1]
    padded = (query, key, value)
    if size % 8:
        query, key, value = (F.pad(tensor, (0, -size % 8)) for tensor in padded)
    found: Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal
    )[0]
    return found[..., :size] if size % 8 else found


def _takes_efficient(query: Tensor, value: Tensor) -> bool:
    """Return whether the memory-efficient kernel is switched on and takes tensors of such dtypes and shapes."""
    if not mem_efficient_sdp_enabled() or query.dtype not in (
        *HALF_DTYPES,
        torch.float32,
    ):
        return False
    multiple = 16 // query.element_size()
    return query.shape[-1] % multiple == 0 and value.shape[-1] % multiple == 0


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the memory-efficient kernel takes it.

    It is of the query's dtype, and its rows begin at multiples of 8 elements:
    native/transformers/attention.cpp, ``convert_boolean_attn_mask`` and
    ``preprocess_mask``.
    """
    if mask.dtype == torch.bool:
        mask = torch.where(
            mask.logical_not(), float("-inf"), torch.zeros((), dtype=query.dtype)
        )
    if mask.stride(-1) != 1 or any(stride % 8 for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, 8 - width % 8))[..., :width]
    return mask.expand(*query.shape[:3], key.shape[2])


def _copied_bytes(tensor: Tensor) -> int:
    """Return the bytes of what a kernel copies first: a tensor whose rows by token are not in order."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes


def flash_backward_bytes(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *_: Any,
    **__: Any,
) -> list[int]:
    """Return the bytes that flash attention's backward holds beside its results: ``mha_bwd`` of flash_api.cpp.

    The float32 sum of the query's gradient and its row sums, for 128 queries at a time,
    heads rounded to 32 (64 above 128); and where heads are grouped, the gradients of
    key and value for all heads.
    """
    batch, heads, length, size = query.shape
    row_sums = batch * heads * rounded_up(length, 128) * 4
    rounded_size = rounded_up(size, 32 if size <= 128 else 64)
    held = [
        row_sums,
        row_sums * rounded_size,
        _copied_bytes(grad),
        _copied_bytes(out),
    ]
    if key.shape[1] != heads:
        held += [batch * heads * key.shape[2] * size * key.element_size()] * 2
    return held


def efficient_forward_bytes(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> list[int]:
    """Return the bytes that the memory-efficient kernel holds beside its results.

    Heads above 128 are summed up in float32: ``kNeedsOutputAccumulatorBuffer`` of
    kernel_forward.h.
    """
    size = value.shape[-1]
    if size <= 128 or value.dtype not in HALF_DTYPES:
        return []
    batch, heads, length, _size = query.shape
    return [batch * heads * length * size * 4]


def efficient_backward_bytes(
    grad: Tensor, query: Tensor, key: Tensor, *_: Any, **__: Any
) -> list[int]:
    """Return the bytes that the memory-efficient backward holds beside its results: ``_efficient_attention_backward``.

    Row sums, and ``workspace_size`` of mem_eff_attention/kernel_backward.h: the query's
    gradient in float32, in tiles of 64 by 64 with 16 bytes each. A float32 product of
    output and gradient comes before, and is not more.
    """
    batch, heads, length, size = query.shape
    tiles = rounded_up(length, 64) // 64 * (rounded_up(size, 64) // 64)
    return [
        batch * heads * length * 4,
        batch * heads * tiles * (64 * 64 * 4 + 16),
        _copied_bytes(grad),
    ]


def softmax_backward_bytes(
    grad: Tensor, output: Tensor, *_: Any, **__: Any
) -> list[int]:
    """Return the bytes of the product of gradient and output.

    It is made by ``softmax_backward_cuda_out`` of native/cuda/SoftMax.cu.
    """
    return [max(grad.nbytes, output.nbytes)]


SCRATCH: Mapping[str, Callable[..., list[int]]] = {
    **quantization.SCRATCH,
    "aten::_scaled_dot_product_flash_attention_backward": flash_backward_bytes,
    "aten::_scaled_dot_product_efficient_attention": efficient_forward_bytes,
    "aten::_scaled_dot_product_efficient_attention_backward": efficient_backward_bytes,
    "aten::_softmax_backward_data": softmax_backward_bytes,
}
"""The allocations that operations make inside themselves and free before they return, in bytes."""
