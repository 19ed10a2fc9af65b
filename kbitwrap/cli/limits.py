"""The memory that something has to fit, and the verdict: the same words for a plan, a step, and a script's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .tables import figure

GIB = 2**30
CUDA_CONTEXT_BYTES = (287_047_680, 666_632_192)
"""The least and the most that a CUDA context takes: with kernels loaded as they are used, and with all of them."""


def gib(num_bytes: int) -> str:
    """Write bytes in GiB, without zeros at the end."""
    number = figure(num_bytes, GIB)
    return number.rstrip("0").rstrip(".") if "." in number else number


CUDA_CONTEXT = " to ".join(map(gib, CUDA_CONTEXT_BYTES))
"""The bytes that a CUDA context takes, in words."""


class Limit(NamedTuple):
    """The bytes that a step has to fit.

    Attributes:
        budget: The bytes that its tensors may take.
        device_memory: Those of the device, where it was that which was given.
    """

    budget: int
    device_memory: int | None = None

    def __str__(self) -> str:
        if self.device_memory is None:
            return f"{gib(self.budget)} GiB"
        return (
            f"{gib(self.device_memory)} GiB of device memory, "
            f"{gib(self.budget)} beside the CUDA context"
        )


def limit_of(budget: int | None, device_memory: int | None) -> Limit | None:
    """Make the limit that was given; ``None`` where there is none.

    Args:
        budget: Bytes for tensors, or ``None``.
        device_memory: Bytes of a device, or ``None``.
    """
    if device_memory is not None:
        return Limit(max(device_memory - CUDA_CONTEXT_BYTES[1], 0), device_memory)
    return None if budget is None else Limit(budget)


def verdict(limit: object, fits: Mapping[str, bool], details: str) -> str:
    """Say whether something fits, with which precisions, and with which it does not.

    Args:
        limit: What it has to fit, in words.
        fits: Whether each precision does.
        details: What follows the first words.
    """
    fitting = [name for name in fits if fits[name]]
    others = [name for name in fits if not fits[name]]
    if not fitting:
        return f"{limit}: does not fit{details}"
    named = f" with {', '.join(fitting)}" if len(fits) > 1 else ""
    said = f"{limit}: fits{named}{details}"
    if others:
        said += f" It does not fit with {', '.join(others)}."
    return said
