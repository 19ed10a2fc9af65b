"""Optimizers by the names that `transformers.TrainingArguments` has for them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from .fakes import KnownValues
from .ledger import GRADIENTS, OPTIMIZER, OPTIMIZER_STEP, Ledger, Run
from .quantization import eight_bit_optimizer
from .tracker import Watch, optimizer_tensors, watch_for

_PLAIN = ("adamw_torch", "sgd")
_NAMES = (*_PLAIN, "adamw_torch_fused", "adafactor")
# By library: the bits of the state, and whether it lies in managed memory, which the
# device's allocator does not count.
_OF_LIBRARY: dict[str, tuple[int, bool]] = {
    "adamw_bnb_8bit": (8, False),
    "adamw_8bit": (8, False),
    "paged_adamw_8bit": (8, True),
    "paged_adamw_32bit": (32, True),
}


def _made(
    name: str, parameters: Sequence[nn.Parameter], kernels: str
) -> torch.optim.Optimizer:
    if name in _OF_LIBRARY:
        bits, is_paged = _OF_LIBRARY[name]
        return eight_bit_optimizer(parameters, bits, is_paged)  # type: ignore[no-any-return]
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            parameters, lr=1e-4, scale_parameter=False, relative_step=False
        )
    # On CUDA torch updates all parameters at once, unless told otherwise.
    options: dict[str, Any] = (
        {"fused": True} if name.endswith("fused") else {"foreach": kernels == "cuda"}
    )
    cls: Any = torch.optim.SGD if name == "sgd" else torch.optim.AdamW
    return cls(parameters, lr=1e-4, **options)  # type: ignore[no-any-return]


Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
"""The shapes and dtypes of parameters."""


class OptimizerSteps:
    """The steps of an optimizer, by what it trains. What was run once is known.

    The optimizer is one of the names, a function of the parameters, or ``None`` for no
    step and no state.
    """

    def __init__(self, optimizer: Any, kernels: str) -> None:
        self._optimizer, self._kernels = optimizer, kernels
        self._known: dict[Shapes, tuple[Ledger, list[Run]]] = {}

    def __call__(self, fakes: Any, shapes: Shapes) -> tuple[Ledger, list[Run]]:
        """The state that is kept on the device, and the runs of a step; ``fakes`` is the mode of fake tensors."""
        if shapes not in self._known:
            self._known[shapes] = (
                (Ledger(), []) if self._optimizer is None else self._run(fakes, shapes)
            )
        return self._known[shapes]

    def _run(self, fakes: Any, shapes: Shapes) -> tuple[Ledger, list[Run]]:
        """Run the second step, or a first one that makes all state and then does what every step does."""
        # torch's own loops over parameters compute on the meta device too, and much
        # faster than with fake tensors.
        is_plain = self._optimizer in _PLAIN
        with contextlib.nullcontext() if is_plain else fakes:
            device = "meta" if is_plain else "cpu"
            trained = [
                nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
                for shape, dtype in shapes
            ]
            for parameter in trained:
                parameter.grad = torch.empty_like(parameter)
        watch, kept = watch_for(self._kernels), watch_for(self._kernels)
        with contextlib.ExitStack() as modes:
            for mode in () if is_plain else (fakes, KnownValues(fakes)):
                modes.enter_context(mode)
            made = make_optimizer(self._optimizer, trained, self._kernels)
            if not is_plain:
                made.step()
            for parameter in trained:
                watch.hold(parameter, GRADIENTS)
                watch.hold(parameter.grad, GRADIENTS)  # type: ignore[arg-type]
            _hold(watch, made)
            held = watch.ledger.held()[OPTIMIZER]
            watch.enter(OPTIMIZER_STEP)
            with watch:
                made.step()
        first = watch.ledger.runs()[0]
        for tensor in optimizer_tensors(made, self._kernels == "cuda"):
            kept.hold(tensor, OPTIMIZER)
        state = Counter(
            {
                OPTIMIZER: sum(watch.size(tensor) for tensor in optimizer_tensors(made))
                - held
            }
        )
        rise = Counter(first.at_peak)
        rise.subtract(state)
        return kept.close(), [Run(first.mark, first.net - state, rise)]


def _hold(watch: Watch, optimizer: torch.optim.Optimizer) -> None:
    """Count an optimizer's state; no name is left that would keep a tensor which the step replaces."""
    for tensor in optimizer_tensors(optimizer):
        watch.hold(tensor, OPTIMIZER)


def make_optimizer(
    optimizer: str | Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    kernels: str,
) -> torch.optim.Optimizer:
    """Make an optimizer, by its name or by a function of the parameters."""
    if callable(optimizer):
        return optimizer(parameters)
    if optimizer in (*_NAMES, *_OF_LIBRARY):
        return _made(optimizer, parameters, kernels)
    names = ", ".join(map(repr, (*_NAMES, *_OF_LIBRARY)))
    raise ConfigError(
        f"optimizer: expected one of {names} or a function, found {optimizer!r}"
    )
