"""``kbitwrap inspect``: what a manifest records, or what a preparation left in a checkpoint."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .. import ConfigError, ManifestError
from .console import (
    EXIT_DONE,
    EXIT_NO,
    InputError,
    first_line,
    hanging,
    joined,
    num_columns,
    printable,
    progress,
    quiet_libraries,
    show,
)
from .tables import table
from .usage import Json, path

if TYPE_CHECKING:
    from .. import CheckpointReport, Manifest

SUMMARY = "Show what a manifest records, or find float32 tensors left in a checkpoint."
HELP = """Show what a manifest records, or find float32 tensors left in a checkpoint.

Of a manifest: which model was prepared, and how. Of a checkpoint: the float32 tensors that a preparation left in a
half-precision model, and how to get rid of them. Headers are read, no tensor, and nothing in a file is run.

Exit status: 0 a manifest, or nothing is left over, 1 something is, 2 bad input."""

_SHOWN = 2  # names in a row


def command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            parser=path,
            help="A manifest, a folder with a checkpoint, or one of its files.",
        ),
    ],
    json_: Json = False,
) -> int:
    """Inspect, and print what was found. 1 if a preparation left something in the checkpoint, else 0.

    Raises:
        InputError: It is neither a checkpoint nor a manifest.
    """
    try:
        if not path.exists():
            raise InputError(f"there is nothing at {str(path)!r}")
        with progress(f"reading {path}"):
            if path.is_dir() or path.suffix == ".safetensors":
                found = _inspect_checkpoint(path)
            else:
                found = _inspect_manifest(path)
    except (ConfigError, ManifestError) as error:
        raise InputError(first_line(error)) from error
    except OSError as error:  # a name that is too long for the system
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if json_:
        print(json.dumps(found.result, indent=2))
    else:
        show(*found.parts)
    return found.status


@dataclass(frozen=True)
class _Found:
    """What was found.

    Attributes:
        result: For ``--json``.
        parts: For ``show``.
        status: The exit status.
    """

    result: dict[str, Any]
    parts: list[Text]
    status: int


def _inspect_checkpoint(path: Path) -> _Found:
    from .. import inspect_checkpoint

    with quiet_libraries():
        report = inspect_checkpoint(path)
    result = {
        "kind": "checkpoint",
        **report.to_dict(),
        "suggestion": _suggestion(report),
        "note": _note(report),
    }
    return _Found(
        result, _describe_checkpoint(report), EXIT_NO if report else EXIT_DONE
    )


def _inspect_manifest(path: Path) -> _Found:
    from .. import Manifest

    summary = _summary(Manifest.load(path))
    return _Found(
        {"kind": "manifest", **summary}, [_describe_manifest(summary)], EXIT_DONE
    )


def _suggestion(report: CheckpointReport) -> str | None:
    if not report:
        return None
    how = f"--dtype {report.half_dtype}" if report.half_dtype else "--like ORIGINAL"
    return f"kbitwrap convert --from {shlex.quote(str(report.path))} --out DST {how}"


def _note(report: CheckpointReport) -> str | None:
    """Say that nothing can be told of a checkpoint that is float32 throughout; ``None`` of others."""
    is_float32_throughout = (
        report.config_dtype == "float32" and report.dtypes.keys() == {"float32"}
    )
    if not is_float32_throughout:
        return None
    return (
        "all of it is float32, as its config says: nothing tells a preparation from a model trained in float32; if the "
        f"original was half: kbitwrap convert --from {shlex.quote(str(report.path))} --out DST --dtype bfloat16"
    )


def _describe_checkpoint(report: CheckpointReport) -> list[Text]:
    dtypes = [
        f"{row['count']} {name} ({row['bytes']:,} bytes)"
        for name, row in report.dtypes.items()
    ]
    quantized = "quantized" if report.is_quantized else "not quantized"
    lines = [
        f"{report.path}: {report.num_tensors} tensors, {report.num_bytes:,} bytes, {quantized}",
        f"stored: {', '.join(dtypes)}",
        f"config dtype: {report.config_dtype or 'not named'}",
    ]
    if report.adapters:
        lines.append(f"adapters: {_some(report.adapters)}")
    if report.use_cache is False:
        lines.append(
            "use_cache is false in the config, as trainers leave it: generation is slower without the cache"
        )
    if not report:
        lines.append(_note(report) or "no tensor was left in float32 by a preparation")
    parts = [joined(hanging(line, 2) for line in lines)]
    if report:
        parts += [_leftovers(report), _remedy(report)]
    return parts


def _leftovers(report: CheckpointReport) -> Text:
    rows = [("left in float32", "tensors", "wasted bytes", "names")]
    for kind, tensors in report.leftovers.items():
        wasted_bytes = sum(tensors.values())
        rows.append(
            (kind, str(len(tensors)), f"{wasted_bytes:,}", _some(tuple(tensors)))
        )
    return table(rows)


def _remedy(report: CheckpointReport) -> Text:
    wasted = (
        f"{report.wasted_bytes:,} bytes are wasted: a preparation upcast these, and the model was saved before it "
        "was undone. To get the original dtypes back:"
    )
    command = _command_lines(_suggestion(report) or "")
    other = "or with --manifest M or --like ORIGINAL, which know each tensor's dtype."
    return joined([hanging(wasted, 0), *command, other])


def _command_lines(command: str) -> list[str]:
    """A command as lines that a shell takes together; only a word that is longer than a line makes a longer one."""
    lines = [""]
    for word in shlex.split(command):
        word = shlex.quote(word)
        is_full = len(lines[-1]) + len(word) + 5 > num_columns()
        if is_full and lines[-1].strip():
            lines.append("  ")
        lines[-1] += f" {word}"
    *continued, last = lines
    return [*(f" {line} \\" for line in continued), f" {last}"]


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    num_more = len(names) - _SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown


def _summary(manifest: Manifest) -> dict[str, Any]:
    """The lines that describe a manifest, without its tensors."""
    kinds = Counter(record.type for record in manifest.tensors.values())
    upcast = [
        fqn
        for fqn, record in manifest.tensors.items()
        if record.original_dtype != record.prepared_dtype
    ]
    parts = {"created", "versions", "model", "config", "adapters", "plan"}
    data = manifest.model_dump(mode="json", by_alias=True, include=parts)
    before = manifest.before.memory.parameter_bytes
    after = manifest.after.memory.parameter_bytes
    return {
        **data,
        "tensors": dict(kinds),
        "stored_in_another_dtype": upcast,
        "measured_added_bytes": after - before,
    }


def _describe_manifest(summary: dict[str, Any]) -> Text:
    model = summary["model"]
    config = summary["config"]
    defaults = (
        "freeze",
        "gradient_checkpointing",
        "input_require_grads",
        "norm_modules",
        "keep_originals",
    )
    settings = [f"{name}={config[name]}" for name in defaults]
    adapters = tuple(
        f"{name} ({', '.join(record['dtypes'])})"
        for name, record in summary["adapters"].items()
    )
    versions = [f"{name} {version}" for name, version in summary["versions"].items()]
    tensors = [f"{count} {kind}" for kind, count in summary["tensors"].items()]
    upcast = tuple(summary["stored_in_another_dtype"])
    planned = summary["plan"]["added_bytes"]
    measured = summary["measured_added_bytes"]
    rows = [
        ("prepared", "as"),
        (
            "model",
            f"{model['class']} ({model['name_or_path'] or 'no name'}), {model['dtype'] or 'no dtype'}",
        ),
        ("quantization", model["quantization"]["method"] or "none"),
        ("precision", config["precision"]),
        ("settings", ", ".join(settings)),
        ("adapters", _some(adapters) or "none"),
        ("created", summary["created"]),
        ("versions", ", ".join(versions)),
        ("tensors", ", ".join(tensors) or "none"),
        ("stored upcast", _some(upcast) or "none"),
        ("added bytes", f"{planned:,} planned, {measured:,} measured"),
    ]
    return table(rows)
