"""Diagnosis of a run: faults of a checkpoint, an adapter, a ``Trainer``'s output folder or a live model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..preparation.process import plain_mode
from . import base_checks, run_checks
from .diagnosis import Checks, DoctorReport, Examination, Finding
from .subjects import Folder, Given, LiveModel, read_run, walk_live

__all__ = ["DoctorReport", "Finding", "doctor"]

_OF_A_FOLDER: Checks = {
    "newest checkpoint": run_checks.newest_checkpoint,
    "files": run_checks.files,
    "optimizer": run_checks.optimizer,
    "trainer state": run_checks.trainer_state,
    "tokenizer": run_checks.tokenizer,
    "lora_B": run_checks.lora_b,
    "merge": base_checks.merge,
}
_OF_A_MODEL: Checks = {
    "base": base_checks.drift,
    "lora_B": run_checks.lora_b,
    "merge": base_checks.merge,
}
_OF_AN_ADAPTER: Checks = {
    "adapter values": run_checks.adapter_values,
    "adapter dtypes": run_checks.adapter_dtypes,
}
_OF_A_SAVED_ADAPTER: Checks = {
    "adapter config": run_checks.adapter_config,
    **_OF_AN_ADAPTER,
}
_OF_A_BASE: Checks = {
    "dtypes": base_checks.dtypes,
    "generation config": base_checks.generation_config,
    "ties": base_checks.ties,
    "experts": base_checks.experts,
    "layers": base_checks.layers,
}
_OF_A_MANIFEST: Checks = {
    "devices": base_checks.devices,
    "base": base_checks.recorded_base,
}


def doctor(
    path_or_model: str | os.PathLike[str] | nn.Module,
    *,
    base: Any = None,
    adapter: Any = None,
) -> DoctorReport:
    """Look for faults that raise no error. Nothing is changed, and no code in a file is run.

    Of files, headers are read first, then adapters and tied weights. A base that is
    given is loaded.

    Args:
        path_or_model: A folder (a checkpoint, an adapter, a ``Trainer``'s output), a
            file of weights, or a model.
        base: What was trained on: a folder, a name, or a loaded model, which is only
            compared with a manifest.
        adapter: The folder of an adapter that may have been merged.

    Returns:
        The report: what was looked at, what is at fault, and what could not be
        measured. A file that is damaged is a fault.

    Raises:
        ConfigError: There is nothing to examine at a path, or a base cannot be loaded,
            or an adapter that was given cannot be put on it.
        ManifestError: A manifest cannot be read.
        UnsupportedModelError: The model is sharded, or on the meta device.

    Example:
        >>> import torch, kbitwrap
        >>> kbitwrap.doctor(torch.nn.Linear(2, 2)).findings
        ()
    """
    given = Given(base, adapter)
    examination = Examination()
    with plain_mode(), torch.random.fork_rng(devices=[]):  # loading draws numbers
        if isinstance(path_or_model, nn.Module):
            subject = type(path_or_model).__name__
            _examine_model(examination, subject, walk_live(path_or_model, given))
        else:
            folders = read_run(Path(path_or_model), given)
            subject = str(folders[0].path)
            _examine_run(examination, folders)

    return examination.report(subject)


def _examine_model(examination: Examination, subject: str, live: LiveModel) -> None:
    examination.make(_OF_A_MODEL, live, subject)
    for adapter in live.adapters:
        examination.make(_OF_AN_ADAPTER, adapter, subject)
    examination.make(_OF_A_BASE, live.base, subject)


def _examine_run(examination: Examination, folders: Sequence[Folder]) -> None:
    for folder in folders:
        where = str(folder.path)
        examination.make(_OF_A_FOLDER, folder, where)
        for adapter in folder.adapters:
            examination.make(_OF_A_SAVED_ADAPTER, adapter, adapter.where)
        if folder.base is not None:
            examination.make(_OF_A_BASE, folder.base, where)

    # The manifests of one run agree: the base is compared, and may be loaded, once.
    recorded = [folder for folder in folders if folder.manifest is not None]
    adapted = [folder for folder in folders if folder.adapters]
    newest = (recorded or adapted or folders)[-1]
    examination.make(_OF_A_MANIFEST, newest, str(newest.path))
