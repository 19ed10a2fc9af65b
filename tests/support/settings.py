"""How torch and the libraries of the field run in a process of the tests."""

from __future__ import annotations

import copy
import gc
import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import transformers
from bitsandbytes import functional
from bitsandbytes.nn import modules
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

torch.set_num_threads(1)
# Searching for garbage as often as Python does takes a tenth of the tests' time; what asks for a search gets it.
gc.set_threshold(5_000, 10, 10)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class GlooOfOneThread(ProcessGroupGloo):
    """A gloo group whose operations one thread runs, and not two.

    In torch 2.13 each thread writes the name of what it has run into one `std::string`, without a lock
    (`ProcessGroupGloo::runLoop`). Where both do at once, one writes into memory that the other has freed, and the
    process ends by a signal, or waits for ever: in one of eight runs of the sharded merges.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any) -> None:
        options = ProcessGroupGloo._Options()
        options._threads = 1
        options._timeout = timeout
        for name, value in others.items():  # of torch 2.15
            setattr(options, name, value)
        options._devices = [ProcessGroupGloo.create_default_device()]
        super().__init__(store, rank, size, options)


distributed_c10d.ProcessGroupGloo = GlooOfOneThread  # which `init_process_group` and `new_group` make

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
