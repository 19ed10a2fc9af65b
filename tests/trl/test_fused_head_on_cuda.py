"""The fused head that is predicted for CUDA makes what TRL's fallback makes, and holds less beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig
from trl.kernels import ChunkedLogProbFunction

import trl
from kbitwrap import StepTracker, predict_step
from kbitwrap.foresight.kernels import fused_heads_on_cuda
from support.foreseen import DEPRECATED

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


@pytest.mark.filterwarnings(DEPRECATED)
@pytest.mark.parametrize(("version", "kernels"), [("1.12.0", "cuda"), ("1.12.0", "cpu"), ("1.16.0", "cuda")])
def test_another_version_of_trl_is_named(
    version: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "__version__", version)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, architectures=["LlamaForCausalLM"])
    args = trl.SFTConfig(str(tmp_path), max_length=32, use_cpu=True, report_to="none")
    step = predict_step(config, args=args, dtype=torch.float32, kernels=kernels)
    is_named = any("the kernels of trl 1.12.0 were not followed" in note for note in step.notes)
    assert is_named == (version == "1.12.0" and kernels == "cuda")
