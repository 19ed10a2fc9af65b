"""The options that several commands take, as Typer reads them, and one line for what cannot be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .. import ConfigError, Precision, QuantKind
from ..config import parse_bytes
from .console import QUANT_BY_CONFIG, InputError, printable

# The error that all others of Typer's parser are; Typer has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# What to type, by the command, where an argument was given as an option, or an option as
# an argument.
_FORMS = {
    "plan": "plan MODEL",
    "doctor": "doctor MERGED --adapter ADAPTER",
    "merge": "merge [BASE] ADAPTER --out DST",
    "stamp": "stamp ADAPTER --base BASE",
    "convert": "convert --from SRC --out DST",
    "run": "run SCRIPT",
}
_OTHER_FORM = re.compile(
    r"No such option: --(\S+)|Got unexpected extra .*\)|Missing option .*'"
)
_NO_INTEGER = "Input should be a valid integer, unable to parse string as an integer"
_AN_INTEGER = "expected a whole number such as 2048"

PRECISIONS = tuple(Precision)
DEFAULT_QUANT = QuantKind.NF4
HalfDtype = Literal["bfloat16", "float16"]


def num_bytes(text: str | int) -> int:
    """Parse a number of bytes, such as ``512MiB``."""
    try:
        value = parse_bytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    if 0 < value < 2**20 and str(text).strip().isdecimal():
        raise typer.BadParameter(f"{value} bytes: give a unit, as in 8GiB")
    return value


QuantInTraining = Annotated[
    QuantKind | None,
    typer.Option(
        metavar="KIND",
        help="How BASE was quantized in training, where neither its config nor a manifest says it. "
        f"{QUANT_BY_CONFIG}. Other settings than in training give other weights.",
    ),
]
DtypeOfBase = Annotated[
    HalfDtype | None,
    typer.Option(
        metavar="DTYPE",
        help="Dtype of the tensors that were not quantized, bfloat16 or float16; if left out, what the manifest or the "
        "config of BASE names.",
    ),
]
BaseInTraining = Annotated[
    str | None,
    typer.Option(
        metavar="BASE",
        help="The base that was trained on: a folder, or a name on the hub; if left out, what the config of ADAPTER "
        "names.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="The device to quantize BASE on, the one that was trained on: a GPU and a CPU may quantize a last bit "
        "differently; cuda if there is one, else cpu.",
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=2,
        help="The most texts that are taken from FILE, of 512 tokens.",
    ),
]
MaxShardSize = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE",
        parser=num_bytes,
        help="The maximum size of a file, such as 5GB. If left out, merge takes 5GB, and convert keeps the files of "
        "SRC.",
    ),
]
Out = Annotated[Path, typer.Option(metavar="DST", help="The folder to make.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the files of a checkpoint at DST, and no other files.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the code that the model's folder brings along; without it, none is run.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object in place of text.")
]


Budget = Annotated[
    int | None,
    typer.Option(
        metavar="BYTES",
        parser=num_bytes,
        help="The most that torch's allocator may reserve in a step, the model included, such as 7GiB. The CUDA "
        "context comes on top.",
        rich_help_panel="What a step has to fit",
    ),
]
DeviceMemory = Annotated[
    int | None,
    typer.Option(
        metavar="BYTES",
        parser=num_bytes,
        help="In place of --budget: the memory of the GPU, such as 24GiB, of which the CUDA context is taken off.",
        rich_help_panel="What a step has to fit",
    ),
]


Unified = Annotated[
    bool,
    typer.Option(
        "--unified",
        help="The memory of --device-memory is the host's too, as on a Jetson, a GB10 or an APU: the process is taken "
        "off, and loading has to fit with the pages of the files that it reads.",
        rich_help_panel="What a step has to fit",
    ),
]


def given(**options: object) -> list[str]:
    """Name the options that were given.

    Args:
        **options: Their values by name; those that are ``None`` or ``False`` were not given.
    """
    return [
        f"--{name.replace('_', '-')}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def expect_one_at_most(**options: object) -> None:
    """Refuse options that exclude one another.

    Args:
        **options: As for `given`.

    Raises:
        InputError: Two of them were given.
    """
    found = given(**options)
    if len(found) > 1:
        raise InputError(f"expected at most one of {', '.join(found)}")


def with_option_repeated(
    arguments: Sequence[str], name: str, words: Sequence[str]
) -> list[str]:
    """Put an option again before each further word that follows it: Typer takes one after each.

    Args:
        arguments: What was typed.
        name: The option.
        words: The words that it takes.
    """
    result: list[str] = []
    takes_words = False
    for argument in arguments:
        if takes_words and argument in words and result[-1] != name:
            result.append(name)
        takes_words = argument == name or (takes_words and argument in words)
        result.append(argument)
    return result


def line(error: Any) -> str:
    """Say in one line what was wrong with what was typed.

    Args:
        error: What Typer raised.

    Returns:
        The line.
    """
    said = printable(" ".join(error.format_message().split()))
    # The words of pydantic, which reads values for Typer.
    said = said.replace("Value error, ", "").replace(_NO_INTEGER, _AN_INTEGER)
    if error.ctx is None:
        return f"kbitwrap: error: {said}"
    form = _FORMS.get(error.ctx.info_name, "")
    found = _OTHER_FORM.match(said)
    if (
        form
        and found
        and (not found[1] or found[1].upper() in re.findall(r"\w+", form))
    ):
        said = f"{found[0]}. Type: kbitwrap {form}"
    program = error.ctx.command_path
    return f"{program}: error: {said} (see '{program} --help')"
