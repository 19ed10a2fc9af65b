"""``kbitwrap doctor``: what a folder of a run is, and its faults that raise no error."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.padding import Padding

from .. import ConfigError
from ..reports import first_of
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    Result,
    checked_device,
    first_line,
    printable,
    say,
    show,
    show_json,
)
from .hub import NAMED_BY_ADAPTER, check_adapter, is_adapter, named_base, working
from .tables import table
from .usage import (
    BaseInTraining,
    Device,
    Json,
    QuantInTraining,
    TrustRemoteCode,
    given,
    path,
)

if TYPE_CHECKING:
    from .. import CheckpointReport, Manifest

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
    "that was interrupted. Each check made is printed: fine, "
    "fault, or not measured and why. No code in a file is run, but for that of BASE with --trust-remote-code.\n\n"
    "Of tensors that a preparation left in float32 it prints which they are, what they waste, and the command that "
    "gives them their dtypes back; of a manifest, kbitwrap's record of a run, which model was prepared, and how.\n\n"
    "Is a merged model what was trained? With --adapter every tensor of PATH is compared with the adapter and its "
    "base, whatever tool merged them: how much of what the adapter learned is there, what is wrong where it is not, "
    "and what of the base's files is missing. With --base and --quant alone, PATH is compared with the dequantized "
    "base: an engine that is sent adapters only needs that.\n\n"
    "Exit status: 0 no fault was found, 1 one was, 2 bad input."
)
_MOST_TENSORS = 5  # of a wrong merge, in its table
_MOST_NAMES = 2  # in a row
_SETTINGS = (
    "freeze",
    "gradient_checkpointing",
    "input_require_grads",
    "norm_modules",
    "keep_originals",
)


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            parser=path,
            help="The folder, a file of weights, or a manifest.",
        ),
    ],
    base: BaseInTraining = None,
    adapter: Annotated[
        Path | None,
        typer.Option(
            metavar="ADAPTER",
            parser=path,
            help="The folder of the adapter that was merged: how much of it PATH holds.",
        ),
    ] = None,
    quant: QuantInTraining = None,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json_: Json = False,
) -> int:
    """Examine, and print what was found. 1 if that was a fault, else 0.

    Raises:
        InputError: There is nothing to examine, or it is damaged.
    """
    if not os.path.exists(path):
        raise InputError(f"there is nothing at {str(path)!r}")
    if path.suffix == ".json":
        of_folders = given(base=base, adapter=adapter, quant=quant)
        if of_folders:
            raise InputError(
                f"{of_folders[0]}: PATH is a file, {str(path)!r}: give the folder that is compared"
            )
        return _tell_manifest(path, json_)
    if quant is not None and base is None and adapter is None:
        raise InputError(
            "--quant says how a base was quantized: give --adapter, or --base"
        )
    hint = ""
    if adapter is not None:
        check_adapter(adapter)
        is_alone = is_adapter(path) and not (path / "config.json").is_file()
        if is_alone or path.stem == "adapter_model":
            raise InputError(
                f"{str(path)!r} holds an adapter: with --adapter, PATH is the folder of the merged model"
            )
        if base is None:
            base, hint = named_base(adapter), NAMED_BY_ADAPTER
            if base is None:
                raise InputError(
                    f"the config of the adapter in {str(adapter)!r} names no base: give it (--base)"
                )
    with working(base, f"examining {path}", trust_remote_code, hint) as doing:
        from .. import KbitWrapError, doctor  # not before: they load torch
        from ..checkpoints.inspection import inspect_checkpoint
        from ..checkpoints.reader import has_weights, saved_manifest

        def tell(num_done: int, num_tensors: int) -> None:
            doing.now(f"measuring {path}: {num_done:,} of {num_tensors:,} tensors")

        try:
            report = doctor(
                path,
                base=base,
                adapter=adapter,
                quant=quant,
                device=checked_device(device),
                trust_remote_code=trust_remote_code,
                progress=tell,
            )
            manifest = saved_manifest(path)
        except (KbitWrapError, OSError) as error:
            raise InputError(first_line(error)) from error
        checkpoint = None
        # the report names what is damaged
        with contextlib.suppress(ConfigError):
            if has_weights(path) and path.stem != "adapter_model":
                checkpoint = inspect_checkpoint(path)

    result = report.to_dict()
    if checkpoint is not None:
        result["checkpoint"] = checkpoint.to_dict()
        if checkpoint:
            result["checkpoint"]["suggestion"] = _conversion(checkpoint)
    if manifest is not None:
        result["manifest"] = _record(manifest)
    if json_:
        show_json(result)
    else:
        parts = [] if report.merge is None else _merge(report.merge)
        parts += _describe(result)
        if checkpoint is not None:
            parts.append(_contents(result["checkpoint"]))
        if checkpoint:
            parts.append(_leftovers(result["checkpoint"]))
        if manifest is not None:
            parts.append(_describe_manifest(result["manifest"]))
        show(*parts)
    if hint:
        say(f"note: the base is {base!r}, which the config of the adapter names")
    return EXIT_NO if report else EXIT_DONE


# ----------------------------------------------------------------------------------------------------
# The examination.
# ----------------------------------------------------------------------------------------------------


def _merge(merge: Any) -> list[RenderableType]:
    """Lay out the verdict on a merge, and its worst tensors where it is none."""
    verdict = printable(str(merge))
    if not merge.faults:
        return [verdict]
    worst = sorted(merge.tensors.items(), key=lambda item: -item[1].error)
    rows = [["tensor", "kept", "error", "bits"]]
    for fqn, one in worst[:_MOST_TENSORS]:
        rows.append(
            [printable(fqn), f"{one.kept:.1%}", f"{one.error:.1%}", str(one.bits)]
        )
    kept = f"{merge.kept:.1%} of the delta is there, with an error of {merge.error:.1%} of it; the worst tensors:"
    return [verdict, kept, table(rows)]


def _describe(result: Result) -> list[RenderableType]:
    """Lay out the number of faults and of checks, what was not measured, the faults, and each check by its place."""
    num_faults = len(result["findings"])
    outcomes = [check["outcome"] for check in result["looked_at"]]
    num_open = outcomes.count("not measured")
    found = "no fault" if num_faults == 0 else _count(num_faults, "fault")
    checks = _count(len(outcomes) - num_open, "check")
    summary = f"{printable(result['subject'])}: {found} found in {checks}"
    if num_open:
        summary += f"; {num_open} not measured"
    open_ones = [f"not measured: {printable(text)}" for text in result["not_measured"]]
    parts: list[RenderableType] = [Group(summary, *open_ones)]
    for finding in result["findings"]:
        details = []
        for name in ("where", "evidence", "remedy"):
            details.append(_indented(f"{name}: {printable(finding[name])}"))
        parts.append(Group(printable(finding["what"]), *details))
    by_place: dict[str, list[Padding]] = {}
    for check in result["looked_at"]:
        line = f"{check['what']}: {check['outcome']}: {check['evidence']}"
        by_place.setdefault(check["where"], []).append(_indented(printable(line)))
    for where, lines in by_place.items():
        parts.append(Group(f"looked at in {printable(where)}:", *lines))
    return parts


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _indented(text: str) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)


# ----------------------------------------------------------------------------------------------------
# A checkpoint, and what was left in float32.
# ----------------------------------------------------------------------------------------------------


def _contents(checkpoint: Result) -> str:
    """Say in a sentence what the files of a checkpoint hold."""
    dtypes = []
    for name, row in checkpoint["dtypes"].items():
        dtypes.append(f"{row['count']} {name} ({row['bytes']:,} bytes)")
    quantized = "quantized" if checkpoint["is_quantized"] else "not quantized"
    return (
        f"{printable(str(checkpoint['path']))}: {checkpoint['num_tensors']} tensors, "
        f"{checkpoint['num_bytes']:,} bytes, {quantized}: {', '.join(dtypes)}; "
        f"config dtype: {checkpoint['config_dtype'] or 'not named'}"
    )


def _conversion(checkpoint: CheckpointReport) -> str:
    """Write the command that gives a checkpoint its dtypes back."""
    convert = f"kbitwrap convert --from {shlex.quote(str(checkpoint.path))} --out DST"
    if checkpoint.half_dtype is None:
        return f"{convert} --like ORIGINAL"
    return f"{convert} --dtype {checkpoint.half_dtype}"


def _leftovers(checkpoint: Result) -> RenderableType:
    """Say which tensors a preparation left in float32, and the command that gives them their dtypes back."""
    names = list(checkpoint["leftovers"])
    return Group(
        f"left in float32: {_count(len(names), 'tensor')}: {_some(names)}",
        f"{checkpoint['wasted_bytes']:,} bytes of {checkpoint['num_bytes']:,} are wasted: a preparation upcast these, "
        "and the model was saved before it was undone. To get the original dtypes back:",
        _indented(checkpoint["suggestion"]),
        "or with --manifest M or --like ORIGINAL, which know each tensor's dtype.",
    )


def _some(names: list[str]) -> str:
    """Name the first of many names, and count the others."""
    return first_of([printable(name) for name in names], _MOST_NAMES)


# ----------------------------------------------------------------------------------------------------
# A manifest.
# ----------------------------------------------------------------------------------------------------


def _tell_manifest(path: Path, as_json: bool) -> int:
    """Print what a manifest records."""
    from .. import Manifest, ManifestError

    try:
        result = _record(Manifest.load(path))
    except (ManifestError, OSError) as error:
        raise InputError(first_line(error)) from error
    if as_json:
        show_json(result)
    else:
        show(_describe_manifest(result))
    return EXIT_DONE


def _record(manifest: Manifest) -> Result:
    """Read what a manifest records, as plain values."""
    tensors = manifest.tensors
    upcast = []
    for fqn, record in tensors.items():
        if record.original_dtype != record.prepared_dtype:
            upcast.append(fqn)
    parts = {"created", "versions", "model", "config", "adapters", "plan"}
    before = manifest.before.memory.parameter_bytes
    after = manifest.after.memory.parameter_bytes
    return {
        "kind": "manifest",
        **manifest.model_dump(mode="json", by_alias=True, include=parts),
        "tensors": dict(Counter(record.type for record in tensors.values())),
        "stored_in_another_dtype": upcast,
        "measured_added_bytes": after - before,
    }


def _describe_manifest(result: Result) -> RenderableType:
    model = result["model"]
    config = result["config"]
    adapters = []
    for name, record in result["adapters"].items():
        adapters.append(f"{name} ({', '.join(record['dtypes'])})")
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    tensors = [f"{count} {kind}" for kind, count in result["tensors"].items()]
    planned = result["plan"]["added_bytes"]
    measured = result["measured_added_bytes"]
    name = model["name_or_path"] or "no name"
    described = {
        "the manifest": "records",
        "model": f"{model['class']} ({name}), {model['dtype'] or 'no dtype'}",
        "quantization": model["quantization"]["method"] or "none",
        "precision": config["precision"],
        "settings": ", ".join(f"{name}={config[name]}" for name in _SETTINGS),
        "adapters": _some(adapters) or "none",
        "created": result["created"],
        "versions": ", ".join(versions),
        "tensors": ", ".join(tensors) or "none",
        "stored upcast": _some(result["stored_in_another_dtype"]) or "none",
        "added bytes": f"{planned:,} planned, {measured:,} measured",
    }
    return table(list(described.items()))
