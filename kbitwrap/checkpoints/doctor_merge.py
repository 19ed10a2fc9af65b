"""The doctor's measure of a merge: how much of an adapter a merged checkpoint holds, whatever tool made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ConfigError, ExportError, ManifestMismatchError
from ..manifest.manifest import Manifest
from ..model.wrappers import unwrap
from .adapters import read_adapter
from .base import QUANTIZATION, adapted_base, load_base, own_quantization
from .doctor_report import Examination, fault, fine, not_measured
from .doctor_subjects import Folder, Given, LiveModel, Subject
from .measure import MergeMeasure, Told, measure_merge
from .reader import open_checkpoint, saved_manifest
from .sides import MergedSide, read_merged, walk_merged

_NAME = "merge"
_WHAT = "how much of the adapter was merged"
_GIVE = "give the quantization (quantization_config, --quant)"
_REMEDY = (
    "merge again: kbitwrap merge BASE ADAPTER --out DIR, or export(merge_adapters=True)"
)


def measure(
    examination: Examination, subject: Subject, progress: bool | Told
) -> MergeMeasure | None:
    """Measure a merge where its base and its adapter were given, and add what was found."""
    given, where = subject.given, subject.where
    if given.adapter is None:
        return None

    if subject.base is None:
        if not isinstance(subject, Folder) or not subject.damaged:
            needed = (
                "there are no weights of a model here; give the folder of the merge"
            )
            examination.add(_NAME, where, not_measured(_WHAT, needed))
        return None

    if not given.tells_merge:
        needed = "give the folder or the name of the base too (base, --base)"
        examination.add(_NAME, where, not_measured(_WHAT, needed))
        return None

    manifest = saved_manifest(Path(given.adapter))
    quantization = given.quantization_config
    is_recorded = manifest is not None and QUANTIZATION not in manifest.unknown
    is_told = quantization is not None or is_recorded
    remedy = _REMEDY
    if not is_told and own_quantization(given.base) is None:
        quantization = _quantization_of(subject)  # it was merged in that
        if quantization is None:
            quantization = False
            remedy = f"{_GIVE}; if that is none: {_REMEDY}"
            unknown = not_measured(
                QUANTIZATION,
                f"nothing records it, so the base was taken as it is; {_GIVE}",
            )
            examination.add(_NAME, where, unknown)

    try:
        merged = _merged(subject)
    except ConfigError as error:
        what = "the merged checkpoint cannot be loaded"
        examination.add(_NAME, where, fault(what, str(error), _REMEDY))
        return None

    try:
        found = _measure(merged, given, quantization, manifest, progress)
    except ManifestMismatchError as error:
        what = "the base is not the one that the adapter's manifest records"
        remedy = "give the base that was trained on, as it was"
        examination.add(_NAME, where, fault(what, str(error), remedy))
        return None
    except ExportError as error:
        examination.add(_NAME, where, not_measured(_WHAT, str(error)))
        return None

    for one in found.faults:
        examination.add(_NAME, where, fault(one.cause, one.told, remedy))

    if not found.faults:
        examination.add(_NAME, where, fine(str(found)))

    return found


def _quantization_of(subject: Subject) -> Any:
    """The quantization config of a folder or a live model, or ``None``."""
    if isinstance(subject, LiveModel):
        model, _ = unwrap(subject.tree.model)
        config: Any = getattr(model, "config", None)
        return getattr(config, "quantization_config", None)

    content = open_checkpoint(Path(subject.where)).config
    return content.get("quantization_config")


def _measure(
    merged: MergedSide,
    given: Given,
    quantization: Any,
    manifest: Manifest | None,
    progress: bool | Told,
) -> MergeMeasure:
    saved = read_adapter(Path(given.adapter))
    trained = load_base(given.base, saved, manifest, quantization)
    adapted = adapted_base(trained, saved)
    return measure_merge(merged, adapted, saved, given.base, progress)


def _merged(subject: Subject) -> MergedSide:
    if isinstance(subject, LiveModel):
        return walk_merged(subject.tree.model, subject.where)
    return read_merged(Path(subject.where))
