"""How torch and the libraries of the field run in a process of the tests."""

from __future__ import annotations

import copy
import gc
import os
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes import functional
from bitsandbytes.nn import modules

torch.set_num_threads(1)
# Searching for garbage as often as Python does takes a tenth of the tests' time; what asks for a search gets it.
gc.set_threshold(5_000, 10, 10)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

# On a CPU with AVX512-BF16, bitsandbytes' 4-bit layers repack their weights when they run in eval mode, and compute in
# bfloat16 from then on, without a backward and for some shapes alone. Tests hold on every CPU, those that need one of
# the two by a fixture; with this variable, they run on such a CPU as on others.
if os.environ.get("WITHOUT_AVX512BF16"):
    modules.has_avx512bf16 = lambda: False


def repack(monkeypatch: pytest.MonkeyPatch, repacks: bool = True) -> None:
    """Have 4-bit layers that are made from here on repack their weights when they run in eval mode, or not."""
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: repacks)
    if repacks and not functional.has_avx512bf16():
        monkeypatch.setattr(functional, "gemv_4bit", _multiply_by_repacked)


@torch.no_grad()
def _multiply_by_repacked(
    inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None, state: Any = None
) -> torch.Tensor:
    """What bitsandbytes' kernel computes, where the CPU cannot run it: in bfloat16, without a backward."""
    unpacked = copy.copy(state)
    unpacked.original_nested = False
    data, unpacked = functional._convert_weight_packed_for_cpu_inverse(weight.data, unpacked)
    unpacked.absmax = state.absmax.T.reshape(-1).float()
    values = functional.dequantize_4bit(data, unpacked).bfloat16()
    return torch.nn.functional.linear(inputs.bfloat16(), values).to(inputs.dtype)
