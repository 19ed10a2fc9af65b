"""``kbitwrap convert``: a checkpoint that was saved while prepared, written with its original dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from .. import (
    ConfigError,
    ExportError,
    ExportReport,
    ManifestError,
    ManifestMismatchError,
    UnsupportedModelError,
)
from .console import (
    EXIT_DONE,
    EXIT_NO,
    Doing,
    InputError,
    check_folder,
    first_line,
    hanging,
    quiet_libraries,
    say,
    show,
    show_json,
)
from .usage import (
    HALF_DTYPES,
    Json,
    Out,
    Overwrite,
    at_most_one,
    choice,
    file_size,
    path,
    value,
)

OLD_NAME = "export"
SUMMARY = (
    "Rewrite a checkpoint that was saved while prepared, with its original dtypes."
)
HELP = """Rewrite a checkpoint that was saved while prepared, with its original dtypes.

A checkpoint that was saved while prepared is float32 where the model was half; 'kbitwrap inspect' says whether one is.
It is read and written one tensor at a time. The dtypes come from --manifest, --like or --dtype, or from the config of
SRC.

Exit status: 0 written, 1 the checkpoint is not of the manifest's model, 2 bad usage, bad input, or it cannot be
written; unless it is 0, nothing is left at DST."""


_Source = Annotated[
    Path,
    value(
        "--from",
        "SRC",
        path,
        "A folder with safetensors files or pytorch_model.bin, or one such file.",
    ),
]
_Manifest = Annotated[
    Path | None,
    value("--manifest", "FILE", path, "Take the original dtypes from this manifest."),
]
_Like = Annotated[
    Path | None,
    value(
        "--like",
        "REFERENCE",
        path,
        "... from this checkpoint of the original model, or from its config.json.",
    ),
]
_Dtype = Annotated[
    str | None,
    choice(
        "--dtype",
        HALF_DTYPES,
        "... from the model loaded in this dtype; the one that the config of SRC names, if left out.",
    ),
]
_MaxShardSize = Annotated[
    int | None,
    value(
        "--max-shard-size",
        "SIZE",
        file_size,
        "The maximum size of a file, such as 5GB; the files of SRC are kept, if left out.",
    ),
]


def command(
    context: typer.Context,
    source: _Source,
    out: Out,
    overwrite: Overwrite = False,
    manifest: _Manifest = None,
    like: _Like = None,
    dtype: _Dtype = None,
    max_shard_size: _MaxShardSize = None,
    json_: Json = False,
) -> int:
    """Convert, and print what was written.

    Raises:
        InputError: There is no usable checkpoint, manifest or destination.
    """
    at_most_one(context, manifest=manifest, like=like, dtype=dtype)
    if context.info_name == OLD_NAME:
        say("'kbitwrap export' is called 'kbitwrap convert' now")
    check_folder(out, overwrite=overwrite)

    def convert(written: Callable[[int], None]) -> ExportReport:
        from .. import convert_checkpoint

        return convert_checkpoint(
            source,
            out,
            manifest,
            like=like,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=written,
        )

    return write(convert, f"converting {source}", as_json=json_)


def write(
    call: Callable[[Callable[[int], None]], ExportReport], doing: str, *, as_json: bool
) -> int:
    """Write a checkpoint, and print what was written.

    Args:
        call: Writes it, and calls what it is given with each number of bytes written.
        doing: What it does, in a few words.
        as_json: Print it as JSON.

    Returns:
        0 if it was written, 1 if what was read is not what the manifest records.

    Raises:
        InputError: There is nothing usable to read, or the destination cannot be
            written.
    """
    try:
        with Doing(doing) as line, quiet_libraries():
            report = call(line.written)
    except ManifestMismatchError as error:
        say(first_line(error))
        if as_json:
            result = {
                "matches": False,
                "unexpected": error.unexpected,
                "different": error.different,
            }
            show_json(result)
        return EXIT_NO
    except (ConfigError, ExportError, ManifestError, UnsupportedModelError) as error:
        raise InputError(first_line(error)) from error
    if as_json:
        show_json(report.to_dict())
    else:
        show(hanging(str(report), 2))
    return EXIT_DONE
