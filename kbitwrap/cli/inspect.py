"""``kbitwrap inspect``: what a manifest records, or what a preparation left in a checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import ConfigError, ManifestError
from .console import EXIT_DONE, EXIT_NO, InputError, add_command, first_line, format_table, quiet_libraries

if TYPE_CHECKING:
    from .. import CheckpointReport, Manifest

_SHOWN = 2  # names in a row


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "inspect",
        run,
        summary="show what a manifest records, or find float32 tensors left in a checkpoint",
        description="Of a manifest: which model was prepared, and how. Of a checkpoint: the float32 tensors that a "
        "preparation left in a half-precision model, and how to get rid of them. Headers are read, no tensor, and "
        "nothing in a file is run. Exit status: 0 a manifest, or nothing is left over, 1 something is, 2 bad input.",
    )
    parser.add_argument("path", metavar="PATH", help="a manifest, a folder with a checkpoint, or one of its files")


def run(arguments: argparse.Namespace) -> int:
    """Inspect, and print what was found.

    Args:
        arguments: The parsed options.

    Returns:
        1 if a preparation left something in the checkpoint, else 0.

    Raises:
        InputError: It is neither a checkpoint nor a manifest.
    """
    from .. import Manifest, inspect_checkpoint

    path = Path(arguments.path)
    try:
        if os.path.isdir(path) or path.suffix == ".safetensors" or not os.path.exists(path):
            with quiet_libraries():
                report = inspect_checkpoint(path)
            result: dict[str, Any] = {"kind": "checkpoint", **report.to_dict(), "suggestion": _suggestion(report)}
            text = _describe_checkpoint(report)
            status = EXIT_NO if report else EXIT_DONE
        else:
            manifest = Manifest.load(path)
            result = {"kind": "manifest", **_summary(manifest)}
            text = _describe_manifest(manifest)
            status = EXIT_DONE
    except (ConfigError, ManifestError) as error:
        raise InputError(first_line(error)) from error
    print(json.dumps(result, indent=2) if arguments.json else text)
    return status


def _suggestion(report: CheckpointReport) -> str | None:
    if not report:
        return None
    how = f"--dtype {report.half_dtype}" if report.half_dtype else "--like ORIGINAL"
    return f"kbitwrap convert --from {shlex.quote(str(report.path))} --out DST {how}"


def _describe_checkpoint(report: CheckpointReport) -> str:
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
        return "\n".join([*lines, "no tensor was left in float32 by a preparation"])
    rows = [("left in float32", "tensors", "wasted bytes", "names")]
    for kind, tensors in report.leftovers.items():
        rows.append((kind, str(len(tensors)), f"{sum(tensors.values()):,}", _some(tuple(tensors))))
    return "\n".join(
        [
            *lines,
            "",
            format_table(rows),
            "",
            f"{report.wasted_bytes:,} bytes are wasted: a preparation upcast these, and the model was saved before "
            "it was undone. To get the original dtypes back:",
            f"  {_suggestion(report)}",
            "or with --manifest M or --like ORIGINAL, which know each tensor's dtype.",
        ]
    )


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    # Names come from files of others, and may hold what moves a terminal's cursor.
    return ", ".join(name if name.isprintable() else ascii(name) for name in names[:_SHOWN]) + more


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


def _describe_manifest(manifest: Manifest) -> str:
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
    return format_table(rows)
