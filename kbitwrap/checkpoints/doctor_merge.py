"""The doctor's measure of a merge: how much of an adapter a merged checkpoint holds, whatever tool made it.

Or whether a checkpoint is the base that adapters go on, dequantized.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import QuantKind
from ..errors import ConfigError, ExportError, ManifestMismatchError
from ..export.forms import fused_layer
from ..manifest.manifest import Manifest
from ..model.pretrained import read_config
from ..model.quantization import kind_of
from ..model.tree import join
from ..model.wrappers import unwrap
from ..reports import first_of
from ..tensors.devices import accelerator_type
from ..tensors.dtypes import HALF_DTYPES
from ..tensors.lazy import materialize
from .adapters import read_adapter
from .base import QUANTIZATION, TrainedBase, is_told, load_adapted
from .doctor_base import tells_dequantized
from .doctor_report import FAULT, Examination, Result, fault, fine, not_measured
from .doctor_subjects import Folder, Given, LiveModel, Subject
from .fitting import Fitting, fitting_quantization
from .measure import OTHER, TRAINED, MergeMeasure, Told, measure_merge
from .reader import open_checkpoint, saved_manifest
from .sides import MergedSide, plain_side, read_merged, walk_merged

_DTYPES_OF_RUNS = (*HALF_DTYPES, torch.float32)
_NAME = "merge"
_WHAT = "how much of the adapter was merged"
_GIVE = "give the quantization (quantization_config, --quant)"


def measure(
    examination: Examination, subject: Subject, progress: bool | Told
) -> MergeMeasure | None:
    """Measure a merge where its base and its adapter were given, and add what was found."""
    given, where = subject.given, subject.where
    if given.adapter is None:
        return None

    if subject.base is None and isinstance(subject, Folder) and subject.damaged:
        return None  # which is a finding of its own

    lacking = _lacking(subject)
    if lacking:
        examination.add(_NAME, where, not_measured(_WHAT, lacking))
        return None

    manifest = saved_manifest(Path(given.adapter))
    again = _merge_again(given)
    try:
        merged = _merged(subject)
    except ConfigError as error:
        what = "the merged checkpoint cannot be loaded"
        examination.add(_NAME, where, fault(what, str(error), again))
        return None

    try:
        taken = _taken(examination, subject, merged, manifest)
        found, files = _measure(merged, subject, taken.quantization, manifest, progress)
    except ManifestMismatchError as error:
        what = "the base is not the one that the adapter's manifest records"
        remedy = "give the base that was trained on, as it was"
        examination.add(_NAME, where, fault(what, str(error), remedy))
        return None
    except ExportError as error:
        examination.add(_NAME, where, not_measured(_WHAT, str(error)))
        return None

    found = dataclasses.replace(found, assumed=taken.assumed)
    if taken.is_other and found.onto == TRAINED:
        found = dataclasses.replace(found, onto=OTHER)
    for one in found.faults:
        examination.add(_NAME, where, fault(one.cause, one.told, taken.remedy))

    if not found.faults and not taken.is_other:
        examination.add(_NAME, where, fine(str(found)))

    if files is not None:
        examination.add("files of the base", where, files)

    return found


@dataclass(frozen=True)
class _Taken:
    """The quantization of the base that a merge is compared with.

    Attributes:
        quantization: As for `load_base`.
        remedy: The remedy of what is wrong beside it.
        assumed: As of `MergeMeasure`.
        is_other: Whether it is another than the caller gave.
    """

    quantization: Any
    remedy: str
    assumed: str = ""
    is_other: bool = False


def _taken(
    examination: Examination,
    subject: Subject,
    merged: MergedSide,
    manifest: Manifest | None,
) -> _Taken:
    """Take the quantization that is told, or else the one that the checkpoint tells, and note the latter."""
    given, where = subject.given, subject.where
    again = _merge_again(given)
    if _is_told(given, manifest):
        other = _other_fitting(merged, subject, manifest)
        if other is None:
            return _Taken(given.quantization_config, again)

        kind, form = other.kind, _form(given.quantization_config)
        assumed = f"in {kind}, not {form} as given"
        give = f"give that (quantization_config, --quant {kind})"
        remedy = f"if it was trained in {kind}, {give}; otherwise {again}"
        what = f"it was merged onto the base's weights {assumed}"
        evidence = f"the checkpoint fits {kind}"
        examination.add(_NAME, where, fault(what, evidence, remedy))
        return _Taken(other.config, remedy, assumed, is_other=True)

    own = _in_training(_quantization_of(subject), given.adapter)
    if own is not None:
        return _Taken(own, again, f"{_form(own)}, which is the checkpoint's own")

    quantization, assumed = _fitting(merged, given)
    why = f"nothing records the base's quantization, so its weights were taken {assumed}; {_GIVE}"
    examination.add(_NAME, where, not_measured(QUANTIZATION, why))
    return _Taken(quantization, f"{_GIVE}; if it is right {assumed}: {again}", assumed)


def dequantized_base(folder: Folder) -> Result | None:
    """Whether a folder is a base, dequantized, which an engine needs that is sent adapters only.

    ``None`` where it is not asked for: by a base and its quantization, without an
    adapter.
    """
    given, own = folder.given, folder.base
    if folder.adapters or own is None or own.is_quantized:
        return None
    if not tells_dequantized(given):
        return None

    found = read_merged(folder.path, given.trust_remote_code)
    least: list[str] | None = None
    for dtype in _dtypes_in_training(given, found):
        trained, _ = load_adapted(
            given.base,
            None,
            None,
            given.quantization_config,
            dtype,
            given.device or accelerator_type() or "cpu",
            given.trust_remote_code,
        )
        expected = plain_side(trained.model, is_merged=False).saved
        known = {*expected, *trained.unexpected}
        wrong = [fqn for fqn in found.tensors if fqn not in known]
        for fqn, tensor in expected.items():
            its = found.tensors.get(fqn)
            if its is None or not torch.equal(
                materialize(its), materialize(tensor).to(its.device, its.dtype)
            ):
                wrong.append(fqn)

        if not wrong:
            lacking = _of_files(trained, folder.path)
            if lacking is not None and lacking.outcome == FAULT:
                return lacking
            return fine(
                f"its {len(expected)} tensors are those of the base, dequantized"
            )

        least = wrong if least is None or len(wrong) < len(least) else least

    return fault(
        "it is not this base, dequantized",
        first_of(least or ()),
        "write it on the type of device that trains: kbitwrap merge BASE --no-adapter --out DIR; or, if an adapter "
        "was merged into it, give that (adapter, --adapter)",
    )


def _of_files(trained: TrainedBase, path: Path) -> Result | None:
    """Whether a folder has the tensors in the base's files that the class does not build.

    ``None`` where there are none, or they are no part of what was trained.
    """
    if not trained.unexpected or trained.contradiction:
        return None

    held = open_checkpoint(path).tensors
    lacking = []
    for name, stored in trained.unexpected.items():
        its = held.get(name)
        if its is None or not torch.equal(
            materialize(its.lazy()), materialize(stored.lazy(its.dtype))
        ):
            lacking.append(name)

    if lacking:
        return fault(
            "it lacks tensors that the base's files have",
            f"{len(lacking):,} that a {type(trained.model).__name__} does not build: {first_of(lacking)}",
            "an engine that predicts several tokens by them cannot here: `kbitwrap merge` carries them over, "
            "or says why it cannot",
        )

    return fine(
        f"the {len(trained.unexpected):,} that its class does not build are here"
    )


def _lacking(subject: Subject) -> str:
    """The thing to give so that a merge can be measured; ``""`` where all is there."""
    if subject.base is None:
        return "there are no weights of a model here; give the folder of the merge"
    if not subject.given.tells_merge:
        return "give the folder or the name of the base too (base, --base)"
    return ""


def _is_told(given: Given, manifest: Manifest | None) -> bool:
    """Whether anything says how the base was quantized in training."""
    if given.quantization_config is not None:
        return True
    saved = None
    if given.adapter is not None:
        with contextlib.suppress(ConfigError):  # measuring says what is wrong with it
            saved = read_adapter(Path(given.adapter))
    return is_told(given.base, saved, manifest, given.trust_remote_code)


def _quantization_of(subject: Subject) -> Any:
    """The quantization config of a folder or a live model, or ``None``."""
    if isinstance(subject, LiveModel):
        model, _ = unwrap(subject.tree.model)
        config: Any = getattr(model, "config", None)
        return getattr(config, "quantization_config", None)

    content = open_checkpoint(Path(subject.where)).config
    return content.get("quantization_config")


def _fitting(merged: MergedSide, given: Given) -> tuple[Any, str]:
    """The quantization of the base that a checkpoint fits, and the form that this gives the weights."""
    saved = read_adapter(Path(given.adapter))
    dtypes = _dtypes_in_training(given, merged)
    trust = given.trust_remote_code
    fitting = fitting_quantization(merged, given.base, saved, dtypes, trust)
    if fitting is None:
        return False, "as they are"
    return fitting.config, f"in {fitting.kind}, which the checkpoint fits"


def _merge_again(given: Given) -> str:
    """The remedy of a wrong merge."""
    kind = None
    if given.quantization_config is not None:
        kind = _kind(given.quantization_config)
    quant = f" --quant {kind}" if kind else ""
    unrecorded = (
        "" if kind else ", with the --quant of the training where nothing records it"
    )
    return f"merge again: kbitwrap merge ADAPTER{quant} --out DIR{unrecorded}, or export(merge_adapters=True)"


def _kind(settings: Any) -> QuantKind | None:
    """The kind of a quantization config; ``None`` where it is of no kind that is known."""
    fields = settings.to_dict() if hasattr(settings, "to_dict") else settings
    return kind_of(fields or {})


def _form(settings: Any) -> str:
    """The form of a base's weights in a quantization, in words."""
    kind = _kind(settings)
    if kind is None:
        return "quantized"
    return "as they are" if kind is QuantKind.NONE else f"in {kind}"


