"""How much memory torch allocates on the CPU while something runs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that was live at any moment of a call beyond what was live at its start, in bytes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
