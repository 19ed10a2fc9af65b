"""The helpers of the tests.

A new process has everything imported and nothing run; a cover of pairs has them all; CUDA's rules refuse and count.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from support import forks
from support.cuda_rules import CudaRules
from support.pairwise import pairwise


def fail() -> None:
    raise ValueError("in there")


def test_a_new_process_has_everything_imported() -> None:
    loaded = forks.run(forks.loaded_modules)
    assert {"bitsandbytes", "kbitwrap.cli", "peft", "torch", "transformers"} <= loaded
    assert {"support.trainers", "support.zoo"} <= loaded
    assert "test_helpers" not in loaded


def test_each_call_has_a_process_of_its_own() -> None:
    assert len({os.getpid(), *(forks.run(os.getpid) for _ in range(2))}) == 3


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(ValueError, match="in there"):
        forks.run(fail)
    with pytest.raises(BrokenProcessPool):
        forks.run(os.abort)
    assert forks.run(faulthandler.is_enabled)  # so that it is printed where the process was


def test_pairwise_covers_every_pair_with_few_cases() -> None:
    axes = ("abcde", range(4), (True, False), (None, 1.5, "x"))
    cases = pairwise(*axes)
    assert len(cases) == len(set(cases)) < 30  # 20 at least, of 120
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(axes[i], axes[j]))
    assert cases == pairwise(*axes)


def test_cuda_rules_refuse_mixed_dtypes_in_a_normalization() -> None:
    half, weight = torch.ones(2, 4, dtype=torch.float16), torch.ones(4)
    with CudaRules(), pytest.raises(RuntimeError, match=r"CUDA refuses aten\.native_layer_norm"):
        torch.nn.functional.layer_norm(half, (4,), weight, weight)
    with CudaRules(), pytest.raises(RuntimeError, match=r"CUDA refuses aten\.native_group_norm"):
        torch.nn.functional.group_norm(half, 2, weight, weight)
    with CudaRules():
        torch.nn.functional.layer_norm(half.float(), (4,), weight, weight)


def test_cuda_rules_count_what_the_host_waits_for_once() -> None:
    with CudaRules() as rules:
        tensor = torch.arange(4.0)
        assert tensor.sum() > 0
        assert torch.equal(tensor, tensor + 0)
        copy = tensor.cpu()
        assert copy.clone().sum().item() == 6  # on the host already
        assert (tensor * 2).tolist() == [0, 2, 4, 6]
    assert rules.syncs == ["aten._local_scalar_dense", "aten.equal", "Tensor.cpu", "Tensor.tolist"]
