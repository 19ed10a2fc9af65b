"""Diagnosis of a run: faults of a checkpoint, an adapter, a ``Trainer``'s output folder or a live model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import QuantKind, StrPath
from ..errors import ConfigError
from ..preparation.process import plain_mode
from . import doctor_base, doctor_merge, doctor_run
from .adapters import adapter_folder
from .doctor_report import Checks, DoctorReport, Finding, Outcome, examine, report
from .doctor_subjects import (
    Adapter,
    Base,
    DoctorOptions,
    Folder,
    LiveModel,
    Subject,
    read_run,
    walk_live,
)
from .measure import Told

__all__ = ["DoctorReport", "Finding", "doctor"]

# The checks of each kind of subject (`doctor_subjects`), by the names of their lines.
_CHECKS: Mapping[type, Checks] = {
    Folder: {
        "files": doctor_run.files,
        "optimizer": doctor_run.optimizer,
        "trainer state": doctor_run.trainer_state,
        "lora_B": doctor_run.lora_b,
        "merge": doctor_merge.unmeasured_merge,
    },
    LiveModel: {
        "base": doctor_base.drift,
        "lora_B": doctor_run.lora_b,
        "merge": doctor_merge.unmeasured_merge,
    },
    Adapter: {
        "adapter values": doctor_run.adapter_values,
    },
    Base: {
        "scales": doctor_base.scales,
        "dtypes": doctor_base.dtypes,
        "ties": doctor_base.ties,
        "layers": doctor_base.layers,
    },
}
_OF_THE_PROCESS: Checks = {"allocator": doctor_run.allocator}
# The base of a run is compared, and may be loaded, once.
_OF_THE_NEWEST_FOLDER: Checks = {
    "base": doctor_base.recorded_base,
    "numerics": doctor_run.numerics,
    "dequantized base": doctor_merge.dequantized_base,
}


def doctor(
    path_or_model: StrPath | nn.Module,
    *,
    base: Any = None,
    adapter: Any = None,
    quant: Any = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Told | None = None,
) -> DoctorReport:
    """Look for faults that raise no error. Nothing is changed, and no code in a file is run unless that is asked for.

    Of files, headers are read first, then adapters and tied weights. A base that is
    given is loaded. With a base and an adapter a merged checkpoint is measured, whatever
    tool made it; with a base and its quantization alone, a folder is compared with the
    dequantized base, tensor by tensor.

    Args:
        path_or_model: A folder (a checkpoint, an adapter, a ``Trainer``'s output), a
            file of weights, or a model.
        base: What was trained on: a folder, a name, or a loaded model, which is only
            compared with a manifest.
        adapter: The folder of an adapter that may have been merged, or its name on the hub.
        quant: How the base was quantized in training, where neither its config nor the
            adapter's manifest says it: a ``QuantKind`` or its word, a config as for
            ``from_pretrained``, or ``False`` for not at all.
        device: The device to quantize a base on with which a folder is compared; ``None``
            for the accelerator if there is one, else the CPU. A merge is measured on the
            CPU.
        trust_remote_code: Run the code that the base's folder brings along.
        progress: A function that is called with the number of the tensors that were
            measured, and of all.

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
    if isinstance(quant, str):
        if quant not in [*QuantKind]:
            raise ConfigError(
                f"quant: expected one of {', '.join(QuantKind)}, found {quant!r}"
            )
        quant = QuantKind(quant).settings or False

    if adapter is not None:
        adapter = adapter_folder(adapter)
    options = DoctorOptions(base, adapter, quant, device, trust_remote_code)
    outcomes: list[Outcome] = []
    with plain_mode(), torch.random.fork_rng(devices=[]):  # loading draws numbers
        subjects: Sequence[Subject]
        if isinstance(path_or_model, nn.Module):
            subjects = [walk_live(path_or_model, options)]
        else:
            subjects = read_run(Path(path_or_model), options)

        for subject in subjects:
            outcomes += examine(_CHECKS[type(subject)], subject, subject.where)
            for one in subject.adapters:
                outcomes += examine(_CHECKS[Adapter], one, one.where)
            if subject.base is not None:
                outcomes += examine(_CHECKS[Base], subject.base, subject.where)

        first, newest = subjects[0], subjects[-1]
        outcomes += examine(_OF_THE_PROCESS, first, "this process")
        if isinstance(newest, Folder):
            outcomes += examine(_OF_THE_NEWEST_FOLDER, newest, newest.where)
        merge, found = doctor_merge.measure(first, progress)
        outcomes += [(name, first.where, one) for name, one in found]
        return report(first.where, outcomes, merge)
