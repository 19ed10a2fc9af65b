"""Norms of every kind, and what one computes in float32, by hand."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kbitwrap.edits.norms import Float32Forward, Forwards

WIDTH = 8


def gated_norm() -> nn.Module:
    """Mamba 2's norm, which has groups in newer versions of transformers."""
    groups = {"group_size": 4} if "group_size" in inspect.signature(MambaRMSNormGated).parameters else {}
    return MambaRMSNormGated(WIDTH, **groups)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
    "Llama": lambda: LlamaRMSNorm(WIDTH),
    "T5": lambda: T5LayerNorm(WIDTH),
    "Gemma 2": lambda: Gemma2RMSNorm(WIDTH),
    "Mamba 2, gated": gated_norm,
}


def make(kind: str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> nn.Module:
    """A norm whose parameters are all different, frozen."""
    norm = NORMS[kind]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return norm.to(dtype).requires_grad_(False)


def make_inputs(kind: str, dtype: torch.dtype, *, seed: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    count = 2 if "gated" in kind else 1
    return tuple((torch.randn(2, WIDTH, WIDTH, generator=generator) * 3).to(dtype) for _ in range(count))


def install(norm: nn.Module) -> Forwards:
    change = Forwards()
    change.install(Float32Forward(norm))
    return change


def autocasting(is_enabled: bool) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16) if is_enabled else contextlib.nullcontext()


def unprepared_dtype(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.dtype:
    """The dtype that an unprepared norm returns; the input's, where its kernel refuses the mix of dtypes."""
    try:
        return norm(*inputs).dtype
    except RuntimeError:
        return inputs[0].dtype


def reference(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What an unprepared norm gives with float32 parameters and inputs, in the dtype that it gives with its own."""
    parameters = {name: parameter.float() for name, parameter in norm.named_parameters()}
    output = functional_call(norm, parameters, tuple(x.float() for x in inputs))
    return output.to(unprepared_dtype(norm, inputs))


def assert_same_bits(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == expected.dtype
    assert torch.equal(found.detach().view(torch.uint8), expected.detach().view(torch.uint8))
