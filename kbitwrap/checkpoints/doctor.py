"""Diagnosis of a run: faults of a checkpoint, an adapter, a ``Trainer``'s output folder or a live model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..preparation.process import plain_mode
from . import base_checks, run_checks
from .diagnosis import Checks, DoctorReport, Examination, Finding
from .subjects import Given, Subject, read_run, walk_live

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
            live = walk_live(path_or_model, given)
            _examine(examination, live, _OF_A_MODEL, _OF_AN_ADAPTER)
            return examination.report(live.where)

        folders = read_run(Path(path_or_model), given)
        for folder in folders:
            _examine(examination, folder, _OF_A_FOLDER, _OF_A_SAVED_ADAPTER)
        # The manifests of one run agree: the base is compared, and may be loaded, once.
        recorded = [folder for folder in folders if folder.manifest is not None]
        adapted = [folder for folder in folders if folder.adapters]
        newest = (recorded or adapted or folders)[-1]
        examination.make(_OF_A_MANIFEST, newest, newest.where)
        return examination.report(folders[0].where)


def _examine(
    examination: Examination, subject: Subject, checks: Checks, of_an_adapter: Checks
) -> None:
    """Make the checks of a folder or a live model, then those of its adapters and its base."""
    examination.make(checks, subject, subject.where)
    for adapter in subject.adapters:
        examination.make(of_an_adapter, adapter, adapter.where)
    if subject.base is not None:
        examination.make(_OF_A_BASE, subject.base, subject.where)
