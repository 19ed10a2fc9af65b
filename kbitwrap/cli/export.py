"""``kbitwrap export``: a checkpoint that was saved while prepared, written with its original dtypes."""

from __future__ import annotations

import argparse
import json
import sys

from .. import ConfigError, ExportError, ManifestError, ManifestMismatchError
from .console import EXIT_DONE, EXIT_NO, InputError, add_command, first_line, quiet_libraries


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "export",
        run,
        summary="rewrite a checkpoint that was saved while prepared, with its original dtypes",
        description="Read a checkpoint that was saved while prepared (float32 where the model was half) and write it "
        "with its original dtypes, one tensor at a time. 'kbitwrap inspect' says whether one needs it. Exit status: "
        "0 written, 1 the checkpoint is not of the manifest's model, 2 bad usage, bad input, or it cannot be written; "
        "unless it is 0, nothing is left at DST.",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="SRC",
        required=True,
        help="a folder with safetensors files or pytorch_model.bin, or one such file",
    )
    parser.add_argument("--out", metavar="DST", required=True, type=_folder, help="the folder to make")
    dtypes = parser.add_mutually_exclusive_group()
    dtypes.add_argument("--manifest", metavar="M", help="take the original dtypes from this manifest")
    dtypes.add_argument(
        "--like", metavar="REFERENCE", help="... from this checkpoint of the original model, or from its config.json"
    )
    dtypes.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        help="... from the model loaded in this dtype (default: the dtype that the config of SRC names)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="maximum size of a file, such as 5GB (default: keep the files of SRC)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists and contains no folders")


def run(arguments: argparse.Namespace) -> int:
    """Convert, and print what was written.

    Args:
        arguments: The parsed options.

    Returns:
        0 if it was written, 1 if the checkpoint does not match the manifest.

    Raises:
        InputError: There is no usable checkpoint, manifest or destination.
    """
    from .. import convert_checkpoint

    try:
        with quiet_libraries():
            report = convert_checkpoint(
                arguments.source,
                arguments.out,
                arguments.manifest,
                like=arguments.like,
                dtype=arguments.dtype,
                max_shard_size=arguments.max_shard_size,
                overwrite=arguments.overwrite,
                progress=True,
            )
    except ManifestMismatchError as error:
        print(f"kbitwrap: {first_line(error)}", file=sys.stderr)
        if arguments.json:
            result = {"matches": False, "unexpected": error.unexpected, "different": error.different}
            print(json.dumps(result, indent=2, default=str))
        return EXIT_NO
    except (ConfigError, ExportError, ManifestError) as error:
        raise InputError(first_line(error)) from error
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report)
    return EXIT_DONE


def _folder(text: str) -> str:
    # The empty path is the working directory, which nobody means to replace.
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, found nothing")
    return text
