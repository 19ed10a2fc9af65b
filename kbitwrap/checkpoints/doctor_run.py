"""The checks of an adapter and of a folder of a run; ``None`` of one says that there is nothing to look at."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ConfigError
from ..manifest.numerics import changed_versions
from ..reports import shown
from ..tensors.allocator import options_of, process_settings
from ..tensors.lazy import materialize
from .doctor_report import Finding, fault, fine, not_measured
from .doctor_subjects import (
    Adapter,
    Folder,
    Subject,
    is_numbered,
    numbered_folders,
)
from .reader import load_pickled, read_json

_OPTIMIZER_NAME = "optimizer.pt"
_STATE_NAME = "trainer_state.json"
# What LoRA initializes with zeros, so that it adds nothing before the first step.
_ZERO_AT_FIRST = re.compile(r"\.lora_(?:B\.|embedding_A)")
_OF_TEGRA = Path("/etc/nv_tegra_release")
_WHAT_WAS_TRAINED = "what the optimizer trained"
_DAMAGED = "the files of an adapter cannot be read"


# ----------------------------------------------------------------------------------------------------
# An adapter.
# ----------------------------------------------------------------------------------------------------


def adapter_values(adapter: Adapter) -> Finding:
    """Check whether an adapter has values, and all of them are finite.

    Sharded parameters that were not gathered are saved without elements; a loss that
    diverged leaves NaN and infinity.
    """
    if adapter.is_damaged:
        return not_measured("whether an adapter is finite", _DAMAGED)

    empty, broken = [], []
    for name, tensor in adapter.tensors.items():
        if tensor.numel() == 0:
            empty.append(name)
        elif not materialize(tensor).float().isfinite().all():
            broken.append(name)

    if empty or not adapter.tensors:
        without = f"tensors without elements: {shown(empty)}"
        return fault(
            "an adapter holds no values",
            without if empty else "its file holds no tensor",
            "gather sharded parameters before they are saved",
        )

    if broken:
        return fault(
            "an adapter is not finite",
            shown(broken),
            "go back to a checkpoint from before the loss diverged",
        )

    return fine(f"{len(adapter.tensors)} tensors are finite")


def lora_b(subject: Subject) -> Finding | None:
    """Check whether LoRA adds anything: what it starts at zero is zero no more in some layer of some adapter.

    All adapters are looked at together, because one of several may be a frozen
    reference. A head that was trained beside it does not excuse it: LoRA got no
    gradients.
    """
    names = []
    is_zero = True
    for name, tensor in subject.tensors_of_adapters():
        if _ZERO_AT_FIRST.search(name):
            names.append(name)
            is_zero = is_zero and not materialize(tensor).any()

    if not names and subject.has_damaged_adapter:
        return not_measured("whether LoRA adds anything", _DAMAGED)

    if not names:
        return None

    if not is_zero:
        return fine(f"not all of {len(names)} are zero")

    return fault(
        "lora_B is zero in every layer",
        f"LoRA adds nothing: {shown(names)}",
        "train it, and see that it gets gradients",
    )


# ----------------------------------------------------------------------------------------------------
# The files of a folder, in the order in which a Trainer saves them.
# ----------------------------------------------------------------------------------------------------


def files(folder: Folder) -> Finding | None:
    """Check whether the files of adapters, weights and configs can be read."""
    if folder.damaged:
        return _interrupted(folder, "; ".join(folder.damaged))

    if folder.adapters or folder.base is not None:
        return fine("adapters, weights and configs can be read")

    return None


def _interrupted(folder: Folder, evidence: str) -> Finding:
    path = folder.path
    before = numbered_folders(path)
    if is_numbered(path):
        siblings = numbered_folders(path.parent)
        before = siblings[: siblings.index(path)]

    remedy = "there is none before it: save it again"
    if before:
        remedy = f"take the checkpoint before it: {before[-1]}"

    return fault("a save was interrupted, or a file was damaged", evidence, remedy)


def optimizer(folder: Folder) -> Finding | None:
    """Check whether a checkpoint has its optimizer, and this trained no more than what was saved.

    A ``Trainer`` saves the optimizer after the model, then the scheduler and the random
    generators, and its own state last: where one of these is there without it, it was
    lost.
    """
    path = folder.path / _OPTIMIZER_NAME
    if not path.is_file():
        if not is_numbered(folder.path):
            return None
        names = sorted(inside.name for inside in folder.path.iterdir())
        # FSDP and DeepSpeed save it in shards
        if any("optimizer" in name or "global_step" in name for name in names):
            return not_measured(_WHAT_WAS_TRAINED, "it was saved in shards")
        later = [name for name in names if name.startswith(("scheduler", "rng_state"))]
        if later:
            return _interrupted(
                folder,
                f"no {_OPTIMIZER_NAME}, and what a Trainer saves after it: {shown(later)}",
            )
        return not_measured(
            _WHAT_WAS_TRAINED, f"no {_OPTIMIZER_NAME}, as save_only_model leaves it out"
        )

    try:
        num_states = len(load_pickled(path)["state"])
    except (ConfigError, LookupError, TypeError) as error:
        why = f"{path}: expected the state of an optimizer: {error}"
        # of an archive that has no end
        if isinstance(error.__cause__, (RuntimeError, OSError, EOFError)):
            return _interrupted(folder, why)
        return not_measured(_WHAT_WAS_TRAINED, why)

    if folder.has_damaged_adapter:
        return not_measured(_WHAT_WAS_TRAINED, _DAMAGED)

    saved = folder.tensors_of_adapters()
    # what computes prompts is not saved
    is_prompt = any(name.startswith("prompt_") for name, _ in saved)
    counts = f"{num_states} states, {len(saved)} saved tensors"
    if not saved or is_prompt or num_states <= len(saved):
        return fine(counts)

    return fault(
        "the optimizer has a state for parameters that are not the adapter's",
        counts,
        "freeze what is not saved, or save it (modules_to_save): what it learned is lost",
    )


def trainer_state(folder: Folder) -> Finding | None:
    """Check whether the state that a ``Trainer`` writes last can be read, and at which step it was."""
    path = folder.path / _STATE_NAME
    if not is_numbered(folder.path) and not os.path.lexists(path):
        return None

    try:
        state = read_json(path)
        step, last = state["global_step"], state["max_steps"]
    except (ConfigError, KeyError) as error:
        return _interrupted(folder, f"{path}: {error!r}")

    return fine(f"step {shown(step)} of {shown(last)}")


def numerics(folder: Folder) -> Finding | None:
    """Say what the base computed when training began, with which versions, and which of these are others now."""
    manifest = folder.manifest
    if manifest is None or manifest.logits is None:
        return None

    libraries = [f"{name} {one}" for name, one in manifest.versions.items()]
    changed = changed_versions(manifest.versions)
    since = f"since then {', '.join(changed)}"
    if not changed:
        since = "the same are installed"
    return fine(
        f"the base's logits were {manifest.logits}, with {', '.join(libraries)}; {since}"
    )


# ----------------------------------------------------------------------------------------------------
# The process.
# ----------------------------------------------------------------------------------------------------


def allocator(_: Subject) -> Finding | None:
    """Check whether torch allocates as a Jetson's driver allows: its calls for expandable segments fail at once."""
    if not _OF_TEGRA.exists():
        return None

    variable, settings = process_settings()
    given = [
        one for one in options_of(settings) if one.startswith("expandable_segments:")
    ]
    if given[-1:] != ["expandable_segments:True"]:
        return fine("expandable segments are off")

    return fault(
        "expandable segments are on, on a Jetson",
        f"{variable} is {shown(settings)}: the first allocation ends with CUDA "
        "driver error: out of memory, however much is free (unsloth-zoo#1235)",
        "leave expandable_segments out",
    )
