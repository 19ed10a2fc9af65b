"""The machine and the libraries that figures were measured with."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_LIBRARIES = ("kbitwrap", "torch", "transformers", "peft", "bitsandbytes")


def environment() -> dict[str, Any]:
    """The machine and the versions, ready for JSON."""
    processors = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processors[0].partition(":")[2].strip() if processors else "unknown",
        "num_cores": len(os.sched_getaffinity(0)),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "device": "cpu",
        "has_bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    }
    return {"machine": machine, "versions": versions(_LIBRARIES)}


def versions(libraries: Sequence[str]) -> dict[str, str]:
    """The versions of Python and of libraries; torch's with its build, which the distribution's need not name."""
    found = {"python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = str(torch.__version__) if name == "torch" else version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def lines(result: dict[str, Any]) -> list[str]:
    """The lines of a text that say what a result was measured with."""
    machine = result["environment"]["machine"]
    return [
        f"machine   {machine['processor']}, {machine['num_cores']} cores, {machine['num_threads']} torch threads, "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB of memory, {machine['system']}; device {where(result)}",
        f"versions  {', '.join(f'{name} {found}' for name, found in result['environment']['versions'].items())}",
    ]


def where(result: dict[str, Any]) -> str:
    """The device, and whether it has instructions for bfloat16, if that was recorded."""
    machine = result["environment"]["machine"]
    known = {True: " with instructions for bfloat16", False: " without instructions for bfloat16"}
    return f"{machine['device']}{known.get(machine.get('has_bfloat16'), '')}"
