"""TRL's fused head as on CUDA: its Triton kernels allocate nothing, and nothing runs in their place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .fakes import forget

FUSED_HEAD = "trl.kernels.chunked_logprob"
"""The module of the fused head."""
SAID = (
    "TRL's fused head and loss are those of its Triton kernels, which write to tensors that "
    "TRL's own code allocates"
)


class Launches:
    """Stands for kernels: what they write is not known then.

    Attributes:
        has_any: Whether one was launched.
    """

    def __init__(self) -> None:
        self.has_any = False

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        self.has_any = True
        return _write


def _write(tile: Tensor, *args: Any, **_: Any) -> None:
    """Write values that are not known to the statistics of a tile, in their place."""
    if tile.numel():
        tensors = [value for value in args if isinstance(value, Tensor)]
        forget([tensor for tensor in tensors if tensor.is_floating_point()])


def _add_product(original: Callable[..., None]) -> Callable[..., None]:
    """Make the product that is added in float32: of half tensors, cuBLAS writes it in its place."""

    def add(total: Tensor, left: Tensor, right: Tensor) -> None:
        if left.dtype not in (torch.float16, torch.bfloat16):
            original(total, left, right)

    return add


@contextlib.contextmanager
def fused_heads_on_cuda() -> Iterator[Launches]:
    """Let TRL's fused head compute as on CUDA.

    Its forward and backward are those of ``ChunkedLogProbFunction`` in
    trl/kernels/chunked_logprob.py; ``_addmm_fp32`` there is one operation on CUDA.

    Yields:
        What tells whether a kernel was launched.
    """
    launches = Launches()
    module: Any = sys.modules.get(FUSED_HEAD)
    if module is None:
        yield launches
        return
    users: Any = sys.modules["trl.trainer.utils"]
    replacements: dict[str, Any] = {
        "_use_triton": lambda device: True,
        "_forward_kernel": launches,
        "_backward_kernel": launches,
        "triton": SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
    }
    if module._MM_OUT_DTYPE:
        replacements["_addmm_fp32"] = _add_product(module._addmm_fp32)
    with (
        mock.patch.multiple(module, create=True, **replacements),
        mock.patch.object(users, "_use_triton", replacements["_use_triton"]),
    ):
        yield launches
