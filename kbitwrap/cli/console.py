"""Shared by the commands: exit statuses, checks, tables, and quiet libraries."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import ConfigError, ExportError, ExportReport, ManifestError, ManifestMismatchError, UnsupportedModelError

EXIT_DONE = 0
EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
EXIT_BROKEN_PIPE = 141  # as it reports one that SIGPIPE ended


class InputError(Exception):
    """The user's input cannot be used. The message is one line and is all that the user sees."""


def add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    aliases: Sequence[str] = (),
) -> argparse.ArgumentParser:
    """Add a command that prints a result, as text or with ``--json`` as one object.

    Args:
        subparsers: What ``ArgumentParser.add_subparsers`` returned.
        name: The command.
        run: Runs it on the parsed options, and returns the exit status.
        summary: What it does, in half a line.
        description: What it does, and what its exit statuses mean.
        aliases: Other names of the command.

    Returns:
        Its parser, for its own options.
    """
    parser = subparsers.add_parser(name, help=summary, description=description, aliases=aliases)
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of text")
    parser.set_defaults(run=run)
    return parser


def add_destination(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a checkpoint is written.

    Args:
        parser: The parser of a command that writes one.
    """
    parser.add_argument("--out", metavar="DST", required=True, type=_folder, help="the folder to make")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it exists and contains no folders")


def _folder(text: str) -> str:
    # The empty path is the working directory, which nobody means to replace.
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, found nothing")
    return text


def write(arguments: argparse.Namespace, call: Callable[[], ExportReport]) -> int:
    """Write a checkpoint, and print what was written.

    Args:
        arguments: The parsed options.
        call: Writes it.

    Returns:
        0 if it was written, 1 if what was read is not what the manifest records.

    Raises:
        InputError: There is nothing usable to read, or the destination cannot be written.
    """
    try:
        with quiet_libraries():
            report = call()
    except ManifestMismatchError as error:
        print(f"kbitwrap: {first_line(error)}", file=sys.stderr)
        if arguments.json:
            result = {"matches": False, "unexpected": error.unexpected, "different": error.different}
            print(json.dumps(result, indent=2, default=str))
        return EXIT_NO
    except (ConfigError, ExportError, ManifestError, UnsupportedModelError) as error:
        raise InputError(first_line(error)) from error
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else report)
    return EXIT_DONE


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that says something, for a message that has to fit in one.

    Args:
        error: The exception.

    Returns:
        The line, or the exception's class name where there is no message.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: What must hold.
        measured: What was found.
        passed: Whether it holds.
    """

    name: str
    measured: str
    passed: bool

    def to_dict(self) -> dict[str, Any]:
        """The check as plain values, ready for JSON."""
        return asdict(self)


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Lay rows out in left-aligned columns, a rule under the first row.

    Args:
        rows: The header and the rows, of equal lengths.

    Returns:
        The table, without a line break at its end.

    Example:
        >>> print(format_table([("check", "result"), ("loss", "pass")]))
        check  result
        -----  ------
        loss   pass
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence what transformers, PEFT and bitsandbytes say that is not the user's concern; put it back afterwards."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    bitsandbytes_logger = logging.getLogger("bitsandbytes")
    level = bitsandbytes_logger.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # One line a layer: on int8 layers, that bfloat16 inputs are cast to float16. There is no other way for them.
    bitsandbytes_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # PEFT calls it by the name that transformers deprecates; neither is the user's code.
            warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
            # True of every merge into a quantized layer, and what the command is there to show.
            warnings.filterwarnings("ignore", r"Merge lora module to [48]-bit linear", UserWarning)
            # Older bitsandbytes say through `warnings` what newer ones log.
            warnings.filterwarnings("ignore", r"MatMul8bitLt: inputs will be cast", UserWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
        bitsandbytes_logger.setLevel(level)