def _told_kind(given: Given, manifest: Manifest | None) -> QuantKind | None:
    """The kind of quantization in training that the caller gives; ``None`` where files say it."""
    settings = given.quantization_config
    unsaid = dataclasses.replace(given, quantization_config=None)
    if settings is None or _is_told(unsaid, manifest):
        return None

    return _kind(settings)


def _other_fitting(
    merged: MergedSide, subject: Subject, manifest: Manifest | None
) -> Fitting | None:
    """The quantization that a checkpoint fits, where the caller gives another."""
    given = subject.given
    told = _told_kind(given, manifest)
    if told is None:
        return None

    own = _quantization_of(subject)
    if own is not None:
        kind = _kind(own)
        if kind in (None, told):
            return None
        return Fitting(kind, _in_training(own, given.adapter))

    saved = read_adapter(Path(given.adapter))
    found = fitting_quantization(
        merged,
        given.base,
        saved,
        _dtypes_in_training(given, merged),
        given.trust_remote_code,
    )
    return None if found is None or found.kind is told else found


def _in_training(settings: Any, adapter: Any) -> Any:
    """A merged checkpoint's quantization config, with the layers that the merge took out of it.

    Those are what the adapter touches, and what engines compute with it.
    """
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, dict):
        return settings

    touched: set[str] = set()
    for key in read_adapter(Path(adapter)).tensors:
        layers = itertools.accumulate(key.split("."), join)
        touched.update(f".{fused_layer(layer)}" for layer in layers)

    kept = []
    for name in settings.get("llm_int8_skip_modules") or ():
        is_layer = "." in name  # and not a name such as lm_head
        suffix = f".{fused_layer(name)}"  # names of the model inside have no prefix
        if not is_layer or not any(layer.endswith(suffix) for layer in touched):
            kept.append(name)
    return {**settings, "llm_int8_skip_modules": kept or None}


