"""``kbitwrap inspect``: what a manifest records, or what a preparation left in a checkpoint."""

from __future__ import annotations

import json
import shlex
from collections import Counter
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
            metavar="PATH", parser=path, help="A manifest, a folder with a checkpoint, or one of its files."
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
            from .. import Manifest, inspect_checkpoint

            if path.is_dir() or path.suffix == ".safetensors":
                with quiet_libraries():
                    report = inspect_checkpoint(path)
                result: dict[str, Any] = {
                    "kind": "checkpoint",
                    **report.to_dict(),
                    "suggestion": _suggestion(report),
                    "note": _note(report),
                }
                parts = _describe_checkpoint(report)
                status = EXIT_NO if report else EXIT_DONE
            else:
                manifest = Manifest.load(path)
                result = {"kind": "manifest", **_summary(manifest)}
                parts = [_describe_manifest(manifest)]
                status = EXIT_DONE
    except (ConfigError, ManifestError) as error:
        raise InputError(first_line(error)) from error
    except OSError as error:  # a name that is too long for the system
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if json_:
        print(json.dumps(result, indent=2))
    else:
        show(*parts)
    return status


def _suggestion(report: CheckpointReport) -> str | None:
    if not report:
        return None
    how = f"--dtype {report.half_dtype}" if report.half_dtype else "--like ORIGINAL"
    return f"kbitwrap convert --from {shlex.quote(str(report.path))} --out DST {how}"


def _note(report: CheckpointReport) -> str | None:
    """Say that nothing can be told of a checkpoint that is float32 throughout; ``None`` of others."""
    if not (report.config_dtype == "float32" and report.dtypes.keys() == {"float32"}):
        return None
    return (
        "all of it is float32, as its config says: nothing tells a preparation from a model trained in float32; if the "
        f"original was half: kbitwrap convert --from {shlex.quote(str(report.path))} --out DST --dtype bfloat16"
    )


def _describe_checkpoint(report: CheckpointReport) -> list[Text]:
    dtypes = ", ".join(f"{row['count']} {name} ({row['bytes']:,} bytes)" for name, row in report.dtypes.items())
    quantized = "quantized" if report.is_quantized else "not quantized"
    lines = [
        f"{report.path}: {report.num_tensors} tensors, {report.num_bytes:,} bytes, {quantized}",
        f"stored: {dtypes}",
        f"config dtype: {report.config_dtype or 'not named'}",
    ]
    if report.adapters:
        lines.append(f"adapters: {_some(report.adapters)}")
    if report.use_cache is False:
        lines.append("use_cache is false in the config, as trainers leave it: generation is slower without the cache")
    if not report:
        lines.append(_note(report) or "no tensor was left in float32 by a preparation")
    parts = [joined(hanging(line, 2) for line in lines)]
    if report:
        rows = [("left in float32", "tensors", "wasted bytes", "names")]
        for kind, tensors in report.leftovers.items():
            rows.append((kind, str(len(tensors)), f"{sum(tensors.values()):,}", _some(tuple(tensors))))
        wasted = (
            f"{report.wasted_bytes:,} bytes are wasted: a preparation upcast these, and the model was saved before it "
            "was undone. To get the original dtypes back:"
        )
        other = "or with --manifest M or --like ORIGINAL, which know each tensor's dtype."
        parts += [table(rows), joined([hanging(wasted, 0), *_command_lines(_suggestion(report) or ""), other])]
    return parts


def _command_lines(command: str) -> list[str]:
    """A command as lines that a shell takes together; only a word that is longer than a line makes a longer one."""
    lines = [""]
    for word in shlex.split(command):
        word = shlex.quote(word)
        if len(lines[-1]) + len(word) + 5 > num_columns() and lines[-1].strip():
            lines.append("  ")
        lines[-1] += f" {word}"
    return [f" {line} \\" if n < len(lines) - 1 else f" {line}" for n, line in enumerate(lines)]


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(printable(name) for name in names[:_SHOWN]) + more


def _summary(manifest: Manifest) -> dict[str, Any]:
    """The lines that describe a manifest, without its tensors."""
    kinds = Counter(record.type for record in manifest.tensors.values())
    upcast = [fqn for fqn, record in manifest.tensors.items() if record.original_dtype != record.prepared_dtype]
    parts = {"created", "versions", "model", "config", "adapters", "plan"}
    data = manifest.model_dump(mode="json", by_alias=True, include=parts)
    before, after = manifest.before.memory.parameter_bytes, manifest.after.memory.parameter_bytes
    return {
        **data,
        "tensors": dict(kinds),
        "stored_in_another_dtype": upcast,
        "measured_added_bytes": after - before,
    }


def _describe_manifest(manifest: Manifest) -> Text:
    found = _summary(manifest)
    model, config = found["model"], found["config"]
    defaults = ("freeze", "gradient_checkpointing", "input_require_grads", "norm_modules", "keep_originals")
    settings = ", ".join(f"{name}={config[name]}" for name in defaults)
    adapters = tuple(f"{name} ({', '.join(record['dtypes'])})" for name, record in found["adapters"].items())
    rows = [
        ("prepared", "as"),
        ("model", f"{model['class']} ({model['name_or_path'] or 'no name'}), {model['dtype'] or 'no dtype'}"),
        ("quantization", model["quantization"]["method"] or "none"),
        ("precision", config["precision"]),
        ("settings", settings),
        ("adapters", _some(adapters) or "none"),
        ("created", found["created"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in found["versions"].items())),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in found["tensors"].items()) or "none"),
        ("stored upcast", _some(tuple(found["stored_in_another_dtype"])) or "none"),
        ("added bytes", f"{found['plan']['added_bytes']:,} planned, {found['measured_added_bytes']:,} measured"),
    ]
    return table(rows)
