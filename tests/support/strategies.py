"""Hypothesis strategies for half tensors, module trees and fault positions.

Tensors are drawn by their bits, so that every NaN payload, infinity, subnormal and signed zero can turn up, and in
every layout that a parameter can have. Trees are small models with what real ones have: ties, shared memory, frozen and
float32 parameters, buffers, users' hooks and attributes.

Example:
    >>> @given(half_tensors())
    ... def test_something(tensor): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn

HALF_DTYPES = (torch.bfloat16, torch.float16)
WIDTH = 4
VOCAB_SIZE = 6


# ----------------------------------------------------------------------------------------------------
# Bits.
# ----------------------------------------------------------------------------------------------------

# Patterns that uniform drawing would hardly ever hit: zeros, infinities, the smallest and largest subnormals and
# normals, quiet and signalling NaNs with the smallest and largest payloads, each of either sign.
_MAGNITUDES = {
    torch.float16: (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7DFF, 0x7E00, 0x7E01, 0x7FFF),
    torch.bfloat16: (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFF),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a half tensor, as int16 in its layout: what to compare, for NaN equals no NaN."""
    return tensor.detach().view(torch.int16)


def from_bits(patterns: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A half tensor, shape `(len(patterns),)`, of patterns from 0 to 65,535."""
    return torch.tensor(patterns, dtype=torch.int32).to(torch.int16).view(dtype)


def all_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Each of the 65,536 values of a half dtype once, shape `(256, 256)`."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)


def patterns(dtype: torch.dtype, *, nan: bool = True) -> st.SearchStrategy[int]:
    """The bits of one value; the special ones are as likely as all others together."""
    infinity = 0x7C00 if dtype == torch.float16 else 0x7F80
    special = [sign | magnitude for magnitude in _MAGNITUDES[dtype] for sign in (0, 0x8000)]
    drawn = st.sampled_from(special) | st.integers(0, 0xFFFF)
    return drawn if nan else drawn.filter(lambda pattern: pattern & 0x7FFF <= infinity)


# ----------------------------------------------------------------------------------------------------
# Tensors.
# ----------------------------------------------------------------------------------------------------


def shapes(*, max_dims: int = 3, max_side: int = 4, min_side: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes from 0-d up, empty ones included."""
    return st.lists(st.integers(min_side, max_side), max_size=max_dims).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a shape in some layout: dimensions permuted, every dimension strided, and an offset into its storage.

    Its values are what is left in the storage (zeros); fill them with `copy_`.
    """
    dims = len(shape)
    order = draw(st.permutations(range(dims)))
    steps = draw(st.lists(st.sampled_from((1, 1, 1, 2, 3)), min_size=dims, max_size=dims))
    offset = draw(st.sampled_from((0, 0, 1, 3, 4)))
    tail = draw(st.sampled_from((0, 0, 2)))
    strides = [0] * dims
    span = 1
    for dim in reversed(order):
        strides[dim] = span * steps[dim]
        span = strides[dim] * max(shape[dim], 1)
    return torch.zeros(offset + span + tail, dtype=dtype).as_strided(shape, strides, offset)


@st.composite
def half_tensors(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = HALF_DTYPES,
    *,
    max_dims: int = 3,
    max_side: int = 4,
    min_side: int = 0,
    nan: bool = True,
) -> torch.Tensor:
    """A half tensor of any bits, shape and layout."""
    dtype = draw(st.sampled_from(dtypes))
    tensor = draw(layouts(dtype, draw(shapes(max_dims=max_dims, max_side=max_side, min_side=min_side))))
    n = tensor.numel()
    values = draw(st.lists(patterns(dtype, nan=nan), min_size=n, max_size=n))
    bits(tensor).copy_(from_bits(values, dtype).view(torch.int16).view(tensor.shape))
    return tensor


def parameters(**kwargs: Any) -> st.SearchStrategy[nn.Parameter]:
    """A trainable parameter over a half tensor; keywords as those of `half_tensors`."""
    return half_tensors(**kwargs).map(nn.Parameter)


# ----------------------------------------------------------------------------------------------------
# Module trees.
# ----------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """A norm that torch does not know, written as models write theirs."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class Block(nn.Module):
    """Children in a row, with a residual connection."""

    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + y


class Tree(nn.Module):
    """A model: embeddings, blocks within blocks, a head. `Tree()(ids)` are logits, shape `(*ids.shape, VOCAB_SIZE)`."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, WIDTH, padding_idx=0)
        self.body = Block(layers)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(ids)))


def user_hook(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that a user left; changes nothing."""


def user_pre_hook(module: nn.Module, args: Any) -> None:
    """A forward pre-hook that a user left; changes nothing."""


def _leaves() -> st.SearchStrategy[nn.Module]:
    kinds: tuple[Callable[[], nn.Module], ...] = (
        lambda: nn.Linear(WIDTH, WIDTH),
        lambda: nn.Linear(WIDTH, WIDTH, bias=False),
        lambda: nn.LayerNorm(WIDTH),
        lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        RMSNorm,
    )
    return st.sampled_from(kinds).map(lambda make: make())


def _layers() -> st.SearchStrategy[list[nn.Module]]:
    nested = st.recursive(_leaves(), lambda inner: st.lists(inner, max_size=3).map(Block), max_leaves=5)
    return st.lists(nested, min_size=1, max_size=3)


@st.composite
def module_trees(draw: st.DrawFn) -> Tree:
    """A small model in half precision, used as users use theirs. It runs: `tree(torch.tensor([[0, 1, 5]]))`."""
    tree = Tree(draw(_layers())).to(draw(st.sampled_from(HALF_DTYPES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    with torch.no_grad():
        for parameter in tree.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    _share(draw, tree)
    modules = st.sampled_from(list(tree.modules()))
    for module in draw(st.lists(modules, max_size=4)):
        _decorate(draw, module)
    for parameter in tree.parameters():
        # Zero, or a NaN with a payload, among the values.
        if draw(st.booleans()):
            pattern = draw(patterns(parameter.dtype))
            bits(parameter)[(-1,) * parameter.dim()] = from_bits([pattern], parameter.dtype).view(torch.int16)[0]
        parameter.requires_grad_(draw(st.booleans()))
    norms = [m for m in tree.modules() if isinstance(m, (nn.LayerNorm, RMSNorm)) and m.weight is not None]
    if norms and draw(st.booleans()):
        # Part of a half model can be float32 as loaded, and is never to be cast.
        norms[0].float()
    return tree


def _share(draw: st.DrawFn, tree: Tree) -> None:
    """Tie parameters (one object at two places), or put different objects over the same memory."""
    kind = draw(st.sampled_from(("apart", "tied", "shared")))
    if kind == "tied":
        tree.head.weight = tree.embedding.weight
    elif kind == "shared":
        tree.head.weight = nn.Parameter(tree.embedding.weight.data)
    linears = [m for m in tree.body.modules() if isinstance(m, nn.Linear)]
    if len(linears) > 1:
        kind = draw(st.sampled_from(("apart", "tied", "shared", "transposed", "fused")))
        first, second = linears[:2]
        if kind == "tied":
            second.weight = first.weight
        elif kind == "shared":
            second.weight = nn.Parameter(first.weight.data)
        elif kind == "transposed":
            second.weight = nn.Parameter(first.weight.data.t())
        elif kind == "fused":
            fused = torch.cat([first.weight.data, second.weight.data])
            first.weight, second.weight = map(nn.Parameter, fused.split(WIDTH))


def _decorate(draw: st.DrawFn, module: nn.Module) -> None:
    """Do to a module one of the things that users do."""
    kind = draw(st.sampled_from(("hook", "pre-hook", "attribute", "checkpointing", "buffer", "forward", "train")))
    if kind == "hook":
        module.register_forward_hook(user_hook)
    elif kind == "pre-hook":
        module.register_forward_pre_hook(user_pre_hook)
    elif kind == "attribute":
        module.user_attribute = draw(st.none() | st.integers() | st.text(max_size=3))
    elif kind == "checkpointing":
        # transformers keeps this flag on the class; others set it on the instance.
        module.gradient_checkpointing = draw(st.booleans())
    elif kind == "buffer" and "user_buffer" not in module._buffers:
        module.register_buffer("user_buffer", torch.ones(2, dtype=torch.float16), persistent=draw(st.booleans()))
    elif kind == "forward":
        # An instance attribute that shadows the method: to stay, and to be this very object.
        module.forward = module.forward
    elif kind == "train":
        module.training = draw(st.booleans())


# ----------------------------------------------------------------------------------------------------
# Faults.
# ----------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """Where a list of edits fails: in `phase` of the edit at `index`, with `error`."""

    index: int
    phase: str
    error: type[BaseException]


def faults(num_edits: int) -> st.SearchStrategy[Fault]:
    """A fault at any edit: before it reads (`"capture"`), before it changes (`"apply"`), or half-way (`"half"`)."""
    phases = st.sampled_from(("capture", "apply", "half"))
    errors = st.sampled_from((RuntimeError, KeyboardInterrupt, SystemExit))
    return st.builds(Fault, st.integers(0, num_edits - 1), phases, errors)