def _measure(
    merged: MergedSide,
    subject: Subject,
    quantization: Any,
    manifest: Manifest | None,
    progress: bool | Told,
) -> tuple[MergeMeasure, Result | None]:
    """Measure a merge, and look at the files of the base, in the run's dtype.

    Where nothing records that, it is the one in which the fewest tensors are wrong.
    """
    given = subject.given
    saved = read_adapter(Path(given.adapter))

    def in_dtype(dtype: torch.dtype | None) -> tuple[MergeMeasure, Result | None]:
        trained, adapted = load_adapted(
            given.base,
            saved,
            manifest,
            quantization,
            dtype,
            "cpu",
            given.trust_remote_code,
        )
        found = measure_merge(merged, adapted, saved, trained, progress)
        trained.finish_check()
        files = None
        if isinstance(subject, Folder):
            files = _of_files(trained, subject.path)
        return found, files

    dtypes: list[torch.dtype | None] = [None]
    if manifest is None and not saved.config_of_model:
        dtypes = _dtypes_in_training(given, merged)

    def num_wrong(found: tuple[MergeMeasure, Result | None]) -> int:
        return sum(len(one.fqns) for one in found[0].faults)

    best = in_dtype(dtypes[0])
    for dtype in dtypes[1:]:
        if not num_wrong(best):
            break
        best = min(best, in_dtype(dtype), key=num_wrong)

    return best


def _dtypes_in_training(given: Given, merged: MergedSide) -> list[torch.dtype | None]:
    """The dtypes that a run may have had which nothing records, the likeliest first; ``None`` is that of the base.

    A base in half is trained on in that, or in the dtype of the merge; one in float32
    in half where it is quantized, and its merge may be a copy in the other half.
    """
    own = read_config(given.base, given.trust_remote_code).dtype
    likely = [merged.dtype] if merged.dtype in _DTYPES_OF_RUNS else []
    if own in HALF_DTYPES:
        return [None, *(dtype for dtype in likely if dtype != own)]

    if merged.dtype not in HALF_DTYPES:
        return [None]

    return [*likely, None, *(dtype for dtype in HALF_DTYPES if dtype not in likely)]


def _merged(subject: Subject) -> MergedSide:
    if isinstance(subject, LiveModel):
        return walk_merged(subject.tree.model, subject.where)
    return read_merged(Path(subject.where), subject.given.trust_remote_code)
