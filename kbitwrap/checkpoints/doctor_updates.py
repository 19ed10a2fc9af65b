"""The check of an optimizer's updates: in half precision, small ones leave a value as it was."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from ..tensors.dtypes import dtype_name
from ..tensors.lazy import materialize
from .doctor_report import Result, fault, fine, not_measured
from .doctor_subjects import OPTIMIZER_NAME, Folder, tensors_of
from .reader import load_values

_WHAT = "which share of the updates rounds to nothing"
_MOST = 0.5  # of the updates may be lost


@dataclass(frozen=True)
class _State:
    """The state that Adam keeps of a parameter, and the settings of its group.

    Attributes:
        mean: The mean of its gradients, of its shape; in the dtype that it has in
            training.
        square: The mean of their squares.
        step: The number of steps taken.
        group: The settings.
    """

    mean: Tensor
    square: Tensor
    step: float
    group: Mapping[str, Any]

    @property
    def rate(self) -> float:
        """The learning rate of the next step; that of the first where a schedule ended."""
        rate = float(self.group["lr"])
        return rate or float(self.group.get("initial_lr", 0))

    def update(self) -> Tensor:
        """The update of the next step in float32, if its gradient were the mean."""
        decay, square_decay = self.group["betas"]
        mean = self.mean.float() / (1 - decay**self.step)
        square = self.square.float() / (1 - square_decay**self.step)
        ratio: Tensor = mean / (square.sqrt() + self.group["eps"])
        return self.rate * ratio


def lost_updates(folder: Folder) -> Result | None:
    """Whether most updates of the next step would leave the values of the adapter as they are.

    It is an estimate: weights and states are matched by shape and order, because an
    optimizer saves no names, and the gradient of the next step is not known.
    """
    optimizer = folder.optimizer
    tensors = tensors_of(folder.adapters)
    if optimizer is None or optimizer.unreadable or len(folder.adapters) != 1:
        return None
    try:
        content = load_values(folder.path / OPTIMIZER_NAME)
        states = list(_states(content))
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError) as error:
        return not_measured(_WHAT, f"{OPTIMIZER_NAME}: no moments of Adam: {error!r}")

    pairs = _pairs(tensors, states)
    if pairs is None:
        return not_measured(
            _WHAT, "the shapes of the optimizer's states are not those of the adapter"
        )

    num_lost = num_updates = 0
    for tensor, state in pairs:
        lost, updates = _count(materialize(tensor), state)
        num_lost += lost
        num_updates += updates

    if not num_updates:
        return not_measured(_WHAT, "the optimizer's moments are zero")

    share = num_lost / num_updates
    dtypes = sorted({dtype_name(state.mean.dtype) for _, state in pairs})
    rates = sorted({f"{state.rate:.3g}" for _, state in pairs})
    evidence = (
        f"about {share:.1%} of {num_updates} updates, in {', '.join(dtypes)}, at a "
        f"learning rate of {', '.join(rates)}"
    )
    if share > _MOST:
        return fault(
            "most updates of the adapter round to nothing",
            evidence,
            'train it in float32 (adapter_dtype="float32"), or with a higher learning rate',
        )
    return fine(evidence)


def _states(content: Mapping[str, Any]) -> Iterator[_State]:
    """The states of an optimizer that is Adam of some kind, in the order of its parameters."""
    states = content["state"]
    for group in content["param_groups"]:
        for number in group["params"]:
            if number not in states:
                continue  # it never got a gradient
            state = states[number]
            mean = state["exp_avg"]
            if not mean.is_floating_point():
                raise ValueError("they are quantized")
            yield _State(mean, state["exp_avg_sq"], float(state["step"]), group)


_Pairs = list[tuple[Tensor, _State]]


def _pairs(
    tensors: Sequence[tuple[str, Tensor]], states: Sequence[_State]
) -> _Pairs | None:
    """Each tensor with its state, by shape and order; ``None`` where they do not agree."""
    by_shape: defaultdict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for _, tensor in sorted(tensors, key=_in_order):
        by_shape[tuple(tensor.shape)].append(tensor)

    pairs: _Pairs = []
    for state in states:
        alike = by_shape[tuple(state.mean.shape)]
        if not alike:
            return None
        pairs.append((alike.pop(0), state))

    return pairs or None


def _in_order(named: tuple[str, Tensor]) -> list[Any]:
    """The key that sorts names as layers are numbered: the tenth after the second."""
    parts = re.split(r"(\d+)", named[0])
    return [int(part) if part.isdigit() else part for part in parts]


def _count(weight: Tensor, state: _State) -> tuple[int, int]:
    """The numbers of updates that are lost, and of all."""
    is_updated = state.mean != 0
    value = weight.to(state.mean.dtype)
    changed = (value.float() - state.update()).to(value.dtype)
    is_lost = is_updated & (changed == value)
    return int(is_lost.sum()), int(is_updated.sum())
