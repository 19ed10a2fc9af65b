"""Small models of all that a module may hold, drawn from a generator: the same twice from the same seed.

Half parameters in every layout, tied or over the same memory; views of parameters, as plain attributes and as buffers;
parameters without elements or dimensions, of complex, integer, 8-bit and 64-bit dtypes, of a subclass, with payloads of
NaNs; parametrized modules, with spectral norm, and with weight norm as torch had it before.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor

from support.strategies import VOCAB_SIZE, WIDTH, Block, RMSNorm, Tree

HALF = (torch.bfloat16, torch.float16)


class Scale(nn.Module):
    """A parametrization: its tensor times two."""

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


class Odd(nn.Module):
    """Tensors that no forward uses, of one odd kind each."""

    KINDS = (
        "complex",
        "float8",
        "int8",
        "float64",
        "float32",
        "scalar",
        "empty",
        "strided",
        "payload",
        "subclass",
        "bool",
    )

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(6.0).view(2, 3) - 2
        data: torch.Tensor = {
            "complex": values.to(torch.complex64),
            "float8": values.to(torch.float8_e4m3fn),
            "int8": values.to(torch.int8),
            "float64": values.double(),
            "float32": values,
            "scalar": torch.tensor(1.5, dtype=dtype),
            "empty": torch.empty(0, 3, dtype=dtype),
            "strided": torch.arange(24.0).to(dtype)[1:].as_strided((2, 3), (1, 5)),
            "payload": torch.tensor([0x7F81, 0x7FFF, 0x7E01, 0x7C01, 0], dtype=torch.int16).view(dtype),
            "subclass": TwoTensor(values.to(dtype), values.to(dtype) + 1),
            "bool": values > 0,
        }[kind]
        self.odd = nn.Parameter(data, requires_grad=data.is_floating_point() or data.is_complex())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Views(nn.Module):
    """A linear layer whose weight other names see too: as a plain tensor, or as a buffer."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.as_buffer = as_buffer

    def view(self) -> None:
        """Take the view, when the weight has its dtype."""
        seen = self.inner.weight.detach()[:2]
        if self.as_buffer:
            self.register_buffer("seen", seen, persistent=False)
        else:
            self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.seen.sum()


def _spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def _parametrized() -> nn.Module:
    linear = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(linear, "weight", Scale())
    return linear


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


LEAVES: tuple[Callable[[random.Random], nn.Module], ...] = (
    lambda rng: nn.Linear(WIDTH, WIDTH),
    lambda rng: nn.Linear(WIDTH, WIDTH, bias=False),
    lambda rng: nn.LayerNorm(WIDTH),
    lambda rng: RMSNorm(),
    lambda rng: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)),
    lambda rng: Views(rng.random() < 0.5),
    lambda rng: _spectral(),
    lambda rng: _parametrized(),
    lambda rng: _old_weight_norm(),
)


def random_tree(seed: int) -> Tree:
    """A model of a seed; it runs: `tree(torch.tensor([[0, 1, 5]]))`."""
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dtype = rng.choice(HALF)
        layers = [rng.choice(LEAVES)(rng) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            layers.append(Block([layers[0], rng.choice(LEAVES)(rng)]))  # a module at two places
        tree = Tree(layers).to(dtype)
        tree.body.layers.extend([Odd(rng.choice(Odd.KINDS), dtype) for _ in range(rng.randint(0, 2))])
        for module in tree.modules():
            if isinstance(module, Views):
                module.view()
        kind = rng.choice(("apart", "tied", "shared", "transposed", "fused", "part"))
        linears = [m for m in tree.body.layers if "weight" in m._parameters and type(m) is nn.Linear]
        if kind == "tied":
            tree.head.weight = tree.embedding.weight
        elif kind == "shared":
            tree.head.weight = nn.Parameter(tree.embedding.weight.data)
        elif kind == "transposed" and linears:
            linears[-1].weight = nn.Parameter(linears[0].weight.data.t())
        elif kind == "fused":
            fused = torch.randn(2 * VOCAB_SIZE, WIDTH).to(dtype)
            tree.embedding.weight, tree.head.weight = map(nn.Parameter, fused.split(VOCAB_SIZE))
        elif kind == "part":
            tree.register_parameter("part", nn.Parameter(tree.embedding.weight.data[1:3, ::2]))
        for parameter in tree.parameters():
            if parameter.dtype in HALF and rng.random() < 0.3:
                parameter.requires_grad_(False)
        if rng.random() < 0.3:
            tree.register_buffer("steps", torch.zeros((), dtype=torch.int64))
            tree.register_buffer("cache", torch.ones(2).to(dtype), persistent=False)
        tree.train(rng.random() < 0.5)
    return tree
