"""``kbitwrap doctor``: what a folder of a run is, and its faults that raise no error."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from .. import ConfigError
from ..reports import first_of, shown
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    Result,
    checked_device,
    first_line,
    holds_adapter,
    printable,
    say,
    show_result,
    working,
)
from .quantization import quantization_in_training
from .tables import table
from .usage import (
    BaseInTraining,
    Device,
    Json,
    QuantInTraining,
    Samples,
    TrustRemoteCode,
    given,
)

if TYPE_CHECKING:
    from .. import CheckpointReport, DoctorReport, Manifest
    from ..checkpoints.measure import MergeMeasure

SUMMARY = (
    "Say what a checkpoint or a manifest is, and look for faults that raise no error."
)
HELP = (
    "Say what a checkpoint or a manifest is, and look for faults of a saved run that raise no error.\n\n"
    "kbitwrap doctor out/checkpoint-500\n"
    "kbitwrap doctor merged --adapter adapter --quant nf4\n"
    "kbitwrap doctor run/kbitwrap.json\n\n"
    "PATH is a checkpoint, an adapter or a Trainer's output folder. doctor looks for these faults: float32 left by a "
    "preparation, another base than the manifest's, adapters that are zero or not finite, layers and "
    "experts that were never quantized, tied weights that came apart, a merge into "
    "4-bit weights, scales in another order than their weights, an optimizer that trained what was not saved, a save "
    "that was interrupted. Faults are printed, and what was not measured and why; with --verbose each check made. No "
    "code in a file is run, but for that of BASE with --trust-remote-code.\n\n"
    "Of tensors that a preparation left in float32 it prints which they are, what they waste, and the command that "
    "gives them their dtypes back; of a manifest, with --verbose of that in PATH too, which model was prepared, and "
    "how. The manifest of an adapter is compared with BASE, or with the folder that the adapter names.\n\n"
    "Is a merged model what was trained? With --adapter every tensor of PATH is compared with the adapter and its "
    "base, whatever tool merged them: how much of what the adapter learned is there, what is wrong where it is not, "
    "and what of the base's files is missing. With --text FILE its loss on your own texts is compared, too: the part "
    "of the adapter's gain that it keeps. With --base and --quant alone, PATH is compared with the dequantized "
    "base: an engine that is sent adapters only needs that.\n\n"
    "Exit status: 0 no fault was found, 1 one was, 2 bad input."
)
_MOST_TENSORS = 5  # of a wrong merge, in its table
_REMEDY = (
    "A preparation upcast these, and the model was saved before it was undone. To get the original dtypes back, with "
    "this command, or with --manifest M or --like ORIGINAL, which know each tensor's dtype:"
)
_RECORDED = {
    "created",
    "versions",
    "model",
    "config",
    "adapters",
    "plan",
    "unknown",
    "logits",
}


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="The folder, a file of weights, or a manifest.",
        ),
    ],
    base: BaseInTraining = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="ADAPTER",
            help="The folder of the adapter that was merged: how much of it PATH holds.",
        ),
    ] = None,
    quant: QuantInTraining = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --adapter: compare PATH with the adapter model by its loss on FILE, JSON lines (.jsonl) with "
            "text, or messages, or prompt and completion, or plain text.",
        ),
    ] = None,
    samples: Samples = 64,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            help="Print each check made, and all that the manifest in PATH records.",
        ),
    ] = False,
    json_: Json = False,
) -> int:
    """Examine, and print what was found. 1 if that was a fault, else 0.

    Raises:
        InputError: There is nothing to examine, or it is damaged.
    """
    if not os.path.exists(path):
        raise InputError(f"there is nothing at {str(path)!r}")
    if path.suffix == ".json":
        of_folders = given(base=base, adapter=adapter, quant=quant, text=text)
        if of_folders:
            raise InputError(
                f"{of_folders[0]}: PATH is a file, {str(path)!r}: give the folder that is compared"
            )
        with working(f"reading {path}"):
            from .. import Manifest

            record = _record(Manifest.load(path))
        show_result(record, [_recorded(record)], json_)
        return EXIT_DONE
    if quant is not None and base is None and adapter is None:
        raise InputError(
            "--quant says how a base was quantized: give --adapter, or --base"
        )
    if text is not None and adapter is None:
        raise InputError("--text compares PATH with the adapter model: give --adapter")
    if adapter is not None and holds_adapter(path):
        raise InputError(
            f"{str(path)!r} holds an adapter: with --adapter, PATH is the folder of the merged model"
        )
    with working(f"examining {path}", trust_remote_code) as doing:
        from .. import compare_merges, doctor  # not before: they load torch
        from ..checkpoints.adapters import read_adapter
        from ..checkpoints.base import named_base
        from ..checkpoints.inspection import inspect_checkpoint
        from ..checkpoints.reader import has_weights, saved_manifest

        given_base = base

        def tell(num_done: int, num_tensors: int) -> None:
            doing.now(f"measuring {path}: {num_done:,} of {num_tensors:,} tensors")

        manifest = saved_manifest(path)
        if adapter is not None and base is None:
            base = named_base(read_adapter(adapter))
        elif base is None and manifest is not None:
            with contextlib.suppress(ConfigError):  # of what is no adapter
                named = named_base(read_adapter(path))
                base = named if os.path.isdir(named) else None
        measured = damage = None
        if text is not None and adapter is not None:
            try:
                comparison = compare_merges(
                    adapter,
                    text,
                    base=base,
                    forms=[path.resolve()],
                    samples=samples,
                    progress=doing.now,
                    quantization_config=quantization_in_training(quant, None),
                    device=checked_device(device),
                    trust_remote_code=trust_remote_code,
                )
                measured = comparison.merges[str(path.resolve())]
            except ConfigError as error:
                damage = error
        report = doctor(
            path,
            base=base,
            adapter=adapter,
            quant=quant,
            device=checked_device(device),
            trust_remote_code=trust_remote_code,
            progress=tell,
        )
        if damage is not None and not report:  # else the report names it
            raise damage
        checkpoint = None
        # the report names what is damaged
        with contextlib.suppress(ConfigError):
            if has_weights(path) and path.stem != "adapter_model":
                checkpoint = inspect_checkpoint(path)

    result = report.to_dict()
    parts = [] if report.merge is None else _merge(report.merge)
    if measured is not None:
        result["text"] = measured.to_dict()
        parts.insert(1, str(measured))
    if damage is not None:
        parts.append(printable(f"not measured on {text}: {first_line(damage)}"))
    parts += _checks(report, verbose)
    if checkpoint is not None:
        result["checkpoint"] = checkpoint.to_dict()
        parts.append(_contents(checkpoint))
    if checkpoint:
        suggestion = _conversion(checkpoint)
        result["checkpoint"]["suggestion"] = suggestion
        parts.append(_leftovers(checkpoint, suggestion))
    if manifest is not None:
        result["manifest"] = _record(manifest)
        told: RenderableType = (
            f"the manifest is of {manifest.model.class_name} from {shown(manifest.model.name_or_path)}; "
            "--verbose prints what it records"
        )
        parts.append(_recorded(result["manifest"]) if verbose else told)
    show_result(result, parts, json_)
    if base is not None and given_base is None:
        say(f"note: the base is {base!r}, which the config of the adapter names")
    return EXIT_NO if report else EXIT_DONE


def _merge(merge: MergeMeasure) -> list[RenderableType]:
    """Lay out the verdict on a merge, and the worst of its tensors at fault."""
    verdict = printable(str(merge))
    at_fault = {fqn for fault in merge.faults for fqn in fault.fqns}
    bad = [item for item in merge.tensors.items() if item[0] in at_fault]
    if not bad:
        return [verdict]
    rows = [["tensor", "kept", "error", "bits"]]
    for fqn, one in sorted(bad, key=lambda item: -item[1].error)[:_MOST_TENSORS]:
        figures = f"{one.kept:.1%}", f"{one.error:.1%}", str(one.bits or "-")
        rows.append([printable(fqn), *figures])
    kept = f"{merge.kept:.1%} of the delta is there, with an error of {merge.error:.1%} of it; the worst tensors:"
    return [verdict, kept, table(rows)]


def _checks(report: DoctorReport, verbose: bool) -> list[RenderableType]:
    """Lay out what was found, what was not and what was not measured; and, if asked for, each check."""
    by_outcome: dict[str, list[str]] = {"fine": [], "not measured": []}
    for check in report.looked_at:
        by_outcome.setdefault(check.outcome, []).append(check.what)
    counts = []
    if report.findings:
        counts.append(f"faults: {len(report.findings)}")
    if by_outcome["fine"]:
        names = ", ".join(dict.fromkeys(by_outcome["fine"]))
        counts.append(f"no fault found in {names}")
    if by_outcome["not measured"]:
        counts.append(f"not measured: {len(by_outcome['not measured'])}")
    first = f"{report.subject}: {'; '.join(counts)}"
    lines = [first, *[f"not measured: {text}" for text in report.not_measured]]
    parts = ["\n".join(map(printable, lines))]
    for one in report.findings:
        lines = [one.what, f"  where: {one.where}", f"  evidence: {one.evidence}"]
        lines.append(f"  remedy: {one.remedy}")
        parts.append("\n".join(map(printable, lines)))
    if verbose:
        parts.append("\n".join(printable(str(one)) for one in report.looked_at))
    return [*parts]


def _contents(checkpoint: CheckpointReport) -> str:
    """Say what the files of a checkpoint hold."""
    dtypes = []
    for name, row in checkpoint.dtypes.items():
        dtypes.append(f"{row['count']} {name} ({row['bytes']:,} bytes)")
    quantized = "quantized" if checkpoint.is_quantized else "not quantized"
    return printable(
        f"{checkpoint.path}: {checkpoint.num_tensors} tensors, {checkpoint.num_bytes:,} bytes, {quantized}: "
        f"{', '.join(dtypes)}; config dtype: {checkpoint.config_dtype or 'not named'}"
    )


def _conversion(checkpoint: CheckpointReport) -> str:
    """Write the command that gives a checkpoint its dtypes back."""
    half = checkpoint.half_dtype
    dtypes = f"--dtype {half}" if half else "--like ORIGINAL"
    source = shlex.quote(str(checkpoint.path))
    return f"kbitwrap convert --from {source} --out DST {dtypes}"


def _leftovers(checkpoint: CheckpointReport, command: str) -> str:
    """Say which tensors a preparation left in float32, and how they get their dtypes back."""
    names = first_of([printable(name) for name in checkpoint.leftovers])
    return (
        f"left in float32: tensors: {len(checkpoint.leftovers)}: {names}\n"
        f"{checkpoint.wasted_bytes:,} bytes of {checkpoint.num_bytes:,} are wasted. {_REMEDY}\n  {command}"
    )


def _record(manifest: Manifest) -> Result:
    """Read what a manifest records, as plain values."""
    tensors = manifest.tensors
    upcast = []
    for fqn, record in tensors.items():
        if record.original_dtype != record.prepared_dtype:
            upcast.append(fqn)
    before = manifest.before.memory.parameter_bytes
    after = manifest.after.memory.parameter_bytes
    return {
        "kind": "manifest",
        **manifest.model_dump(mode="json", by_alias=True, include=_RECORDED),
        "tensors": dict(Counter(record.type for record in tensors.values())),
        "stored_in_another_dtype": upcast,
        "measured_added_bytes": after - before,
    }


def _recorded(record: Result) -> RenderableType:
    """Lay out what a manifest records."""
    from ..manifest.diff import of_whole

    rows = [["the manifest", "records"]]
    for name, value in of_whole(record)[""].items():
        rows.append([printable(name), shown(value)])
    return table(rows)
