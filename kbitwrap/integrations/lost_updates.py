"""Counts the updates of an optimizer that round to nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Counts = dict[torch.device, Tensor]


class LostUpdates:
    """Counts, step by step, which updates left the value that they were to change as it was.

    An update is that of an element whose gradient is not zero, by a learning rate that
    is not zero. In bfloat16, which has 8 bits of precision, an update of less than
    1/512 of the value is lost. For the time of a step the values of what is trained are
    held twice. Nothing waits for the device before `take`.

    Only this rank's part of a parameter that FSDP2 sharded counts.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []
        self._counts: _Counts = {}

    @torch.no_grad()
    def before_step(self, optimizer: Any) -> None:
        """Keep the values of what the next step will update.

        Args:
            optimizer: The optimizer, whose parameters have their gradients.
        """
        self._before = []
        for group in optimizer.param_groups:
            if group.get("lr") == 0:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._before.append((parameter, _local(parameter).clone()))

    @torch.no_grad()
    def after_step(self, optimizer: Any) -> None:
        """Count what the step left as it was.

        Args:
            optimizer: The optimizer, whose gradients are still there. A step that was
                skipped, as a scaler of gradients skips it, does not count.
        """
        before, self._before = self._before, []
        if getattr(optimizer, "step_was_skipped", False):
            return
        for parameter, value in before:
            is_updated = _local(parameter.grad) != 0
            is_lost = is_updated & (_local(parameter) == value)
            counts = torch.stack([is_lost.sum(), is_updated.sum()])
            self._counts[counts.device] = counts + self._counts.get(counts.device, 0)

    def take(self) -> float | None:
        """Return the share of the updates since the last call that were lost, from 0 to 1.

        Returns:
            The share; ``None`` where there was no update.
        """
        counts, self._counts = self._counts, {}
        lost, updates = sum(
            [one.cpu() for one in counts.values()], torch.zeros(2)
        ).tolist()
        return lost / updates if updates else None


def _local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
