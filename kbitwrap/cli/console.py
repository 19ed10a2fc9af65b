"""Shared by the commands: exit statuses, what is printed, a line of progress, and libraries that are quiet."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, RenderableType
from rich.status import Status
from rich.text import Text

from .. import KbitWrapError, ManifestMismatchError
from ..reports import in_one_line

EXIT_DONE = 0
EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
EXIT_BROKEN_PIPE = 141  # as it reports one that SIGPIPE ended

ADAPTER_CONFIG = "adapter_config.json"  # beside an adapter that PEFT saved
QUANT_BY_CONFIG = (
    "By the BitsAndBytesConfig of the training script, nf4 is load_in_4bit=True with bnb_4bit_quant_type='nf4', fp4 is "
    "load_in_4bit=True alone, nf4-double and fp4-double are these with bnb_4bit_use_double_quant=True, int8 is "
    "load_in_8bit=True, and none is no such config"
)
_UNBOUNDED = 1_000_000  # columns
# The arguments that the library's messages name, and the options in their place.
_OPTIONS = {
    r"merge_as='quantized'": "--as quantized",
    r"\bmerge_as: ": "--as: ",
    r"\bmax_shard_size: ": "--max-shard-size: ",
    r"\(quantization_config\)": "(--quant)",
    r"\(quantization_config; False for none\)": f"(--quant; 'none' for none). {QUANT_BY_CONFIG}",
    r"quantization_config=\w+\(dequantize=True\)": "--quant none",
    r"^optimizer:": "--optimizer:",
    r"^engine:": "--engine:",
    r"batch_size and seq_len:": "--batch and --seq:",
    r"\(seq_len\)": "(--seq)",
}


Result = dict[str, Any]
"""Something found, and its parts, by name, ready for JSON."""


class InputError(Exception):
    """The user's input cannot be used. The message is one line and is all that the user sees."""


# ----------------------------------------------------------------------------------------------------
# What is printed.
# ----------------------------------------------------------------------------------------------------


def show(*parts: RenderableType) -> None:
    """Print texts and tables, a blank line between each two; in color on a terminal only.

    Args:
        *parts: Strings, as they are and not as markup, and what Rich renders.
    """
    # A pipe or a file has no width; Rich asks the terminal, or COLUMNS.
    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(
        width=None if is_bounded else _UNBOUNDED,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part, overflow="fold")
            console.print()
    # Rich has a status of its own for a closed pipe.
    for line in captured.get().rstrip().splitlines():
        print(line.rstrip())


def show_result(result: Result, parts: Sequence[RenderableType], as_json: bool) -> None:
    """Print what was found as one JSON object, or as texts and tables.

    Args:
        result: Plain values; others are written as text.
        parts: The texts and tables, as for `show`.
        as_json: Print the first.
    """
    if as_json:
        print(json.dumps(result, indent=2, default=str))
    else:
        show(*parts)


def each_once(what: str, results: Mapping[str, Result]) -> list[str]:
    """Lay out the texts that results have under a name, such as their warnings, each once."""
    texts = [text for result in results.values() for text in result[what]]
    return [f"{what}: {text}" for text in dict.fromkeys(texts)]


def printable(text: str) -> str:
    """Escape a text from a file of others, which may hold what moves a terminal's cursor."""
    return text if text.isprintable() else ascii(text)


# ----------------------------------------------------------------------------------------------------
# What is said meanwhile, on standard error.
# ----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Say something on standard error, in one line."""
    print(f"kbitwrap: {text}", file=sys.stderr)


class Doing(Status):
    """A line that says what is being done, on standard error and only if that is a terminal.

    Args:
        what: What is being done, in a few words.
    """

    def __init__(self, what: str) -> None:
        super().__init__(Text(what), console=Console(stderr=True))
        self._what = what
        self._num_bytes = 0

    def now(self, what: str) -> None:
        """Say what is being done now."""
        self._what = what
        self.update(Text(what))

    def written(self, num_bytes: int) -> None:
        """Count bytes that were written."""
        self._num_bytes += num_bytes
        mebibytes = f"{self._num_bytes / 2**20:,.0f} MiB"
        self.update(Text(f"{self._what}: {mebibytes} written"))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence what libraries log and warn of, but for what kbitwrap warns a command of; put it back afterwards."""
    from transformers.utils import logging as transformers_logging

    shows_bars = transformers_logging.is_progress_bar_enabled()
    level = logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", "", UserWarning, __package__)
            warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
            yield
    finally:
        logging.disable(level)
        if shows_bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def working(
    what: str, trust_remote_code: bool = False, *, is_script: bool = False
) -> Iterator[Doing]:
    """Work with a line of progress, and say in one line what the library refuses, with options in place of arguments.

    Args:
        what: What is being done, in a few words.
        trust_remote_code: Whether the code that the model brings along is run: that is
            said.
        is_script: Whether a script gave the arguments, which stay then.

    Yields:
        The line of progress.

    Raises:
        InputError: The library refused what it was given.
        ManifestMismatchError: The model is not the manifest's, which is an answer.
    """
    if trust_remote_code:
        say("--trust-remote-code: code that the model brings along is run")
    try:
        doing = Doing(what)
        with doing, quiet_libraries(), _cleaning_up():
            yield doing
    except ManifestMismatchError:
        raise
    except (KbitWrapError, OSError) as error:
        said = in_one_line(error) if is_script else first_line(error)
        raise InputError(said) from error


@contextlib.contextmanager
def _cleaning_up() -> Iterator[None]:
    """Let a process that SIGTERM ends remove its temporary folders before."""

    def end(number: int, _: Any) -> NoReturn:
        sys.exit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# ----------------------------------------------------------------------------------------------------
# What is refused.
# ----------------------------------------------------------------------------------------------------


def checked_device(name: str | None) -> str | None:
    """Refuse a device that torch cannot compute on here; imports torch.

    Args:
        name: The device; ``None`` for the one that the library chooses.

    Returns:
        The same.

    Raises:
        InputError: There is no such device.
    """
    if name is None:
        return None
    import torch

    try:
        torch.empty(1, device=name).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"--device: device {name!r} is not available: {first_line(error)}; leave it out, or give cpu"
        ) from error
    return name


def holds_adapter(path: str | Path) -> bool:
    """Return whether a folder holds an adapter and no model."""
    is_model = os.path.isfile(os.path.join(path, "config.json"))
    return os.path.isfile(os.path.join(path, ADAPTER_CONFIG)) and not is_model


def first_line(error: BaseException) -> str:
    """Write an error of the library in one line, with options in place of arguments."""
    return with_options(in_one_line(error))


def with_options(text: str) -> str:
    """Put options in place of the arguments that the library's words name."""
    for pattern, option in _OPTIONS.items():
        text = re.sub(pattern, option, text)
    return text
