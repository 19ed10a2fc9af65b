"""``kbitwrap convert``: a checkpoint that was saved while prepared, written with its original dtypes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import ExportReport, ManifestMismatchError
from .console import (
    EXIT_DONE,
    EXIT_NO,
    Doing,
    first_line,
    say,
    show_result,
    with_options,
    working,
)
from .usage import (
    HalfDtype,
    Json,
    MaxShardSize,
    Out,
    Overwrite,
    expect_one_at_most,
)

SUMMARY = (
    "Rewrite a checkpoint that was saved while prepared, with its original dtypes."
)
HELP = (
    "Rewrite a checkpoint that was saved while prepared, with its original dtypes.\n\n"
    "A checkpoint that was saved while prepared is float32 where the model was 16-bit; 'kbitwrap doctor' says whether "
    "one is. It is read and written one tensor at a time. The dtypes come from --manifest, --like or --dtype, or from "
    "the config of SRC.\n\n"
    "Exit status: 0 written, 1 the checkpoint is not of the manifest's model, 2 bad usage, bad input, or it cannot be "
    "written; unless it is 0, nothing is left at DST."
)


def command(
    source: Annotated[
        Path,
        typer.Option(
            "--from",
            metavar="SRC",
            help="A folder with safetensors files or pytorch_model.bin, or one such file.",
        ),
    ],
    out: Out,
    overwrite: Overwrite = False,
    manifest: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take the original dtypes from this manifest.",
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="REFERENCE",
            help="... from this checkpoint of the original model, or from its config.json.",
        ),
    ] = None,
    dtype: Annotated[
        HalfDtype | None,
        typer.Option(
            metavar="DTYPE",
            help="... from the model loaded in this dtype, bfloat16 or float16; if left out, the one that the config "
            "of SRC names.",
        ),
    ] = None,
    max_shard_size: MaxShardSize = None,
    json_: Json = False,
) -> int:
    """Convert, and print what was written.

    Raises:
        InputError: There is no usable checkpoint, manifest or destination.
    """
    expect_one_at_most(manifest=manifest, like=like, dtype=dtype)

    def convert(doing: Doing) -> ExportReport:
        from .. import convert_checkpoint

        return convert_checkpoint(
            source,
            out,
            manifest,
            like=like,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            progress=doing.written,
        )

    return write(convert, f"converting {source}", json_)


def write(
    call: Callable[[Doing], Any],
    what: str,
    as_json: bool,
    trust_remote_code: bool = False,
) -> int:
    """Write a checkpoint, or compare merges, and print the report.

    Args:
        call: Does it, and says how far it is on the line of progress.
        what: What is being done, in a few words.
        as_json: Print it as JSON.
        trust_remote_code: As for `working`.

    Returns:
        0 if it was written, 1 if what was read is not what the manifest records.

    Raises:
        InputError: There is nothing usable to read, or the destination cannot be
            written.
    """
    try:
        with working(what, trust_remote_code) as doing:
            report = call(doing)
    except ManifestMismatchError as error:
        say(first_line(error))
        result = {
            "matches": False,
            "unexpected": error.unexpected,
            "different": error.different,
        }
        show_result(result, [], as_json)
        return EXIT_NO
    show_result(report.to_dict(), [str(report)], as_json)
    for note in report.notes:
        say(f"note: {with_options(note)}")
    return EXIT_DONE
