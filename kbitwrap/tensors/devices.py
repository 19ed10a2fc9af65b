"""Accelerators, whatever their type.

Each is asked through the module that torch has for it, such as ``torch.cuda``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def accelerator_type() -> str | None:
    """Return the type of the accelerator that this process can use, such as ``"cuda"``.

    ``None`` where it has none.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def accelerators(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Return the devices that tensors lie on, without the CPU and the meta device."""
    return {
        tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")
    }


def function_of(device_type: str, function: str) -> Any:
    """Return a function of torch's module for a type of device, ``None`` where that has none."""
    return getattr(torch.get_device_module(device_type), function, None)


def random_state(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Read the states of the random generators of the CPU and of accelerators.

    The call that is returned puts them back.
    """
    cpu = torch.get_rng_state()
    states = []
    for device in devices:
        module = torch.get_device_module(device)
        states.append((module.set_rng_state, device, module.get_rng_state(device)))

    def put_back() -> None:
        torch.set_rng_state(cpu)
        for write, device, state in states:
            write(state, device)

    return put_back
