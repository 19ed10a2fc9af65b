"""The statistics that quantized layers hold and the operations that they run, for those who count memory."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..model.bitsandbytes_layers import state_owners
from ..model.quantization import is_quantized_parameter, quantized_stacks


def _parts_of_product() -> Callable[..., Tensor]:
    """Return bitsandbytes' function for the 4-bit matrix product where it has no kernel: dequantizing comes first."""
    operations: Any = sys.modules["bitsandbytes.backends.default.ops"]
    return operations._gemm_4bit_default_impl  # type: ignore[no-any-return]


def _parts_of_int8_product() -> Callable[..., Tensor]:
    """Return a function that computes the 8-bit matrix product and its scaling, with the int32 result between them."""
    parts: Any = torch.ops.bitsandbytes

    def product(
        a: Any, b: Any, rows: Any, columns: Any, bias: Any = None, dtype: Any = None
    ) -> Tensor:
        return parts.int8_mm_dequant(  # type: ignore[no-any-return]
            parts.int8_linear_matmul(a, b), rows, columns, dtype=dtype, bias=bias
        )

    return product


DECOMPOSED = {
    "bitsandbytes::gemm_4bit": _parts_of_product,
    "bitsandbytes::int8_scaled_mm": _parts_of_int8_product,
}
"""The operations whose kernels allocate a dequantized weight, and the functions that make it in the open."""


def _is_holder(value: Any) -> bool:
    """Return whether a value may hold tensors: a list, a dict, or an object of a quantization library."""
    return isinstance(value, (dict, list)) or type(value).__module__.startswith(
        "bitsandbytes."
    )


def _places(owner: Any, depth: int = 4) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield the tensors in a holder, and in the holders in it: the fields that each is in, its key, and the tensor."""
    fields = owner if isinstance(owner, (dict, list)) else vars(owner)
    for key, value in fields.items() if isinstance(fields, dict) else enumerate(fields):
        if isinstance(value, Tensor):
            yield fields, key, value
        elif depth and not isinstance(value, (type, nn.Module)) and _is_holder(value):
            yield from _places(value, depth - 1)


def replace_tensors(owner: Any, fake: Callable[[Any], Any]) -> None:
    """Replace the tensors in a holder, and in the holders in it, in place.

    Args:
        owner: A list, a dict, or an object of a quantization library.
        fake: Makes a fake tensor of any other.
    """
    for fields, key, value in list(_places(owner)):
        fields[key] = fake(value)


def statistics_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that hold the quantization state of a layer, beside its weight."""
    holders: list[Any] = [state for _, state in quantized_stacks(module).values()]
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        if not (is_quantized_parameter(parameter) or vars(parameter)):
            continue
        owners = state_owners(module, parameter)
        holders += [owner.fields() for owner in owners]
    for holder in filter(_is_holder, holders):
        for _, _, tensor in _places(holder):
            yield tensor


def weight_statistics(parameter: Any, device: str) -> Any:
    """Return the statistics of a weight: those that it has, or new ones if it was built from a config.

    Args:
        parameter: The weight.
        device: The device that new ones are to be on.
    """
    if not is_built(parameter):
        name = "SCB" if _is_int8(parameter) else "quant_state"
        return getattr(parameter, name, None)  # other libraries' weights have none
    functional: Any = sys.modules["bitsandbytes.functional"]
    whole = parameter.unpacked
    dtype = torch.float16 if _is_int8(parameter) else whole.dtype
    weight = torch.empty(whole.shape, dtype=dtype, device=device)
    if _is_int8(parameter):
        return functional.int8_vectorwise_quant(weight)[1]
    return _in_four_bits(parameter, weight)[1]


def quantize_fakes(
    module: nn.Module,
    parameter: Any,
    statistics: Any,
    fake: Callable[[Any], Any],
) -> Any:
    """Return a stand-in for a bitsandbytes weight: a plain parameter of its storage, with its statistics.

    Args:
        module: The layer.
        parameter: Its weight.
        statistics: The weight's statistics, or new ones.
        fake: Makes a fake tensor on the CPU of any other.

    Returns:
        The parameter; ``None`` for a weight that is not bitsandbytes'.
    """
    if _is_int8(parameter):
        data = fake(parameter.data)
        result: Any = _of_name("Int8Params", data)
        result.CB = result.SCB = None
        if statistics is not None:
            result.CB, result.SCB = data, fake(statistics)
        replace_tensors(vars(module)["state"], fake)
        return result
    if statistics is None:
        return None
    replace_tensors(statistics, fake)
    result = _of_name("Params4bit", fake(parameter.data))
    result.quant_state = statistics
    result.bnb_quantized = True
    module.quant_state = statistics
    return result


def _is_int8(parameter: Any) -> bool:
    is_named = type(parameter).__name__ == "Int8Params"
    return is_named and parameter.dtype == torch.int8


def is_built(parameter: Any) -> bool:
    """Return whether a weight was built from a config, and has no statistics."""
    return getattr(parameter, "unpacked", None) is not None


def method_of(quantizer: Any) -> str:
    """Return the name of the method of a quantizer of transformers."""
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def is_followed(quantizer: Any) -> bool:
    """Return whether a quantizer of transformers is one whose weights ``quantize_weight`` makes."""
    return method_of(quantizer).startswith("bitsandbytes")


def _in_four_bits(parameter: Any, weight: Tensor) -> Any:
    """Return the storage and the statistics of a weight that is quantized as a parameter says."""
    functional: Any = sys.modules["bitsandbytes.functional"]
    return functional.quantize_4bit(
        weight,
        blocksize=parameter.blocksize,
        compress_statistics=parameter.compress_statistics,
        quant_type=parameter.quant_type,
        quant_storage=parameter.quant_storage,
    )


def quantize_weight(parameter: Any, weight: Tensor) -> Any:
    """Quantize a weight as loading does on CUDA: 8 bits are made of a float16 copy that comes from the host.

    Its rows are put in order first, for 8 bits on the host.

    Args:
        parameter: The parameter that was built from a config.
        weight: The weight, without values.

    Returns:
        What is kept.
    """
    if not _is_int8(parameter):
        return _in_four_bits(parameter, weight.contiguous())
    half = torch.empty_like(weight, dtype=torch.float16)
    codes = torch.empty_like(half, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32)
    return codes, scales


@contextlib.contextmanager
def with_statistics(model: nn.Module) -> Iterator[None]:
    """For a while, weights that were built from a config have statistics, of which PEFT computes the norms of DoRA."""
    warm_tables()
    built: list[Any] = list(filter(is_built, model.parameters()))
    for parameter in built:
        name = "SCB" if _is_int8(parameter) else "quant_state"
        setattr(parameter, name, weight_statistics(parameter, "meta"))
    try:
        yield
    finally:
        for parameter in built:
            parameter.SCB = parameter.quant_state = None


def _of_name(name: str, data: Tensor) -> nn.Parameter:
    """Return a parameter of fake data under the name of a class, by which PEFT finds out how to compute the values."""
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.__class__ = _named_class(name)
    return parameter


@functools.cache
def _named_class(name: str) -> type:
    return type(name, (FakeTensor,), {})


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
    with contextlib.ExitStack() as stack:
        for name in (
            "bitsandbytes.autograd._functions",
            "torch._subclasses.fake_tensor",
        ):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
        yield


def warm_tables() -> None:
    """Make the table that bitsandbytes keeps of 8-bit codes, so that it is not made of fake tensors."""
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        functional.quantize_blockwise(torch.ones(256, device="cpu"))
