"""The command line's values, options and errors: Typer parses, and one line says what cannot be used."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .. import ConfigError, Precision, PrepareConfig, QuantKind
from .console import QUANT_BY_CONFIG as QUANT_BY_CONFIG
from .console import InputError
from .help import of_command

# The error that all others of Typer's parser are; Typer has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

PRECISIONS = tuple(precision.value for precision in Precision)
QUANTS = tuple(kind.value for kind in QuantKind)
HALF_DTYPES = ("bfloat16", "float16")
DEFAULT_QUANT = "nf4"
KINDS_OF_4_BITS = (
    "nf4 and fp4 are without double quantization, nf4-double and fp4-double with it; "
    "load_in_4bit=True alone makes fp4"
)
# Commands of earlier versions, and what takes their place.
GONE = {
    "bench": "its figures are measured in a checkout of the repository, by python docs/figures benchmarks"
}
_OTHER_WORDS = {"fp16": "float16", "bf16": "bfloat16"}
_DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu")

Parser = Callable[[Any], Any]


# ----------------------------------------------------------------------------------------------------
# Values. A parser takes what was typed, or a default, which it returns as it is.
# ----------------------------------------------------------------------------------------------------


def integer(least: int, most: int | None = None) -> Parser:
    """Make a parser of an integer.

    Args:
        least: The least that is accepted.
        most: The most, or ``None``.

    Returns:
        The parser.
    """
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str | int) -> int:
        try:
            value = int(text)
        except ValueError:
            raise typer.BadParameter(
                f"expected an integer {bounds}, found {text!r}"
            ) from None
        is_too_large = most is not None and value > most
        if value < least or is_too_large:
            raise typer.BadParameter(f"expected an integer {bounds}, found {value}")
        return value

    return parse


def num_bytes(text: str | int) -> int:
    """Parse a number of bytes, such as ``512MiB``."""
    try:
        value = PrepareConfig(memory_budget=text).memory_budget_bytes
    except ConfigError as error:
        raise typer.BadParameter(str(error).removeprefix("memory_budget: ")) from None
    assert value is not None
    if 0 < value < 2**20 and str(text).strip().isdecimal():
        raise typer.BadParameter(f"{value} bytes: give a unit, as in 8GiB")
    return value


def file_size(text: str | int) -> int:
    """Parse the size of a file, such as ``5GB``, in bytes."""
    value = num_bytes(text)
    if value < 1:
        raise typer.BadParameter(f"expected a size such as '5GB', found {text!r}")
    return value


def device(text: str) -> str:
    """Parse a device's name; whether there is one, only torch knows."""
    if not re.fullmatch(rf"({'|'.join(_DEVICES)})(:\d+)?", text):
        raise typer.BadParameter(
            f"expected one of {', '.join(_DEVICES)}, with a number where there are several, as cuda:1, found {text!r}"
        )
    return text


def path(text: str | Path) -> Path:
    """Parse a path: of a file, or of a folder. An option in its place was hardly meant."""
    name = os.fspath(text)
    if not name:
        # It is the working directory, which nobody means to replace.
        raise typer.BadParameter("expected a path, found nothing")
    if "\0" in name:
        raise typer.BadParameter(f"expected a path, found {name!r}")
    if name.startswith("--"):
        raise typer.BadParameter(
            f"expected a path, found the option {name!r} (of a file of this name: './{name}')"
        )
    try:
        os.lstat(name)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"{name!r} is no path: {error.strerror}") from error
    return Path(text)


# ----------------------------------------------------------------------------------------------------
# Options.
# ----------------------------------------------------------------------------------------------------


def argument(metavar: str, parser: Parser, help: str) -> Any:
    """Make an argument."""
    return typer.Argument(
        metavar=metavar,
        parser=parser,
        help=help,
    )


def value(
    name: str, metavar: str, parser: Parser, help: str, panel: str | None = None
) -> Any:
    """Make an option that takes a value; those of one panel stand together in the help."""
    return typer.Option(
        name, metavar=metavar, parser=parser, help=help, rich_help_panel=panel
    )


def flag(name: str, help: str, panel: str | None = None) -> Any:
    """Make an option that takes no value."""
    return typer.Option(name, help=help, rich_help_panel=panel)


def choice(
    name: str,
    choices: Iterable[str],
    help: str,
    panel: str | None = None,
    metavar: str | None = None,
) -> Any:
    """Make an option whose value is one of a few words, which a shell completes.

    Args:
        name: Its name.
        choices: The words.
        help: What it is for.
        panel: The options that it stands with in the help.
        metavar: What stands for its value there; the words, if left out.

    Returns:
        The option.
    """

    def parse(text: str) -> str:
        if text in choices:
            return text
        raise typer.BadParameter(
            f"expected one of {', '.join(choices)}, found {text!r}{_meant(text, choices)}"
        )

    def complete(incomplete: str) -> list[str]:
        return [word for word in choices if word.startswith(incomplete)]

    return typer.Option(
        name,
        parser=parse,
        metavar=metavar or "|".join(choices),
        help=help,
        autocompletion=complete,
        rich_help_panel=panel,
    )


