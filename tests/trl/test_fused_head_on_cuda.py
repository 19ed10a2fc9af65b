"""The fused head that is predicted for CUDA makes what TRL's fallback makes, and holds less beside it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trl.kernels import ChunkedLogProbFunction

from kbitwrap import StepTracker
from kbitwrap.foresight.kernels import fused_heads_on_cuda

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def scored(dtype: torch.dtype) -> tuple[list[tuple[torch.Size, torch.dtype]], torch.dtype, int]:
    """The outputs and the gradient of a head, and the most bytes that it holds."""
    with FakeTensorMode():
        hidden = torch.empty(64, 32, dtype=dtype, requires_grad=True)
        head = torch.nn.Linear(32, 4096, bias=False, dtype=dtype).requires_grad_(False)
        targets = torch.empty(64, dtype=torch.int64)
        with StepTracker(head, inputs=[hidden, targets]) as tracker:
            found = ChunkedLogProbFunction.apply(hidden, head.weight, None, targets, 1.0, 1024, None, 1.0, OUTPUTS)
            found[0].sum().backward()
        assert hidden.grad is not None
        return [(one.shape, one.dtype) for one in found], hidden.grad.dtype, tracker.peak_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_makes_what_the_fallback_makes_and_holds_less(dtype: torch.dtype) -> None:
    fallback = scored(dtype)
    with fused_heads_on_cuda():
        on_cuda = scored(dtype)
    assert on_cuda[:2] == fallback[:2]
    assert on_cuda[2] < fallback[2]
    assert scored(dtype) == fallback  # nothing of the rule is left
