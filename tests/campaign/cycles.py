"""Preparing and restoring a model over and over: neither objects, nor memory, nor hooks grow."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from kbitwrap import KbitPreparedModel, Precision
from kbitwrap.preparation import preparation
from support import zoo

CYCLES = 200  # of a round
_PAGES = Path("/proc/self/statm")


def held() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks() // 8,  # by which caches of the interpreter grow and shrink
        "hooks": 1000 * len(nn.modules.module._global_parameter_registration_hooks),
        "preparations": 1000 * len(preparation._in_force),
        "MiB": int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20 if _PAGES.exists() else 0,
    }


def trials(seed: int, cycles: int = CYCLES) -> Iterator[list[str]]:
    """Prepare, suspend, resume and restore one model; what is held after half of the cycles is held after all."""
    name, precision = zoo.CORE[seed % len(zoo.CORE)], list(Precision)[seed % len(Precision)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = zoo.load(name, "nf4")
        prepared = KbitPreparedModel(model, **zoo.fields(name, precision=precision))
        for cycle in range(1, cycles + 1):
            with prepared, prepared.suspended():
                pass
            if cycle == cycles // 2:
                before = held()
            after = held() if cycle == cycles else {}
            # A leak grows with each cycle.
            grown = [key for key in after if after[key] - before[key] > cycles // 4]
            yield [f"{name}, {precision}, {cycle} cycles: {key} {before[key]}, then {after[key]}" for key in grown]