QuantInTraining = Annotated[
    str | None,
    choice(
        "--quant",
        QUANTS,
        "How BASE was quantized in training, where neither its config nor a manifest says it: "
        f"{KINDS_OF_4_BITS}. Other settings than in training give other weights.",
    ),
]
DtypeOfBase = Annotated[
    str | None,
    choice(
        "--dtype",
        HALF_DTYPES,
        "Dtype of the tensors that were not quantized; what the manifest or the config of BASE names, "
        "if left out.",
    ),
]
Json = Annotated[bool, flag("--json", "Print one JSON object in place of text.")]
Out = Annotated[Path, value("--out", "DST", path, "The folder to make.")]
Overwrite = Annotated[
    bool,
    flag(
        "--overwrite", "Replace the files of a checkpoint at DST, and no other files."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    flag(
        "--trust-remote-code",
        "Run the code that the model's folder brings along; without it, none is run.",
    ),
]


def at_most_one(context: typer.Context, **given: object) -> None:
    """Refuse options that exclude one another.

    Args:
        context: The command's.
        **given: Their values by name; those that are false were not given.

    Raises:
        typer.BadParameter: Two of them were given.
    """
    options = {option(name): value for name, value in given.items()}
    named = [name for name, value in options.items() if value]
    if len(named) > 1:
        raise typer.BadParameter(
            f"expected at most one of {', '.join(options)}, found {' and '.join(named)}",
            context,
        )


def option(name: str) -> str:
    """The option that gives an argument of a name."""
    return f"--{name.replace('_', '-')}"


# ----------------------------------------------------------------------------------------------------
# Parsing, and what is said of it.
# ----------------------------------------------------------------------------------------------------


class _Helped:
    """Writes the help of a command, or of several."""

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Write the help."""
        formatter.write(of_command(self, ctx))


class Command(_Helped, TyperCommand):  # type: ignore[misc]
    """A command. An option that may be repeated takes several values after it, too: ``--tokens 512 1024``."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse what was typed after the command's name."""
        ctx.allow_extra_args = True  # they get a line of ours
        if ctx.resilient_parsing:  # to complete what is being typed
            return super().parse_args(ctx, args)
        several: dict[str, Any] = {}
        for parameter in self.params:
            if getattr(parameter, "multiple", False):  # which arguments lack
                several.update(dict.fromkeys(parameter.opts, parameter))
        try:
            rest = super().parse_args(ctx, _repeated(ctx, args, several))
        except UsageError as error:
            vars(error)["ctx"] = ctx  # which the parser leaves out of some
            raise
        if ctx.args:
            found = ctx.args[0]
            meant = _meant(found, _options(ctx))
            raise typer.BadParameter(f"unexpected argument {found!r}{meant}", ctx)
        return rest


class Group(_Helped, TyperGroup):  # type: ignore[misc]
    """The commands together."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Find the command that was typed."""
        if not ctx.resilient_parsing and args[0] not in self.commands:
            if args[0] in GONE:
                raise typer.BadParameter(
                    f"there is no command {args[0]!r} any more: {GONE[args[0]]}", ctx
                )
            shown = [
                name for name, command in self.commands.items() if not command.hidden
            ]
            wanted = _meant(args[0], shown) or f"; the commands are {', '.join(shown)}"
            raise typer.BadParameter(f"no command {args[0]!r}{wanted}", ctx)
        return super().resolve_command(ctx, args)


def line(error: Any) -> str:
    """Say in one line what was wrong with what was typed.

    Args:
        error: What Typer raised.

    Returns:
        The line: what was expected, what was found, what to do.
    """
    program = error.ctx.command_path
    what = " ".join(_what(error).split())
    if not what.isprintable():
        what = ascii(what)
    return f"{program}: error: {what} (see '{program} --help')"


def _what(error: Any) -> str:
    """The mistake, in our words for the errors of Typer's parser."""
    context = error.ctx
    parameter: Any = getattr(error, "param", None)  # only some kinds have it
    message = str(error.message)
    match type(error).__name__:
        case "NoSuchOption":
            return f"no option {error.option_name!r}{_meant(error.option_name, _options(context))}"
        case "MissingParameter":
            name = _name(parameter)
            if name.startswith("-"):
                name = f"{name} {parameter.metavar}"
            about = parameter.help.rstrip(".")
            return f"{name} is missing ({about[:1].lower()}{about[1:]})"
        case "BadOptionUsage":
            (option,) = [
                one for one in context.command.params if error.option_name in one.opts
            ]
            expected = (
                "no value" if option.is_flag else f"{option.metavar}, found nothing"
            )
            return f"{error.option_name}: expected {expected}"
    if parameter is not None:
        return f"{_name(parameter)}: {message}"
    return message


def _name(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    return str(parameter.metavar if is_argument else parameter.opts[0])


def _options(context: Any) -> list[str]:
    names = []
    for parameter in context.command.get_params(context):
        names += [name for name in parameter.opts if name.startswith("-")]
    return names


def _meant(text: str, known: Iterable[str]) -> str:
    """A suggestion, or nothing: the first that begins alike, or else the most similar."""
    names = {name.strip("-"): name for name in known}
    typed = text.strip("-")
    typed = _OTHER_WORDS.get(typed, typed)
    longer = [name for name in names if len(typed) > 1 and name.startswith(typed)]
    shorter = [name for name in names if len(name) > 2 and typed.startswith(name)]
    similar = get_close_matches(typed, names, n=1, cutoff=0.72)
    found = [*longer, *shorter, *similar]
    return f"; did you mean {names[found[0]]!r}?" if found else ""


def _repeated(
    ctx: typer.Context, args: Sequence[str], several: dict[str, Any]
) -> list[str]:
    """The arguments, with such an option once more before each further value that it takes."""
    result: list[str] = []
    name = ""
    for arg in args:
        if name and result[-1] != name:
            try:
                several[name].process_value(ctx, [arg])
                result.append(name)
            except UsageError:
                name = ""
        if "--" not in result and arg in several:
            name = arg
        elif arg.startswith("-"):
            name = ""
        result.append(arg)
    return result
