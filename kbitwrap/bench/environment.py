"""The machine and the libraries that a benchmark runs on."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .settings import Figures

_LIBRARIES = ("kbitwrap", "torch", "transformers", "peft", "bitsandbytes")


def environment(device: str) -> Figures:
    """The machine and the libraries of a benchmark.

    Args:
        device: The device that the model is on.

    Returns:
        The machine and the versions, ready for JSON.
    """
    return {
        "machine": _machine(device),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
        },
    }


def _machine(device: str) -> Figures:
    num_cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    machine: Figures = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "num_cores": num_cores,
        "num_threads": torch.get_num_threads(),
        "memory_bytes": None,
        "device": device,
        "has_bfloat16": _has_bfloat16(device),
    }
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        machine["memory_bytes"] = os.sysconf("SC_PHYS_PAGES") * page_bytes
    if torch.device(device).type == "cuda":
        name = torch.cuda.get_device_name(device)
        machine["device"] = f"{name}, CUDA {torch.version.cuda}"
    return machine


def _has_bfloat16(device: str) -> bool:
    """Whether the device has instructions for bfloat16, as far as torch knows."""
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # type: ignore[no-any-return]
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]


def where(result: Figures) -> str:
    """The device of a result, and whether it has instructions for bfloat16, if that was recorded."""
    machine = result["environment"]["machine"]
    known = {
        True: " with instructions for bfloat16",
        False: " without instructions for bfloat16",
    }
    return f"{machine['device']}{known.get(machine.get('has_bfloat16'), '')}"


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(name: str) -> str:
    if name == "torch":
        # with its build, which the distribution's version need not name
        return str(torch.__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed, run from its source"
