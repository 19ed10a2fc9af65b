"""The checks of an adapter and of a folder of a run; ``None`` of one says that there is nothing to look at."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from pathlib import Path

import torch

from ..errors import ConfigError
from ..reports import shown
from ..tensors.lazy import materialize
from .doctor_report import Result, fault, fine, not_measured
from .doctor_subjects import (
    OPTIMIZER_NAME,
    Adapter,
    Folder,
    Optimizer,
    Subject,
    checkpoint_before,
    dtype_names,
    numbered_folders,
    tensors_of,
)
from .reader import read_json

_STATE_NAME = "trainer_state.json"
# What LoRA initializes with zeros, so that it adds nothing before the first step.
_ZERO_AT_FIRST = re.compile(r"\.lora_(?:B\.|embedding_A)")
_WHAT_WAS_TRAINED = "what the optimizer trained"


# ----------------------------------------------------------------------------------------------------
# An adapter.
# ----------------------------------------------------------------------------------------------------


def adapter_config(adapter: Adapter) -> Result | None:
    """Whether PEFT can read the config beside a saved adapter.

    Without it the values are of no use: nothing else says to which layers they belong.
    """
    from peft import PeftConfig

    path = Path(adapter.where) / "adapter_config.json"
    try:
        content = read_json(path)
        method = content["peft_type"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of keys that are newer than PEFT
            PeftConfig.from_peft_type(**content)
    except Exception as error:  # whatever PEFT raises for what it cannot read
        return fault(
            "an adapter has no config that PEFT can read",
            f"{path}: {error!r}",
            "take that of another checkpoint of the run",
        )

    return fine(f"PEFT reads it: {shown(method)}")


def adapter_values(adapter: Adapter) -> Result:
    """Whether an adapter has values, and all of them are finite.

    Sharded parameters that were not gathered are saved without elements; a loss that
    diverged leaves NaN and infinity.
    """
    tensors = adapter.tensors.items()
    without = "its file holds no tensor"
    empty = [name for name, tensor in tensors if tensor.numel() == 0]
    if empty:
        without = f"tensors without elements: {shown(empty)}"

    if empty or not tensors:
        return fault(
            "an adapter holds no values",
            without,
            "gather sharded parameters before they are saved",
        )

    broken = [name for name, tensor in tensors if not _is_finite(tensor)]
    if broken:
        return fault(
            "an adapter is not finite",
            shown(broken),
            "go back to a checkpoint from before the loss diverged",
        )

    return fine(f"{len(tensors)} tensors are finite")


def _is_finite(tensor: torch.Tensor) -> bool:
    values = materialize(tensor).float()
    return bool(values.isfinite().all())


def adapter_dtypes(adapter: Adapter) -> Result | None:
    """Whether an adapter has a dtype of its training, and ``lora_B`` that of ``lora_A`` in the same layer."""
    tensors = adapter.tensors
    if not tensors:
        return None

    dtypes = sorted(dtype_names(tensors.values()))
    others = []
    for name, tensor in tensors.items():
        # the tensor itself, where it is no lora_B
        lora_a = tensors.get(name.replace(".lora_B.", ".lora_A."), tensor)
        if tensor.dtype != lora_a.dtype:
            others.append(name)

    # empty where its dtypes in training are not known
    in_training = adapter.trained
    if in_training and in_training.isdisjoint(dtypes):
        others = list(tensors)

    if others:
        return fault(
            "an adapter has another dtype than in training",
            shown(others),
            "save it in the dtype of its training",
        )

    names = ", ".join(dtypes)
    # Saved in float32, it has lost nothing, whatever the dtype of its training was.
    if not in_training and names != "float32":
        return not_measured(
            "the dtype in which the adapter was trained",
            f"it is saved in {names}, and neither kbitwrap.json nor {OPTIMIZER_NAME} tells",
        )

    return fine(names)


def lora_b(subject: Subject) -> Result | None:
    """Whether LoRA adds anything: what it starts at zero is zero no more in some layer of some adapter.

    All adapters are looked at together, because one of several may be a frozen
    reference. A head that was trained beside it does not excuse it: LoRA got no
    gradients.
    """
    tensors = tensors_of(subject.adapters)
    outer = [(name, tensor) for name, tensor in tensors if _ZERO_AT_FIRST.search(name)]
    if not outer:
        return None

    if any(materialize(tensor).any() for _, tensor in outer):
        return fine(f"not all of {len(outer)} are zero")

    names = [name for name, _ in outer]
    evidence = f"LoRA adds nothing: {shown(names)}"
    beside = [name for name, _ in tensors if ".lora_" not in name]
    if beside:
        evidence += f"; saved beside it, and not compared: {shown(beside)}"

    return fault(
        "lora_B is zero in every layer",
        evidence,
        "train it, and see that it gets gradients",
    )


# ----------------------------------------------------------------------------------------------------
# The files of a folder, in the order in which a Trainer saves them.
# ----------------------------------------------------------------------------------------------------


def newest_checkpoint(folder: Folder) -> Result | None:
    """Which of the checkpoints in a folder is the newest."""
    numbered = numbered_folders(folder.path)
    if not numbered:
        return None

    return fine(f"{numbered[-1]}, of {len(numbered)}")


def files(folder: Folder) -> Result | None:
    """Whether the files of adapters, weights and configs can be read."""
    if folder.damaged:
        return _interrupted(folder, "; ".join(folder.damaged))

    if folder.adapters or folder.base is not None:
        return fine("adapters, weights and configs can be read")

    if folder.is_numbered and not _has_optimizer(folder):
        return _interrupted(folder, "there is neither an adapter nor a model")

    return None


def _interrupted(folder: Folder, evidence: str) -> Result:
    before = checkpoint_before(folder.path)
    remedy = "there is none before it: save it again"
    if before is not None:
        remedy = f"take the checkpoint before it: {before}"

    return fault("a save was interrupted, or a file was damaged", evidence, remedy)


def optimizer(folder: Folder) -> Result | None:
    """Whether a checkpoint has its optimizer, and this trained no more than what was saved.

    A ``Trainer`` saves the optimizer after the model, then the scheduler and the random
    generators, and its own state last: where one of these is there without it, it was
    lost.
    """
    found = folder.optimizer
    if found is not None:
        return _states(folder, found)

    if not folder.is_numbered:
        return None

    if _has_optimizer(folder):
        return not_measured(_WHAT_WAS_TRAINED, "it was saved in shards")

    names = [path.name for path in folder.path.iterdir()]
    later = [name for name in names if name.startswith(("scheduler", "rng_state"))]
    if later or _STATE_NAME not in names:
        return _interrupted(
            folder,
            f"no {OPTIMIZER_NAME}; of what a Trainer saves after it there is {shown(later)}",
        )

    return not_measured(
        _WHAT_WAS_TRAINED, f"no {OPTIMIZER_NAME}, as save_only_model leaves it out"
    )


def _has_optimizer(folder: Folder) -> bool:
    """Whether an optimizer was saved, by FSDP and DeepSpeed in shards."""
    found = [*folder.path.glob("*optimizer*"), *folder.path.glob("global_step*")]
    return any(path.is_file() or path.is_dir() for path in found)


def _is_archive(path: Path) -> bool:
    """Whether a file is whole, as far as what ``torch.save`` writes last tells it."""
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # of bytes that say that there are other volumes
        return False


def _states(folder: Folder, optimizer: Optimizer) -> Result:
    """Whether an optimizer that was saved can be read, and has states of what was saved alone."""
    if optimizer.unreadable:
        if _is_archive(folder.path / OPTIMIZER_NAME):
            return not_measured(_WHAT_WAS_TRAINED, optimizer.unreadable)
        return _interrupted(folder, optimizer.unreadable)

    saved = tensors_of(folder.adapters)
    # what computes prompts is not saved
    is_prompt = any(name.startswith("prompt_") for name, _ in saved)
    counts = f"{optimizer.num_states} states, {len(saved)} saved tensors"
    if not saved or is_prompt or optimizer.num_states <= len(saved):
        return fine(counts)

    trained = {tuple(moment.shape) for moment in optimizer.moments}
    unsaved = trained.difference(tuple(tensor.shape) for _, tensor in saved)
    return fault(
        "the optimizer has a state for parameters that are not the adapter's",
        f"{counts}; shapes that none of these has: {shown(sorted(unsaved))}",
        "freeze what is not saved, or save it (modules_to_save): what it learned is lost",
    )


def trainer_state(folder: Folder) -> Result | None:
    """Whether the state that a ``Trainer`` writes last can be read, and at which step it was."""
    path = folder.path / _STATE_NAME
    is_expected = folder.is_numbered and _has_optimizer(folder)
    if not is_expected and not os.path.lexists(path):
        return None

    try:
        state = read_json(path)
        step, last = state["global_step"], state["max_steps"]
    except (ConfigError, KeyError) as error:
        return _interrupted(folder, f"{path}: {error!r}")

    return fine(f"step {shown(step)} of {shown(last)}")


def tokenizer(folder: Folder) -> Result | None:
    """Whether the embeddings have a row for each id of the tokenizer that was saved beside them.

    A chat template's tokens are added to a tokenizer; where the embeddings were not
    resized, looking one up fails.
    """
    path = folder.path / "tokenizer.json"
    if not path.is_file():
        return None

    try:
        ids = _token_ids(path)
    except ConfigError as error:
        return _interrupted(folder, str(error))

    embedding = folder.embedding()
    if embedding is None:
        return not_measured(
            "whether the embeddings have a row for each id of the tokenizer",
            "give base (--base): they are not known from what is saved here",
        )

    fqn, num_rows = embedding
    beyond = [
        f"{token} ({number})" for token, number in ids.items() if number >= num_rows
    ]
    if beyond:
        return fault(
            "the tokenizer has more ids than the embeddings have rows",
            f"{fqn} has {num_rows} rows; ids without one: {shown(beyond)}",
            "save the model that was resized for this tokenizer, or the model's own tokenizer",
        )

    return fine(f"{len(ids)} ids, and {fqn} has {num_rows} rows")


def _token_ids(path: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(os.fspath(path)).get_vocab()
    except Exception as error:  # it raises nothing more special
        raise ConfigError(
            f"{path}: expected a tokenizer, found a damaged file: {error}"
        ) from error
