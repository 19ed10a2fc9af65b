"""``kbitwrap doctor``: the faults of a run that raise no error."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .console import EXIT_DONE, EXIT_NO, InputError, add_command, first_line, quiet_libraries


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
    """
    parser = add_command(
        subparsers,
        "doctor",
        run,
        summary="look for faults of a saved run that raise no error",
        description="Look for what is wrong with a checkpoint, an adapter or a Trainer's output folder and raises no "
        "error: float32 left by a preparation, another base than the manifest's, adapters that are zero, not finite or "
        "of another dtype, layers and experts that were never quantized, tied weights that came apart, use_cache left "
        "off, idle devices, a merge into 4-bit weights, an optimizer that trained what was not saved. No code in a "
        "file is run. Exit status: 0 no fault was found, 1 one was, 2 bad input.",
    )
    parser.add_argument("path", metavar="PATH", help="the folder, or a file of weights")
    parser.add_argument(
        "--base", metavar="BASE", help="the base that was trained on, to compare with the manifest; it is loaded"
    )
    parser.add_argument(
        "--adapter", metavar="ADAPTER", help="the adapter that was merged: with --base, how much of it survived"
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine, and print what was found.

    Args:
        arguments: The parsed options.

    Returns:
        1 if a fault was found, else 0.

    Raises:
        InputError: There is nothing to examine, or it is damaged.
    """
    from .. import KbitWrapError, doctor  # not before: they load torch

    try:
        with quiet_libraries():
            report = doctor(arguments.path, base=arguments.base, adapter=arguments.adapter)
    except (KbitWrapError, OSError) as error:
        raise InputError(first_line(error)) from error
    result = report.to_dict()
    print(json.dumps(result, indent=2) if arguments.json else _describe(result))
    return EXIT_NO if report else EXIT_DONE


def _describe(result: dict[str, Any]) -> str:
    findings = result["findings"]
    lines = [f"{_printable(result['subject'])}: {len(findings) or 'no'} fault{'s' * (len(findings) != 1)} found"]
    for finding in findings:
        lines += ["", _printable(finding["what"])]
        lines += [f"  {name}: {_printable(finding[name])}" for name in ("where", "evidence", "remedy")]
    if result["not_measured"]:
        lines += ["", "not measured:", *(f"  {_printable(line)}" for line in result["not_measured"])]
    return "\n".join(lines)


def _printable(text: str) -> str:
    # Names come from files of others, and may hold what moves a terminal's cursor.
    return text if text.isprintable() else ascii(text)
