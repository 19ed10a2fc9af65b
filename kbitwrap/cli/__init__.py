"""The command line: ``kbitwrap COMMAND``.

Each command is a module with ``add_parser(subparsers)`` and ``run(arguments) -> int``. Its heavy imports happen inside
``run``, so that ``--help`` does not wait for them.

Exit status: 0 done, 1 the answer is no, 2 bad usage or bad input; of ``run``, the script's.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

from . import bench, convert, demo, doctor, inspect, merge, plan, run
from .console import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, InputError

_COMMANDS = (demo, plan, inspect, doctor, merge, convert, bench, run)


class _Parser(argparse.ArgumentParser):
    """A parser whose error is one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message} (see '{self.prog} --help')\n")


class _PrintVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        try:
            found = version("kbitwrap")
        except PackageNotFoundError:
            found = "(not installed, run from its source)"
        print(f"kbitwrap {found}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line.

    Returns:
        The parser; a parsed command leaves its ``run`` in the namespace.
    """
    parser = _Parser(prog="kbitwrap", description="Reversible preparation of quantized models for training.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; ``None`` takes the process's.

    Returns:
        The exit status: 0 done, 1 the answer is no, 2 bad input.

    Raises:
        SystemExit: From argparse: 0 after ``--help`` and ``--version``, 2 for bad usage. From the script of ``run``.

    Example:
        >>> from kbitwrap.cli import main
        >>> main(["demo", "--model", "/no/such/model"])
        2
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help(sys.stderr)
        return EXIT_BAD_INPUT
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
    except InputError as error:
        print(f"kbitwrap: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("kbitwrap: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go when Python flushes it at its exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return status
