"""Finds the device that ``--device`` names."""

from __future__ import annotations

import torch

from .console import InputError


def choose_device(name: str | None) -> torch.device:
    """Find the device to run on, and see that it is there.

    Args:
        name: A device; ``None`` for CUDA if there is one, else the CPU.

    Returns:
        The device.

    Raises:
        InputError: There is no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        # raises on a device that is not there, or cannot compute
        torch.empty(1, device=device).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = "torch cannot compute on it here"
        if name.startswith("cuda"):
            why = _why_not_cuda()
        raise InputError(
            f"--device: device {name!r} is not available: {why}; leave it out, or give cpu"
        ) from error
    return device


def _why_not_cuda() -> str:
    count = torch.cuda.device_count()
    if count > 1:
        return f"there are {count}, cuda:0 to cuda:{count - 1}"
    if count == 1:
        return "there is one, cuda:0"
    if torch.version.cuda or torch.version.hip:
        return "torch finds no GPU"
    return "this torch is built without CUDA"
