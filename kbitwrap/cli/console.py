"""Shared by the commands: exit statuses, checks, what is printed, a line of progress, and quiet libraries."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

EXIT_DONE = 0
EXIT_NO = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as a shell reports a process that SIGINT ended
EXIT_BROKEN_PIPE = 141  # as it reports one that SIGPIPE ended

_UNBOUNDED = 1_000_000  # columns
_LEAST_COLUMNS = 20


class InputError(Exception):
    """The user's input cannot be used. The message is one line and is all that the user sees."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        name: What must hold.
        measured: What was found.
        passed: Whether it holds.
        group: What it is a part of.
    """

    name: str
    measured: str
    passed: bool
    group: str

    def to_dict(self) -> dict[str, Any]:
        """The check as plain values, ready for JSON."""
        return asdict(self)


# ----------------------------------------------------------------------------------------------------
# What is printed.
# ----------------------------------------------------------------------------------------------------


def num_columns() -> int:
    """The width of what is printed: ``COLUMNS``, else that of the terminal; a pipe or a file without it has no end."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return max(int(columns), _LEAST_COLUMNS)
    return Console().width if sys.stdout.isatty() else _UNBOUNDED


def show(*parts: str | Text) -> None:
    """Print texts and tables, a blank line between each two; in color on a terminal only.

    Args:
        *parts: Strings, as they are and not as markup, and texts of Rich.
    """
    # not by Rich, which has a status of its own for a closed pipe
    print(_captured(_console(), parts), end="")


def as_text(*parts: str | Text) -> str:
    """Lay texts and tables out as ``show`` prints them, without color.

    Args:
        *parts: As for ``show``.

    Returns:
        The lines.
    """
    return _captured(_console(no_color=True, force_terminal=False), parts)


def styled(width: int, *parts: str | Text) -> str:
    """Lay texts and tables out, with color if standard output is a terminal.

    Args:
        width: The columns to use.
        *parts: As for ``show``.

    Returns:
        The lines.
    """
    return _captured(_console(width), parts)


def joined(lines: Iterable[str | Text]) -> Text:
    """Put lines below one another, as one part of what is shown.

    Args:
        lines: The lines.

    Returns:
        The text for ``show``.
    """
    return Text("\n").join(_text(line) for line in lines)


def hanging(text: str, indent: int, by: int = 0) -> Text:
    """Indent a text, and its further lines by more.

    Args:
        text: The text, one paragraph.
        indent: The indentation of further lines.
        by: That of the first line.

    Returns:
        The text for ``show``.
    """
    console = Console()
    width = num_columns()
    first = Text(text).wrap(console, max(width - by, 1), overflow="fold")[0].plain
    rest = Text(text[len(first) :].strip())
    others = rest.wrap(console, max(width - indent, 1), overflow="fold")
    indented = [Text(" " * indent) + line for line in others if line.plain]
    return joined([" " * by + first.rstrip(), *indented])


def warned(warnings_by_name: Mapping[str, Sequence[str]]) -> list[Text]:
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


def _text(part: str | Text) -> Text:
    return Text(part) if isinstance(part, str) else part


def _console(width: int | None = None, **fields: Any) -> Console:
    return Console(
        width=num_columns() if width is None else width,
        height=25,
        markup=False,
        emoji=False,
        highlight=False,
        **fields,
    )


def _captured(console: Console, parts: tuple[str | Text, ...]) -> str:
    with console.capture() as captured:
        for number, part in enumerate(parts):
            if number:
                console.print()
            for line in _text(part).wrap(console, console.width, overflow="fold"):
                line.rstrip()
                console.print(line)
    return captured.get()


# ----------------------------------------------------------------------------------------------------
# What is said meanwhile, on standard error.
# ----------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Say something on standard error, in one line.

    Args:
        text: What is said.
    """
    print(f"kbitwrap: {text}", file=sys.stderr)


class Doing:
    """A line that says what is being done."""

    def __init__(self, progress: Progress | None, what: str) -> None:
        self._progress = progress
        self._task = None if progress is None else progress.add_task(what)
        self._num_bytes = 0
        self._what = what

    def now(self, what: str) -> None:
        """Say what is being done now.

        Args:
            what: It, in a few words.
        """
        self._what = what
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=what)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Take the line away while something else is printed."""
        if self._progress is not None:
            self._progress.stop()
        yield
        if self._progress is not None:
            self._progress.start()

    def written(self, num_bytes: int) -> None:
        """Count bytes that were written.

        Args:
            num_bytes: How many more.
        """
        self._num_bytes += num_bytes
        if self._progress is not None and self._task is not None:
            self._progress.update(
                self._task,
                description=f"{self._what}: {self._num_bytes / 2**20:,.0f} MiB written",
            )


@contextlib.contextmanager
def progress(what: str) -> Iterator[Doing]:
    """Show what is being done and for how long, on standard error and only if that is a terminal.

    Args:
        what: What is being done, in a few words.

    Yields:
        The line.
    """
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not (sys.stderr.isatty() and console.is_interactive):
        yield Doing(None, what)
        return
    words = TextColumn(
        "{task.description}",
        markup=False,
        table_column=Column(no_wrap=True, overflow="ellipsis"),
    )
    columns = (SpinnerColumn(), words, TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False
    ) as bar:
        yield Doing(bar, what)


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
    # One line a layer: on int8 layers, that bfloat16 inputs are cast to float16. There
    # is no other way for them.
    bitsandbytes_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # PEFT calls it by the name that transformers deprecates; neither is the
            # user's code.
            warnings.filterwarnings(
                "ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning
            )
            # A model that is quantized already keeps its own quantization, which is
            # what is shown.
            warnings.filterwarnings(
                "ignore",
                r"You passed `quantization_config` or equivalent parameters",
                UserWarning,
            )
            # True of every merge into a quantized layer, and what the command is there
            # to show.
            warnings.filterwarnings(
                "ignore", r"Merge lora module to [48]-bit linear", UserWarning
            )
            # Older bitsandbytes say through `warnings` what newer ones log.
            warnings.filterwarnings(
                "ignore", r"MatMul8bitLt: inputs will be cast", UserWarning
            )
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
        bitsandbytes_logger.setLevel(level)


# ----------------------------------------------------------------------------------------------------
# What is refused before anything is computed.
# ----------------------------------------------------------------------------------------------------


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
    return said or type(error).__name__


def check_folder(path: Path, *, overwrite: bool) -> None:
    """Refuse a folder that cannot be made, before anything is computed for it.

    Args:
        path: The folder.
        overwrite: Whether one that is not empty is to be replaced.

    Raises:
        InputError: Something is there.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise InputError(
            f"--out: expected a folder or nothing at {str(path)!r}, found a file; nothing was written"
        )
    if not overwrite and path.is_dir() and any(path.iterdir()):
        raise InputError(
            f"--out: {str(path)!r} exists and is not empty; choose another folder, or add --overwrite"
        )


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
    if (
        source is not None
        and os.path.exists(source)
        and any(os.path.samefile(outer, source) for outer in around)
    ):
        raise InputError(
            f"{option}: {str(path)!r} is or lies in {str(source)!r}, which is read; choose another name"
        )
