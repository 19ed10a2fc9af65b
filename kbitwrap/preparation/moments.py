"""A model at one moment of its preparation, as the manifest records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class State:
    """Hooks, flags and modes. Modules are named by their fqns; ``""`` is the model itself."""

    input_gradient_hooks: dict[str, int]  # how many each module has that has any
    # the modules whose ``gradient_checkpointing`` is true
    checkpointing: tuple[str, ...]
    use_cache: bool | None  # the config's
    num_modules: int  # of the base
    num_training: int  # of these, those in train mode


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: of the parameters' storages, each counted once, and as the allocator counts it."""

    parameter_bytes: int
    # over all accelerators that hold parameters; ``None`` where none counts
    allocated_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True)
class Moment:
    """State and memory."""

    state: State
    memory: Memory
