"""``kbitwrap convert``: a checkpoint that was saved while prepared, written with its original dtypes."""

from __future__ import annotations

import argparse
import sys

from .console import add_command, add_destination, write


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "convert",
        run,
        aliases=("export",),
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
    add_destination(parser)
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

    if arguments.command == "export":
        print("kbitwrap: 'kbitwrap export' is called 'kbitwrap convert' now", file=sys.stderr)
    return write(
        arguments,
        lambda: convert_checkpoint(
            arguments.source,
            arguments.out,
            arguments.manifest,
            like=arguments.like,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            overwrite=arguments.overwrite,
            progress=True,
        ),
    )
