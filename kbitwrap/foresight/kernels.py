"""TRL's fused head as on CUDA: its Triton kernels allocate nothing, and nothing runs in their place."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import Tensor

from ..tensors.dtypes import HALF_DTYPES

TRL_VERSION = "trl 1.16."  # whose kernels are followed


def _launch_nothing(tile: Tensor, *args: Any, **_: Any) -> None:
    """Stand in for the launch of a kernel: mark its floating-point arguments as unknown.

    They get an element of the tile, whose values are unknown because they depend on
    activations. The kernel allocates nothing; the Python around it does, and runs.
    """
    if tile.numel():
        for value in args:
            if isinstance(value, Tensor) and value.is_floating_point():
                value.copy_(tile[(0,) * tile.ndim])


@contextlib.contextmanager
def fused_heads_on_cuda() -> Iterator[None]:
    """Let TRL's fused head compute as on CUDA.

    Its forward and backward are those of ``ChunkedLogProbFunction`` in
    trl/kernels/chunked_logprob.py; ``_addmm_fp32`` there is one operation on CUDA.

    Yields:
        Nothing.
    """
    module = sys.modules.get("trl.kernels.chunked_logprob")
    if module is None:
        yield
        return

    def uses_triton(device: Any) -> bool:
        return True

    add_in_float32 = module._addmm_fp32

    def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
        # cuBLAS adds a product of half tensors in the total itself: nothing is allocated
        if left.dtype not in HALF_DTYPES:
            add_in_float32(total, left, right)

    # A launch is written ``kernel[grid](...)``.
    launches: Any = defaultdict(lambda: _launch_nothing)
    replacements = {
        "_use_triton": uses_triton,
        "_forward_kernel": launches,
        "_backward_kernel": launches,
        "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
        "_addmm_fp32": add_product,
    }
    with (
        mock.patch.multiple(module, create=True, **replacements),
        mock.patch("trl.trainer.utils._use_triton", uses_triton),
    ):
        yield
