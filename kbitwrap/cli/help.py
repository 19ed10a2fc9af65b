"""The text of ``--help``: what a command does, its arguments, and its options by group."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from typing import Any

from rich.console import Group
from rich.text import Text

from .console import as_text, num_columns

_WIDEST = 100  # columns; longer lines of prose are hard to read
_WIDEST_NAME = 26
# styles
_NAME = "cyan"
_TITLE = "bold"


def of_command(command: Any, context: Any) -> str:
    """Write the help of a command, or of all of them together.

    Args:
        command: The command, of Typer.
        context: Its context.

    Returns:
        The lines; with colors if standard output is a terminal.
    """
    width = min(num_columns(), _WIDEST)
    words = [context.command_path, "[OPTIONS]"]
    groups: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for parameter in command.get_params(context):
        title = "Arguments"
        if parameter.param_type_name == "argument":
            words.append(parameter.metavar)
            row = parameter.metavar, parameter.help or ""
        else:
            title = parameter.rich_help_panel or "Options"
            row = _option_row(parameter)
        if not parameter.hidden:
            groups[title].append(row)
    if hasattr(command, "commands"):
        words.append("COMMAND ...")
        for name, one in command.commands.items():
            if not one.hidden:
                groups["Commands"].append((name, one.short_help or ""))
    usage = Text.assemble(("Usage: ", _TITLE), " ".join(words))
    paragraphs = [_paragraph(part) for part in command.help.split("\n\n")]
    sections = [_section(title, rows, width) for title, rows in groups.items()]
    return as_text(
        usage,
        *paragraphs,
        *sections,
        is_plain=False,
        width=width,
    )


def _paragraph(text: str) -> str:
    """A paragraph as one line, which is folded; examples, which are indented, keep theirs."""
    return text if text.startswith("  ") else " ".join(text.split())


def _option_row(option: Any) -> tuple[str, str]:
    """The names of an option with what stands for its value, and its text.

    Args:
        option: The option, of Typer.

    Returns:
        The two, for a row of ``_section``.
    """
    names = ", ".join(sorted(option.opts, key=len))
    text = option.help or ""
    if option.is_flag:
        return names, text
    if option.required:
        text = f"{text} Required."
    elif option.default is not None:
        text = f"{text} [default: {option.default}]"
    return f"{names} {option.metavar}", text


def _section(title: str, rows: list[tuple[str, str]], width: int) -> Group:
    """Lay a group of arguments, options or commands out.

    Names stand to the left and texts to the right; a long name has a line of its own.

    Args:
        title: The title of the group.
        rows: The names and the texts.
        width: The columns to use.

    Returns:
        The lines.
    """
    widest = min(max(len(name) for name, _ in rows), _WIDEST_NAME)
    lines = [Text(title, _TITLE)]
    for name, text in rows:
        if len(name) > widest:
            lines.append(Text.assemble("  ", (name, _NAME)))
            name = ""
        folded = textwrap.fill(
            f"  {name:<{widest}}  {text}",
            width,
            subsequent_indent=" " * (widest + 4),
            break_on_hyphens=False,
        )
        line = Text(folded)
        line.stylize(
            _NAME,
            2,
            2 + len(name),
        )
        lines.append(line)
    return Group(*lines)
