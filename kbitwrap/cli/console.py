"""Shared by the commands: exit statuses, checks, what is printed, a line of progress, and quiet libraries."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

EXIT_DONE = 0
EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
EXIT_BROKEN_PIPE = 141  # as it reports one that SIGPIPE ended

_UNBOUNDED = 1_000_000  # columns
QUANT_BY_CONFIG = (
    "By the BitsAndBytesConfig of the training script, --quant is int8 for load_in_8bit=True; for load_in_4bit=True it "
    "is fp4, or nf4 with bnb_4bit_quant_type='nf4'; with bnb_4bit_use_double_quant=True as well, fp4-double or "
    "nf4-double. Without such a config it is none"
)
_OPTIONS = {
    "merge_as='quantized'": "--as quantized",
    "merge_as: ": "--as: ",
    "max_shard_size: ": "--max-shard-size: ",
    "(overwrite=True, --overwrite)": "(--overwrite)",
    "trust_remote_code=True (--trust-remote-code)": "--trust-remote-code",
    "(quantization_config)": "(--quant)",
    "(quantization_config; False for none)": f"(--quant; 'none' for none). {QUANT_BY_CONFIG}",
}
_LEAST_COLUMNS = 20


Result = dict[str, Any]
"""Something found, and its parts, by name, ready for JSON."""


class InputError(Exception):
    """The user's input cannot be used. The message is one line and is all that the user sees."""


# ----------------------------------------------------------------------------------------------------
# What is printed.
# ----------------------------------------------------------------------------------------------------


def num_columns() -> int:
    """The width of what is printed: ``COLUMNS``, else that of the terminal; a pipe or a file without it has no end."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(int(columns), _LEAST_COLUMNS)
    return Console().width if sys.stdout.isatty() else _UNBOUNDED


def show(*parts: RenderableType) -> None:
    """Print texts and tables, a blank line between each two; in color on a terminal only.

    Args:
        *parts: Strings, as they are and not as markup, and what Rich renders.
    """
    # not by Rich, which has a status of its own for a closed pipe
    print(as_text(*parts, is_plain=False), end="")


def show_json(result: Result) -> None:
    """Print what was found as one JSON object.

    Args:
        result: Plain values; others are written as text.
    """
    print(json.dumps(result, indent=2, default=str))


def as_text(
    *parts: RenderableType, is_plain: bool = True, width: int | None = None
) -> str:
    """Lay texts and tables out as ``show`` prints them.

    Args:
        *parts: As for ``show``.
        is_plain: Whether there is no color, even if standard output is a terminal.
        width: The columns to use; those of standard output, if left out.

    Returns:
        The lines.
    """
    console = Console(
        width=width or num_columns(),
        height=25,
        no_color=is_plain or None,
        force_terminal=False if is_plain else None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number:
                console.print()
            console.print(part, overflow="fold")
    lines = captured.get().split("\n")
    return "\n".join(line.rstrip() for line in lines)


def hanging(text: str, indent: int, by: int = 0) -> str:
    """Indent a text, and its further lines by more.

    Args:
        text: The text, one paragraph.
        indent: The indentation of further lines.
        by: That of the first line.

    Returns:
        The text for ``show``, which folds a word that is longer than a line.
    """
    return textwrap.fill(
        text,
        num_columns(),
        initial_indent=" " * by,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def warned(warnings_by_name: Mapping[str, Sequence[str]]) -> list[str]:
    """Lay warnings out, each once, with the names of what it is of.

    Args:
        warnings_by_name: The warnings of each precision.

    Returns:
        The texts for ``show``.
    """
    names: dict[str, list[str]] = {}
    for name, found in warnings_by_name.items():
        for warning in dict.fromkeys(found):
            names.setdefault(warning, []).append(name)
    return [
        hanging(f"warning ({', '.join(named)}): {warning}", 2)
        for warning, named in names.items()
    ]


def printable(text: str) -> str:
    """A text from a file of others, which may hold what moves a terminal's cursor.

    Args:
        text: The text.

    Returns:
        It, with such characters escaped.
    """
    return text if text.isprintable() else ascii(text)


# ----------------------------------------------------------------------------------------------------
# What is said meanwhile, on standard error.
# ----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Say something on standard error, in one line.

    Args:
        text: What is said.
    """
    print(f"kbitwrap: {text}", file=sys.stderr)


