"""What quantized layers hold and run, for those who count: the statistics of their weights, and their operations."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..model.quantization import is_quantized_parameter, quantized_stacks, state_owners


def _parts_of_product() -> Callable[..., torch.Tensor]:
    """The 4-bit matrix product in two operations, as bitsandbytes computes it where it has no kernel for both."""
    operations: Any = sys.modules["bitsandbytes.backends.default.ops"]
    return operations._gemm_4bit_default_impl  # type: ignore[no-any-return]


def _parts_of_int8_product() -> Callable[..., torch.Tensor]:
    """The 8-bit matrix product and its scaling, with the int32 result between them."""
    parts: Any = torch.ops.bitsandbytes

    def product(a: Any, b: Any, rows: Any, columns: Any, bias: Any = None, dtype: Any = None) -> torch.Tensor:
        return parts.int8_mm_dequant(parts.int8_linear_matmul(a, b), rows, columns, dtype=dtype, bias=bias)  # type: ignore[no-any-return]

    return product


DECOMPOSED = {
    "bitsandbytes::gemm_4bit": _parts_of_product,
    "bitsandbytes::int8_scaled_mm": _parts_of_int8_product,
}
"""The operations whose kernels allocate a dequantized weight, and the functions that make it in the open."""


def _tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item, depth)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        for item in vars(value).values():
            yield from _tensors_in(item, depth - 1)


def statistics_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that hold the quantization state of a layer, beside its weight."""
    for parameter in module._parameters.values():
        if parameter is not None and (is_quantized_parameter(parameter) or vars(parameter)):
            for _, owner, keys in state_owners(module, parameter):
                fields = vars(owner) if keys is None else {k: getattr(owner, k, None) for k in keys}
                for value in fields.values():
                    yield from _tensors_in(value)
    for _, state in quantized_stacks(module).values():
        yield from _tensors_in(state)


def quantize_fakes(module: nn.Module, name: str, parameter: Any, fake: Callable[[Any], Any]) -> Any:
    """A stand-in for a bitsandbytes weight: a plain parameter of its storage, with the statistics that go with it.

    ``fake`` makes a fake tensor on the CPU of any other. A weight that has statistics keeps them; one that was built
    from a config gets those that the library's own functions make.
    """
    functional: Any = sys.modules["bitsandbytes.functional"]
    state = getattr(parameter, "quant_state", None)
    unpacked: Any = getattr(parameter, "unpacked", None)
    if parameter.dtype == torch.int8 and type(parameter).__name__ == "Int8Params":
        scales = getattr(parameter, "SCB", None)
        if unpacked is not None:
            scales = functional.int8_vectorwise_quant(torch.empty(unpacked.shape, dtype=torch.float16))[1]
        data = fake(parameter.data)
        result: Any = nn.Parameter(data, requires_grad=False)
        result.CB, result.SCB = (None, None) if scales is None else (data, fake(scales))
        return result
    if state is None and unpacked is None:
        return None
    if state is None:
        options = {key: getattr(parameter, key) for key in ("blocksize", "compress_statistics", "quant_type")}
        options["quant_storage"] = parameter.quant_storage
        data, state = functional.quantize_4bit(torch.empty(unpacked.shape, dtype=unpacked.dtype), **options)
    else:
        data = fake(parameter.data)
        replace_tensors(state, fake)
    result = nn.Parameter(data, requires_grad=False)
    result.quant_state, result.bnb_quantized = state, True
    module.quant_state = state
    return result


def int8_quantization_bytes(value: torch.Tensor, *_: Any, **__: Any) -> list[int]:
    """What a search for outliers makes on CUDA: magnitudes, and where they are large."""
    return [value.numel() * value.element_size(), value.numel()]


def int8_scaling_bytes(product: torch.Tensor, *statistics: Any, dtype: Any = None, **_: Any) -> list[int]:
    """The float16 result of scaling on CUDA, where another dtype is asked for."""
    return [] if dtype in (None, torch.float16) else [product.numel() * 2]


SCRATCH: dict[str, Callable[..., list[int]]] = {
    "bitsandbytes::int8_vectorwise_quant": int8_quantization_bytes,
    "bitsandbytes::int8_mm_dequant": int8_scaling_bytes,
}
"""The allocations that operations of bitsandbytes make inside themselves on CUDA and free before they return."""


def follow_cuda(model: nn.Module) -> bool:
    """Make the 8-bit layers of a throwaway model compute as on CUDA, as if nothing was an outlier; whether it has any.

    In training, bitsandbytes computes them by another function on a CPU, but not in layers in evaluation mode.
    """
    found = ((module, getattr(module, "state", None)) for module in model.modules())
    states: list[tuple[nn.Module, Any]] = [(m, state) for m, state in found if hasattr(state, "has_fp16_weights")]
    for module, state in states:
        module.training, state.threshold = False, 0.0
    return bool(states)


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Keep bitsandbytes from logging what its products do to each input."""
    logger = logging.getLogger("bitsandbytes.autograd._functions")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def replace_tensors(owner: Any, fake: Callable[[Any], Any], depth: int = 4) -> None:
    """Replace the tensors in an object's fields, and in those of the objects in them, in place."""
    for name, value in list(vars(owner).items()):
        if isinstance(value, torch.Tensor):
            setattr(owner, name, fake(value))
        elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
            replace_tensors(value, fake, depth - 1)


def warm_tables() -> None:
    """Make the table that bitsandbytes keeps of 8-bit codes, so that it is not made of fake tensors."""
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if functional is not None:
        functional.quantize_blockwise(torch.zeros(256))


def eight_bit_optimizer(parameters: Any, bits: int, is_paged: bool) -> Any:
    """The AdamW of bitsandbytes: small states stay in float32, and large paged ones lie in managed memory."""
    optimizers = importlib.import_module("bitsandbytes.optim")
    with _disable_current_modes():  # it computes its tables of codes
        return optimizers.AdamW(parameters, lr=1e-4, optim_bits=bits, is_paged=is_paged)


def is_managed(optimizer: Any, tensor: torch.Tensor) -> bool:
    """Whether a state of a paged optimizer lies in managed memory: ``get_state_buffer``, from 100,000 elements."""
    return getattr(optimizer, "is_paged", False) and tensor.numel() >= 1e5
