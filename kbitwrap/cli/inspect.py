"""``kbitwrap inspect``: what a manifest records, or what a preparation left in a checkpoint."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated

from rich.console import Group

from .. import ConfigError, ManifestError
from .console import (
    EXIT_DONE,
    EXIT_NO,
    Doing,
    InputError,
    Result,
    first_line,
    hanging,
    num_columns,
    printable,
    quiet_libraries,
    show,
    show_json,
)
from .tables import table
from .usage import Json, argument, path

SUMMARY = "Show what a manifest records, or find float32 tensors left in a checkpoint."
HELP = """Show what a manifest records, or find float32 tensors left in a checkpoint.

  kbitwrap inspect out/checkpoint-500
  kbitwrap inspect run/kbitwrap.json

Of a checkpoint it lists the float32 tensors that a preparation left in a half-precision model, and says how to get rid
of them. A manifest is kbitwrap's record of a run; of it, the command shows which model was prepared, and how. Only
headers are read, and no code in a file is run.

Exit status: 0 a manifest, or nothing is left over, 1 something is, 2 bad input."""

_SHOWN = 2  # names in a row
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
        argument(
            "PATH", path, "A manifest, a folder with a checkpoint, or one of its files."
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
        with Doing(f"reading {path}"):
            is_checkpoint = path.is_dir() or path.suffix == ".safetensors"
            result = _of_checkpoint(path) if is_checkpoint else _of_manifest(path)
    except (ConfigError, ManifestError) as error:
        raise InputError(first_line(error)) from error
    except OSError as error:  # a name that is too long for the system
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from error
    if json_:
        show_json(result)
    elif is_checkpoint:
        show(*_describe_checkpoint(result))
    else:
        show(_describe_manifest(result))
    return EXIT_NO if is_checkpoint and result["leftovers"] else EXIT_DONE


# ----------------------------------------------------------------------------------------------------
# A checkpoint.
# ----------------------------------------------------------------------------------------------------


def _of_checkpoint(path: Path) -> Result:
    from .. import inspect_checkpoint

    with quiet_libraries():
        report = inspect_checkpoint(path)
    convert = f"kbitwrap convert --from {shlex.quote(str(report.path))} --out DST"
    suggestion = note = None
    if report:
        how = f"--dtype {report.half_dtype}" if report.half_dtype else "--like ORIGINAL"
        suggestion = f"{convert} {how}"
    elif report.config_dtype == "float32" and report.dtypes.keys() == {"float32"}:
        note = (
            "all of it is float32, as its config says: nothing tells a preparation from a model trained in float32; if "
            f"the original was half: {convert} --dtype bfloat16"
        )
    return {
        "kind": "checkpoint",
        **report.to_dict(),
        "suggestion": suggestion,
        "note": note,
    }


def _describe_checkpoint(result: Result) -> list[Group]:
    dtypes = [
        f"{row['count']} {name} ({row['bytes']:,} bytes)"
        for name, row in result["dtypes"].items()
    ]
    quantized = "quantized" if result["is_quantized"] else "not quantized"
    lines = [
        f"{result['path']}: {result['num_tensors']} tensors, {result['num_bytes']:,} bytes, {quantized}",
        f"stored: {', '.join(dtypes)}",
        f"config dtype: {result['config_dtype'] or 'not named'}",
    ]
    if result["adapters"]:
        lines.append(f"adapters: {_some(result['adapters'])}")
    if result["use_cache"] is False:
        lines.append(
            "use_cache is false in the config, as trainers leave it: generation is slower without the cache"
        )
    leftovers = result["leftovers"]
    if not leftovers:
        lines.append(result["note"] or "no tensor was left in float32 by a preparation")
    parts = [Group(*(hanging(line, 2) for line in lines))]
    if leftovers:
        parts += [_leftovers(leftovers), _remedy(result)]
    return parts


def _leftovers(leftovers: dict[str, dict[str, int]]) -> Group:
    rows = [["left in float32", "tensors", "wasted bytes", "names"]]
    for kind, tensors in leftovers.items():
        wasted = f"{sum(tensors.values()):,}"
        rows.append(
            [
                kind,
                str(len(tensors)),
                wasted,
                _some(list(tensors)),
            ]
        )
    return table(rows)


def _remedy(result: Result) -> Group:
    wasted = (
        f"{result['wasted_bytes']:,} bytes are wasted: a preparation upcast these, and the model was saved before it "
        "was undone. To get the original dtypes back:"
    )
    command = _command_lines(result["suggestion"])
    other = "or with --manifest M or --like ORIGINAL, which know each tensor's dtype."
    return Group(wasted, *command, other)


def _command_lines(command: str) -> list[str]:
    """Lay a command out as lines that a shell takes together.

    Args:
        command: The command, in one line.

    Returns:
        The lines. Only a word that is longer than a line makes a longer one.
    """
    lines = [""]
    for word in shlex.split(command):
        word = shlex.quote(word)
        is_full = len(lines[-1]) + len(word) + 5 > num_columns()
        if is_full and lines[-1].strip():
            lines.append("  ")
        lines[-1] += f" {word}"
    *continued, last = lines
    return [*(f" {line} \\" for line in continued), f" {last}"]


def _some(names: list[str]) -> str:
    """Name the first of many names, and count the others.

    Args:
        names: The names.

    Returns:
        The text; empty where there is no name.
    """
    shown = ", ".join(printable(name) for name in names[:_SHOWN])
    num_more = len(names) - _SHOWN
    return f"{shown} and {num_more} more" if num_more > 0 else shown


# ----------------------------------------------------------------------------------------------------
# A manifest.
# ----------------------------------------------------------------------------------------------------


def _of_manifest(path: Path) -> Result:
    from .. import Manifest

    manifest = Manifest.load(path)
    tensors = manifest.tensors
    upcast = [
        fqn
        for fqn, record in tensors.items()
        if record.original_dtype != record.prepared_dtype
    ]
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


def _describe_manifest(result: Result) -> Group:
    model = result["model"]
    name = f"({model['name_or_path'] or 'no name'})"
    config = result["config"]
    adapters = [
        f"{name} ({', '.join(record['dtypes'])})"
        for name, record in result["adapters"].items()
    ]
    versions = [f"{name} {version}" for name, version in result["versions"].items()]
    tensors = [f"{count} {kind}" for kind, count in result["tensors"].items()]
    planned = result["plan"]["added_bytes"]
    measured = result["measured_added_bytes"]
    described = {
        "prepared": "as",
        "model": f"{model['class']} {name}, {model['dtype'] or 'no dtype'}",
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