class Doing(Progress):
    """A line that says what is being done and for how long, on standard error and only if that is a terminal.

    Args:
        what: What is being done, in a few words.
    """

    def __init__(self, what: str) -> None:
        console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        # Older versions of Rich print an empty line where none was shown.
        console.quiet = not (sys.stderr.isatty() and console.is_interactive)
        words = TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        )
        super().__init__(
            SpinnerColumn(),
            words,
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            disable=console.quiet,
        )
        self._task = self.add_task(what)
        self._what = what
        self._num_bytes = 0

    def now(self, what: str) -> None:
        """Say what is being done now.

        Args:
            what: It, in a few words.
        """
        self._what = what
        self.update(self._task, description=what)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the line away while something else is printed."""
        self.stop()
        yield
        self.start()

    def written(self, num_bytes: int) -> None:
        """Count bytes that were written.

        Args:
            num_bytes: How many more.
        """
        self._num_bytes += num_bytes
        mebibytes = f"{self._num_bytes / 2**20:,.0f} MiB"
        self.update(self._task, description=f"{self._what}: {mebibytes} written")


# What libraries warn of that is not the user's concern, by the beginning.
_NOT_THE_USERS = (
    # PEFT calls them by the names that transformers deprecates.
    ("`(is_)?gradient_checkpointing(_enable)?` is deprecated", FutureWarning),
    # PEFT's function leaves it to torch which checkpointing there is.
    ("torch.utils.checkpoint: the use_reentrant parameter", UserWarning),
    # A model that is quantized already keeps its own quantization, which is shown.
    ("You passed `quantization_config` or equivalent parameters", UserWarning),
    # True of every merge into a quantized layer, and what the command is to show.
    ("Merge lora module to [48]-bit linear", UserWarning),
    # Older bitsandbytes say through `warnings` what newer ones log.
    ("MatMul8bitLt: inputs will be cast", UserWarning),
)


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence what libraries say that is not the user's concern; put it back afterwards."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    bitsandbytes_logger = logging.getLogger("bitsandbytes")
    level = bitsandbytes_logger.level
    deepspeed_logger = logging.getLogger("DeepSpeed")
    was_disabled = deepspeed_logger.disabled
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # One line a layer: on int8 layers, that bfloat16 inputs are cast to float16. There
    # is no other way for them.
    bitsandbytes_logger.setLevel(logging.ERROR)
    # It warns of a machine without a GPU on standard output, where JSON may be read,
    # once transformers imports it; importing it sets its level.
    deepspeed_logger.disabled = True
    try:
        with warnings.catch_warnings():
            for beginning, category in _NOT_THE_USERS:
                warnings.filterwarnings("ignore", beginning, category)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
        bitsandbytes_logger.setLevel(level)
        deepspeed_logger.disabled = was_disabled


@contextlib.contextmanager
def warnings_for(command: str) -> Iterator[list[str]]:
    """Collect what the library warns a command of, which is said in notes of one line; others are shown as they are.

    Args:
        command: The name of its module.

    Yields:
        The texts.
    """
    texts: list[str] = []
    source = sys.modules[command].__file__
    show_others = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename == source:
            texts.append(str(message))
        else:
            show_others(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", "", UserWarning, re.escape(command))
        warnings.showwarning = show
        yield texts


# ----------------------------------------------------------------------------------------------------
# What is refused before anything is computed.
# ----------------------------------------------------------------------------------------------------


def expect_installed(what: str, *libraries: str) -> None:
    """Refuse what libraries are missing for, before they are imported.

    Args:
        what: What needs them.
        *libraries: Their names.

    Raises:
        InputError: One is not installed.
    """
    for name in libraries:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{what} needs {name}, which is not installed")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message that says something, for a message that has to fit in one.

    Args:
        error: The exception.

    Returns:
        The line, with those after it that it announces by a colon, or the exception's
            class name where there is no
        message.
    """
    said = ""
    for line in str(error).splitlines():
        said = f"{said} {line.strip()}".strip()
        if said and not said.endswith(":"):
            break
    return with_options(said) or type(error).__name__


def with_options(text: str) -> str:
    """Put options in place of the arguments that the library's words name.

    Args:
        text: What the library said.

    Returns:
        The text for a command line.
    """
    for name, option in _OPTIONS.items():
        text = text.replace(name, option)
    return text


def check_folder(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be made, before anything is computed for it.

    Args:
        path: The folder.
        overwrite: Whether one that is not empty is to be replaced.

    Raises:
        InputError: Something is there, or there is no folder to write to.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise InputError(
            f"--out: expected a folder or nothing at {str(path)!r}, found a file; nothing was written"
        )
    if not overwrite and path.is_dir() and any(path.iterdir()):
        raise InputError(
            f"--out: {str(path)!r} exists and is not empty; choose another folder, or add --overwrite"
        )
    real = Path(os.path.realpath(path))
    home = next(outer for outer in (real, *real.parents) if os.path.lexists(outer))
    if not (home.is_dir() and os.access(home, os.W_OK | os.X_OK)):
        why = "cannot be written to" if home.is_dir() else "is not a folder"
        raise InputError(f"--out: cannot write {str(path)!r}: {str(home)!r} {why}")


def check_file(
    path: Path, option: str, *, overwrite: bool, source: str | Path | None
) -> None:
    """Refuse a file that cannot be written, before anything is computed for it.

    Args:
        path: The file.
        option: The option that named it.
        overwrite: Whether one that exists is to be replaced.
        source: The path of what is read for it, if it has one.

    Raises:
        InputError: Something is there, it is or lies in the source, or there is no
            folder to write to.
    """
    if path.is_dir():
        raise InputError(f"{option}: expected a file, found the folder {str(path)!r}")
    if path.exists() and not overwrite:
        raise InputError(
            f"{option}: {str(path)!r} exists; choose another name, or add --overwrite"
        )
    folder = path.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        why = "cannot be written to" if folder.is_dir() else "is not there"
        raise InputError(
            f"{option}: cannot write {str(path)!r}: the folder {str(folder)!r} {why}"
        )
    real = Path(os.path.realpath(path))
    around = [outer for outer in (real, *real.parents) if outer.exists()]
    if source is None or not os.path.exists(source):
        return
    if any(os.path.samefile(outer, source) for outer in around):
        raise InputError(
            f"{option}: {str(path)!r} is or lies in {str(source)!r}, which is read; choose another name"
        )
