"""The statistics that quantized layers hold and the operations that they run, for those who count memory."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor


def _four_bit_product(*args: Any, **kwargs: Any) -> Tensor:
    """Compute the 4-bit matrix product as bitsandbytes does where it has no kernel: dequantizing comes first."""
    operations = sys.modules["bitsandbytes.backends.default.ops"]
    return operations._gemm_4bit_default_impl(*args, **kwargs)  # type: ignore[no-any-return]


def _int8_product(
    a: Any, b: Any, rows: Any, columns: Any, bias: Any = None, dtype: Any = None
) -> Tensor:
    """Compute the 8-bit matrix product and its scaling, with the int32 result between them."""
    parts = torch.ops.bitsandbytes
    product = parts.int8_linear_matmul(a, b)
    return parts.int8_mm_dequant(product, rows, columns, dtype=dtype, bias=bias)  # type: ignore[no-any-return]


DECOMPOSED: dict[str, Callable[..., Tensor]] = {
    "bitsandbytes::gemm_4bit": _four_bit_product,
    "bitsandbytes::int8_scaled_mm": _int8_product,
}
"""Operations whose kernels allocate more than their results, and the functions that allocate it in the open."""


def _is_of_library(value: Any) -> bool:
    return type(value).__module__.startswith("bitsandbytes.")


def places_of_tensors(owner: Any, depth: int = 4) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield the tensors in a list, a dict or an object of a quantization library, and in those that it holds.

    Each comes after the fields that it is in, and its key in them.
    """
    fields = owner if isinstance(owner, (dict, list)) else vars(owner)
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        is_holder = isinstance(value, (dict, list)) or _is_of_library(value)
        if isinstance(value, Tensor):
            yield fields, key, value
        elif depth and is_holder and not isinstance(value, nn.Module):
            yield from places_of_tensors(value, depth - 1)


def statistics_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that hold the quantization state of a layer, beside its weight."""
    holders = list(filter(_is_of_library, vars(module).values()))
    for parameter in module._parameters.values():
        if parameter is not None:
            holders.append(vars(parameter))
    for holder in holders:
        for _, _, tensor in places_of_tensors(holder):
            yield tensor


def add_statistics(model: nn.Module) -> None:
    """Give the weights that were built from a config statistics, of which PEFT computes the norms of DoRA."""
    warm_tables()
    parameters: list[Any] = list(filter(is_built, model.parameters()))
    for parameter in parameters:
        name = "SCB" if _is_int8(parameter) else "quant_state"
        weight = torch.empty_like(parameter.unpacked, device="meta")
        setattr(parameter, name, quantize_weight(parameter, weight)[1])


_CLASSES = {
    name: type(name, (FakeTensor,), {}) for name in ("Int8Params", "Params4bit")
}
"""Classes of fake weights, by whose names PEFT finds out how to compute the values."""


def fake_weight(
    module: nn.Module, parameter: Any, fake: Callable[[Any], Any]
) -> nn.Parameter | None:
    """Return a stand-in for a bitsandbytes weight: a plain parameter of its storage, with its statistics.

    Those that the layer holds too become fake with the layer's other tensors.

    Args:
        module: The layer.
        parameter: Its weight, with its statistics.
        fake: Makes a fake tensor on the CPU of any other.

    Returns:
        The parameter; ``None`` for a weight that is not bitsandbytes'.
    """
    is_int8 = _is_int8(parameter)
    statistics = getattr(parameter, "quant_state", None)
    if not is_int8 and statistics is None:
        return None
    data = fake(parameter.data)
    result: Any = nn.Parameter(data, requires_grad=False)
    if is_int8:
        result.__class__ = _CLASSES["Int8Params"]
        result.CB = result.SCB = None
        if parameter.SCB is not None:
            result.CB, result.SCB = data, fake(parameter.SCB)
    else:
        result.__class__ = _CLASSES["Params4bit"]
        result.quant_state = statistics
        module.quant_state = statistics  # type: ignore[assignment]
    return result  # type: ignore[no-any-return]


def _is_int8(parameter: Any) -> bool:
    is_named = type(parameter).__name__ == "Int8Params"
    return is_named and parameter.dtype == torch.int8


def is_built(parameter: Any) -> bool:
    """Return whether a weight was built from a config, and has no statistics."""
    return getattr(parameter, "unpacked", None) is not None


def is_followed(quantizer: Any) -> bool:
    """Return whether a quantizer of transformers is one whose weights ``quantize_weight`` makes."""
    method: str = quantizer.quantization_config.quant_method
    return method.startswith("bitsandbytes")


def quantize_weight(parameter: Any, weight: Tensor) -> Any:
    """Quantize a weight as loading does on CUDA: 8 bits are made of a float16 copy that comes from the host.

    Its rows are put in order first, for 8 bits on the host.

    Args:
        parameter: The parameter that was built from a config.
        weight: The weight, without values.

    Returns:
        What is kept: the codes, and the statistics.
    """
    if _is_int8(parameter):
        half = torch.empty_like(weight, dtype=torch.float16)
        codes = torch.empty_like(half, dtype=torch.int8)
        return codes, half.new_empty(weight.shape[0], dtype=torch.float32)
    functional = sys.modules["bitsandbytes.functional"]
    return functional.quantize_4bit(
        weight.contiguous(),
        blocksize=parameter.blocksize,
        compress_statistics=parameter.compress_statistics,
        quant_type=parameter.quant_type,
        quant_storage=parameter.quant_storage,
    )


def int8_quantization_bytes(value: Tensor, *_: Any, **__: Any) -> list[int]:
    """Return the bytes that a search for outliers allocates on CUDA: magnitudes, and where they are large."""
    return [value.nbytes, value.numel()]


def int8_scaling_bytes(
    product: Tensor, *statistics: Any, dtype: Any = None, **_: Any
) -> list[int]:
    """Return the float16 result of scaling on CUDA, where another dtype is asked for."""
    return [] if dtype in (None, torch.float16) else [product.numel() * 2]


SCRATCH: dict[str, Callable[..., list[int]]] = {
    "bitsandbytes::int8_vectorwise_quant": int8_quantization_bytes,
    "bitsandbytes::int8_mm_dequant": int8_scaling_bytes,
}
"""The allocations that operations of bitsandbytes make inside themselves on CUDA and free before they return."""


def follow_cuda(model: nn.Module) -> bool:
    """Make the 8-bit layers of a model compute as on CUDA, as if nothing was an outlier.

    In training, bitsandbytes computes them by another function on a CPU, but not in
    layers in evaluation mode.

    Args:
        model: A model to throw away.

    Returns:
        Whether it has such layers.
    """
    has_any = False
    for module in model.modules():
        state: Any = getattr(module, "state", None)
        if hasattr(state, "has_fp16_weights"):
            module.training = False
            state.threshold = 0.0
            has_any = True
    return has_any


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep bitsandbytes from logging its products for each input, and torch what an error says that is raised."""
    of_products = logging.getLogger("bitsandbytes.autograd._functions")
    of_fakes = logging.getLogger("torch._subclasses.fake_tensor")
    with (
        mock.patch.object(of_products, "disabled", True),
        mock.patch.object(of_fakes, "disabled", True),
    ):
        yield


def warm_tables() -> None:
    """Make the table that bitsandbytes keeps of 8-bit codes, so that it is not made of fake tensors."""
    functional = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        functional.quantize_blockwise(torch.ones(256, device="cpu"))
