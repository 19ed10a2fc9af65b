"""The check of an optimizer's updates: in half precision, small ones leave a value as it was."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..tensors.dtypes import dtype_name
from ..tensors.lazy import materialize
from .doctor_report import Finding, fault, fine, not_measured
from .doctor_subjects import OPTIMIZER_NAME, Folder
from .reader import load_values

_WHAT = "which share of the updates rounds to nothing"
_MOST = 0.5  # of the updates may be lost


def lost_updates(folder: Folder) -> Finding | None:
    """Check whether most updates of the next step would leave the values of the adapter as they are.

    It is an estimate: weights and states are matched by shape and order, because an
    optimizer saves no names, and the gradient of the next step is taken to be its mean.
    """
    optimizer = folder.optimizer
    if optimizer is None or optimizer.unreadable or len(folder.adapters) != 1:
        return None

    num_lost = num_updates = 0
    dtypes, rates = set(), set()
    weights: defaultdict[tuple[int, ...], list[Tensor]] = defaultdict(list)
    for _, tensor in sorted(folder.tensors_of_adapters(), key=_in_order):
        weights[tuple(tensor.shape)].append(tensor)

    try:
        content = load_values(folder.path / OPTIMIZER_NAME)
        states = content["state"]
        for group in content["param_groups"]:
            # that of the first step where a schedule ended
            rate = float(group["lr"]) or float(group.get("initial_lr", 0))
            for number in group["params"]:
                if number not in states:
                    continue  # it never got a gradient
                state = states[number]
                alike = weights[tuple(state["exp_avg"].shape)]
                if not alike:
                    return not_measured(
                        _WHAT,
                        "the shapes of the optimizer's states are not those of the adapter",
                    )
                lost, updates = _count(materialize(alike.pop(0)), state, group, rate)
                num_lost += lost
                num_updates += updates
                dtypes.add(dtype_name(state["exp_avg"].dtype))
                rates.add(f"{rate:.3g}")
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError) as error:
        return not_measured(_WHAT, f"{OPTIMIZER_NAME}: no moments of Adam: {error!r}")

    if not num_updates:
        return not_measured(_WHAT, "the optimizer's moments are zero")

    share = num_lost / num_updates
    evidence = (
        f"about {share:.1%} of {num_updates} updates, in {', '.join(sorted(dtypes))}, at a "
        f"learning rate of {', '.join(sorted(rates))}"
    )
    if share > _MOST:
        return fault(
            "most updates of the adapter round to nothing",
            evidence,
            'train it in float32 (adapter_dtype="float32"), or with a higher learning rate',
        )
    return fine(evidence)


def _in_order(named: tuple[str, Tensor]) -> list[Any]:
    """Return the key that sorts names as layers are numbered: the tenth after the second."""
    parts = re.split(r"(\d+)", named[0])
    return [int(part) if part.isdigit() else part for part in parts]


def _count(
    weight: Tensor, state: Mapping[str, Any], group: Mapping[str, Any], rate: float
) -> tuple[int, int]:
    """Count the updates of Adam's next step that are lost, and all of them."""
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    if not mean.is_floating_point():
        raise ValueError("they are quantized")

    decay, square_decay = group["betas"]
    step = float(state["step"])
    square = square.float() / (1 - square_decay**step)
    ratio = mean.float() / (1 - decay**step) / (square.sqrt() + group["eps"])

    value = weight.to(mean.dtype)  # in which it was trained
    changed = (value.float() - rate * ratio).to(value.dtype)
    lost, updates = count_lost(value, changed, mean).tolist()
    return lost, updates


def count_lost(before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
    """Count on their device the updates that left a value as it was, and all: those of elements with a gradient."""
    is_updated = gradient != 0
    is_lost = is_updated & (after == before)
    return torch.stack([is_lost.sum(), is_updated.sum()])
