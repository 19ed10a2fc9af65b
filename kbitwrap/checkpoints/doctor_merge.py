"""The doctor's measure of a merge: how much of an adapter a merged checkpoint holds, whatever tool made it.

Or whether a checkpoint is the base that adapters go on, dequantized.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError, ExportError, ManifestMismatchError
from ..manifest.manifest import Manifest
from ..model.pretrained import as_plain, read_config
from ..model.quantization import SKIPPED_LAYERS, skipped_layers
from ..reports import first_of, shown
from ..tensors.devices import accelerator_type
from ..tensors.dtypes import HALF_DTYPES, find_dtype
from ..tensors.lazy import materialize
from .adapters import read_adapter
from .base import TrainedBase, load_adapted
from .base_quantization import (
    FITTED,
    GIVEN,
    OF_BASE,
    OF_MERGE,
    QUANTIZATION,
    STAMPED,
    UNKNOWN,
    BaseQuantization,
    find_quantization,
)
from .causes import (
    ANOTHER_ADAPTER,
    DOUBLED,
    NO_DELTA,
    REQUANTIZED_TO_4_BITS,
    UNCHANGED,
)
from .doctor_report import (
    FAULT,
    Finding,
    fault,
    fine,
    not_measured,
)
from .doctor_subjects import DoctorOptions, Folder, LiveModel, Subject, is_numbered
from .fitting import UNQUANTIZED_FITS, fitting_quantization
from .measure import MISSING, OTHER, MergeMeasure, Told, measure_merge
from .reader import lazy_tensors, open_checkpoint, saved_manifest
from .sides import Side, plain_side, read_merged, walk_merged

_NAME = "merge"
_WHAT = "how much of the adapter was merged"
_GIVE = "give the quantization (quantization_config, --quant)"
_MERGE_AGAIN = (
    "merge again: kbitwrap merge ADAPTER --out DIR, with the --quant of the training where nothing records it, or "
    "export(merge_adapters=True)"
)
_LOST = (
    "merge again, and see that the adapter is loaded: kbitwrap merge ADAPTER --out DIR"
)
_REMEDIES = {
    ANOTHER_ADAPTER: "give the adapter that was merged (adapter, --adapter), or merge again",
    DOUBLED: "merge once, into the base: kbitwrap merge BASE ADAPTER --out DIR",
    MISSING: "merge again, or restore the shard that holds it",
    NO_DELTA: _LOST,
    UNCHANGED: _LOST,
}
_Dtypes = list[torch.dtype | None]
_Found = list[tuple[str, Finding]]  # by the names of the checks


# ----------------------------------------------------------------------------------------------------
# What needs no adapter.
# ----------------------------------------------------------------------------------------------------


def unmeasured_merge(subject: Subject) -> Finding | None:
    """Check whether an adapter was merged into 4-bit weights, or else what would measure a merge.

    PEFT's merge rounds most of a small delta away. It quantizes from float32, where
    loading does so from half: that tells a merged weight. With the base and the adapter
    the merge itself is measured.
    """
    base, options = subject.base, subject.options
    if base is None:
        return None
    if options.adapter is not None and options.named_base is not None:
        return None

    sources = base.sources.items()
    requantized = [fqn for fqn, dtype in sources if dtype == torch.float32]
    originals = [base.dtype, *base.sources.values()]
    was_half = any(dtype in HALF_DTYPES for dtype in originals)
    if requantized and was_half:
        return fault(
            REQUANTIZED_TO_4_BITS,
            f"quantized from float32: {shown(requantized)}; how much survived: not measured",
            _MERGE_AGAIN,
        )

    may_be_merged = bool(base.sources)
    if isinstance(subject, Folder) and not subject.adapters and not may_be_merged:
        is_served = _quantization_to_dequantize(subject) is not None
        may_be_merged = not is_numbered(subject.path) and not is_served

    if options.adapter is None and may_be_merged:
        return not_measured(
            "whether it is a merge, and how much of the adapter it holds",
            "give the adapter that was merged (adapter, --adapter)",
        )
    return None


def _quantization_to_dequantize(folder: Folder) -> BaseQuantization | None:
    """Return the quantization of the base that a folder is compared with, dequantized.

    That is where a base and its quantization alone were given, and the folder has a
    base that is not quantized; ``None`` elsewhere.
    """
    options, own = folder.options, folder.base
    if options.named_base is None or options.adapter is not None:
        return None

    if folder.adapters or own is None or own.quantization.is_quantized:
        return None

    quantization = find_quantization(
        options.named_base,
        options.quantization_config,
        None,
        None,
        options.trust_remote_code,
    )
    return None if quantization.source == UNKNOWN else quantization


def dequantized_base(folder: Folder) -> Finding | None:
    """Check whether a folder is a base, dequantized, which an engine needs that is sent adapters only.

    ``None`` where it is not asked for.
    """
    quantization = _quantization_to_dequantize(folder)
    if quantization is None:
        return None

    options = folder.options
    trust = options.trust_remote_code
    found = read_merged(folder.path, trust)
    device = options.device or accelerator_type() or "cpu"
    trained, _ = load_adapted(
        options.base, None, None, quantization, found.dtype, device, trust
    )
    expected = plain_side(trained.model, is_merged=False).saved
    known = {*expected, *trained.unexpected}
    wrong = [fqn for fqn in found.saved if fqn not in known]
    wrong += _differing(expected, found.saved)
    if wrong:
        return fault(
            "it is not this base, dequantized",
            first_of(wrong),
            "write it on the type of device that trains: kbitwrap merge BASE --no-adapter --out DIR; or, if an adapter "
            "was merged into it, give that (adapter, --adapter)",
        )

    files = _files_of_base(trained, folder.path)
    if files is not None and files.outcome == FAULT:
        return files
    return fine(f"its {len(expected)} tensors are those of the base, dequantized")


def _differing(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> list[str]:
    """Return the names of expected tensors that were not found with their values, in the dtype found."""
    names = []
    for name, tensor in expected.items():
        its = found.get(name)
        if its is None or not torch.equal(
            materialize(its), materialize(tensor).to(its.device, its.dtype)
        ):
            names.append(name)

    return names


def _files_of_base(trained: TrainedBase, path: Path) -> Finding | None:
    """Check whether a folder has the tensors in the base's files that the class does not build.

    ``None`` where there are none.
    """
    if not trained.unexpected:
        return None

    unexpected = lazy_tensors(trained.unexpected)
    lacking = _differing(unexpected, lazy_tensors(open_checkpoint(path).tensors))
    if lacking:
        return fault(
            "it lacks tensors that the base's files have",
            f"{len(lacking):,} that a {type(trained.model).__name__} does not build: {first_of(lacking)}",
            "an engine that predicts several tokens by them cannot here: `kbitwrap merge` carries them over, "
            "or says why it cannot",
        )

    return fine(f"the {len(unexpected):,} that its class does not build are here")


# ----------------------------------------------------------------------------------------------------
# The measure of a merge.
# ----------------------------------------------------------------------------------------------------


def measure(subject: Subject, told: Told | None) -> tuple[MergeMeasure | None, _Found]:
    """Measure a merge where its base and its adapter were given, and say what was found."""
    options = subject.options
    if options.adapter is None:
        return None, []

    if subject.base is None and isinstance(subject, Folder) and subject.damaged:
        return None, []  # which is a finding of its own

    lacking = ""
    if subject.base is None:
        lacking = "there are no weights of a model here; give the folder of the merge"
    elif options.named_base is None:
        lacking = "give the folder or the name of the base too (base, --base)"

    if lacking:
        return None, [(_NAME, not_measured(_WHAT, lacking))]

    manifest = saved_manifest(options.adapter)
    try:
        if isinstance(subject, LiveModel):
            merged = walk_merged(subject.tree.model)
        else:
            merged = read_merged(Path(subject.where), options.trust_remote_code)
    except ConfigError as error:
        what = "the merged checkpoint cannot be loaded"
        return None, [(_NAME, fault(what, str(error), _MERGE_AGAIN))]

    outcomes: _Found = []
    try:
        return _measure(subject, merged, manifest, told, outcomes), outcomes
    except ManifestMismatchError as error:
        what = "the base is not the one that the adapter's manifest records"
        remedy = "give the base that was trained on, as it was"
        outcomes.append((_NAME, fault(what, str(error), remedy)))
    except ExportError as error:
        outcomes.append((_NAME, not_measured(_WHAT, str(error))))

    return None, outcomes


def _measure(
    subject: Subject,
    merged: Side,
    manifest: Manifest | None,
    told: Told | None,
    outcomes: _Found,
) -> MergeMeasure:
    """Measure a merge onto the base as it was quantized in training, in the run's dtype, and add what is found.

    Where nothing records that dtype, it is the one in which the fewest tensors are wrong.
    A checkpoint that fits another quantization than was recorded or given is measured in
    that, and the difference is a finding.
    """
    options = subject.options
    trust = options.trust_remote_code
    saved = read_adapter(options.adapter)
    stated = find_quantization(
        options.base, options.quantization_config, manifest, saved, trust
    )
    dtypes: _Dtypes = [None]
    if manifest is not None:
        dtypes = [find_dtype(manifest.model.dtype)]
    elif not saved.config_of_model:
        dtypes = _dtypes_in_training(options, merged)

    if stated.source == UNKNOWN:
        stated = _quantization_of_merge(subject) or UNQUANTIZED_FITS
    quantization = stated
    if stated.source not in (OF_BASE, OF_MERGE):
        with contextlib.suppress(ConfigError):  # loading what is stated says why
            quantization = fitting_quantization(
                merged, options.base, saved, dtypes, trust, stated
            )

    assumed, usual = "", _MERGE_AGAIN
    is_other = quantization.source == FITTED and stated.source != FITTED
    if is_other:
        said, correct = "is recorded", "record that (kbitwrap stamp)"
        if stated.source == GIVEN:
            said, correct = "was given", _GIVE
        elif stated.source == STAMPED:
            said = "was stamped"
        assumed = f"{quantization.form}; the run {said} as {stated.kind}"
        as_it_was = f"if it was trained {quantization.form}, {correct}; otherwise {_MERGE_AGAIN}"
        manifest = None  # the base in another quantization is not the recorded one
    elif stated.source == GIVEN:
        assumed = f"{quantization.form}, as given"
    elif stated.source == STAMPED:
        assumed = f"{quantization.form}, as was given when the run was stamped"
    elif quantization.source in (FITTED, OF_MERGE):
        assumed = quantization.form
        if quantization.config:
            assumed += f", which {quantization.source}"
        if quantization.source == FITTED:
            why = f"nothing records the base's quantization, so its weights were taken {assumed}; {_GIVE}"
            usual = f"{_GIVE}; if it is right {assumed}: {_MERGE_AGAIN}"
            outcomes.append((_NAME, not_measured(QUANTIZATION, why)))

    measures = []
    for dtype in dtypes:
        trained, adapted = load_adapted(
            options.base, saved, manifest, quantization, dtype, "cpu", trust
        )
        found = measure_merge(merged, adapted, saved, trained, told)
        trained.finish_check()
        num_wrong = sum(len(one.fqns) for one in found.faults)
        measures.append((num_wrong, found, trained))
        if not num_wrong:
            break

    _, found, trained = min(measures, key=operator.itemgetter(0))
    onto = OTHER if is_other else found.onto
    found = dataclasses.replace(found, assumed=assumed, onto=onto)
    if is_other:
        first = f"{found.kept:.1%} of the delta is there: {first_of([*found.tensors])}"
        outcomes.append((_NAME, fault(f"a merge {assumed}", first, as_it_was)))
    for one in found.faults:
        before = f"{one.evidence}: " if one.evidence else ""
        told_of = before + first_of(one.fqns)
        remedy = _REMEDIES.get(one.cause, usual)
        outcomes.append((_NAME, fault(one.cause, told_of, remedy)))

    if not found.faults and not is_other:
        outcomes.append((_NAME, fine(str(found))))

    if isinstance(subject, Folder):
        files = _files_of_base(trained, subject.path)
        if files is not None:
            outcomes.append(("files of the base", files))

    return found


def _quantization_of_merge(subject: Subject) -> BaseQuantization | None:
    """Return the quantization of the training as the checkpoint's config tells it; ``None`` where it tells nothing."""
    meta = None if subject.base is None else subject.base.meta
    config = getattr(meta, "config", None)
    own = as_plain(getattr(config, "quantization_config", None))
    if not isinstance(own, dict):
        return None

    # Names with dots are of layers that a merge dequantized: in training they were quantized.
    skipped = [name for name in skipped_layers(own) if "." not in name]
    return BaseQuantization({**own, SKIPPED_LAYERS: skipped or None}, OF_MERGE)


def _dtypes_in_training(options: DoctorOptions, merged: Side) -> _Dtypes:
    """Return the dtypes that an unrecorded run may have had, the likeliest first; ``None`` is that of the base.

    A base in half is trained on in its own dtype, or in that of the merge. A base in
    float32 is trained on in half where it is quantized; its merge may be a copy in the
    other half dtype.
    """
    own = read_config(options.base, options.trust_remote_code).dtype
    likely = [None, merged.dtype]
    if own not in HALF_DTYPES and merged.dtype in HALF_DTYPES:
        likely = [merged.dtype, None, *HALF_DTYPES]

    return [one for one in dict.fromkeys(likely) if one is None or one != own]
