"""The command line: ``kbitwrap COMMAND``.

Each command is a function that Typer calls with what was typed; it returns the exit
status. Whatever needs torch is imported in functions, after all that was typed has been
looked at, so that neither help nor a usage error waits for it.

Exit status: 0 done, 1 the answer is no, 2 bad usage or bad input; of ``run``, the
script's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from . import convert, demo, doctor, merge, plan, run, stamp
from .console import EXIT_BAD_INPUT, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, InputError
from .usage import UsageError, line, with_option_repeated
from .ways import WAYS

PROGRAM = "kbitwrap"
HELP = """Plan, prepare, merge and check fine-tunes of quantized models (QLoRA).

kbitwrap plan MODEL --step --budget 7GiB  # will it fit?
kbitwrap merge ADAPTER --out DIR
kbitwrap doctor DIR  # is something wrong with the merge?
kbitwrap demo        # PEFT's way and ours, on a CPU

'kbitwrap COMMAND --help' says more of each."""
_COMPLETION = "_KBITWRAP_COMPLETE"  # by which a shell asks for words
_COMMANDS = (demo, plan, doctor, merge, stamp, convert, run)
# Commands of earlier versions, and what takes their place.
_GONE = {
    "bench": "its figures are measured in a checkout of the repository, by python docs/figures benchmarks",
    "export": "'kbitwrap convert' does what it did",
    "inspect": "'kbitwrap doctor PATH' says what it said",
}


def _print_version(is_asked: bool) -> None:
    """Look the version up only when it is asked for."""
    if is_asked:
        print(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """The options of the program itself."""


def build_command() -> Any:
    """Build the whole command line.

    Returns:
        The command that Typer makes of it.
    """
    names = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(
        context_settings=names, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback(help=HELP)(_options)
    for module in _COMMANDS:
        app.command(
            module.__name__.rpartition(".")[2],
            help=module.HELP,
            short_help=module.SUMMARY,
            context_settings={**names, **getattr(module, "SETTINGS", {})},
        )(module.command)
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments without the program's name; ``None`` takes the process's.

    Returns:
        The exit status: 0 done, 1 the answer is no, 2 bad usage or bad input.

    Raises:
        SystemExit: From the script of ``run``.

    Example:
        >>> from kbitwrap.cli import main
        >>> main(["plan", "/no/such/model"])
        2
    """
    arguments = [*(sys.argv[1:] if argv is None else argv)]
    if argv is None and _COMPLETION in os.environ:
        build_command().main(arguments, prog_name=PROGRAM)
    try:
        status = _answer(arguments)
        sys.stdout.flush()
    except UsageError as error:
        print(line(error), file=sys.stderr)
        return EXIT_BAD_INPUT
    except InputError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer has nowhere to go when Python flushes it at its
        # exit.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return status


def _answer(arguments: list[str]) -> int:
    """Run what was typed, and return its exit status; nothing typed gets the help, and is bad usage."""
    if not arguments:
        with contextlib.redirect_stdout(sys.stderr):
            _answer(["--help"])
        return EXIT_BAD_INPUT
    first = arguments[0]
    if first in _GONE:
        raise InputError(f"there is no command {first!r} any more: {_GONE[first]}")
    if first == "plan":
        arguments = with_option_repeated(arguments, "--precision", WAYS)
    command = build_command()
    try:
        with command.make_context(PROGRAM, [*arguments], obj=arguments) as context:
            status: int = command.invoke(context)
    except typer.Exit as asked:
        return asked.exit_code
    return status
