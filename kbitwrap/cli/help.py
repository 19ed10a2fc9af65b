"""The text of ``--help``: what a command does, its arguments, and its options by group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from .console import num_columns, styled

_WIDEST = 100  # columns; longer lines of prose are hard to read
_WIDEST_NAME = 26
_NAME, _TITLE = "cyan", "bold"


def of_command(command: Any, context: Any) -> str:
    """Write the help of a command, or of all of them together.

    Args:
        command: The command, of Typer.
        context: Its context.

    Returns:
        The lines; with colors if standard output is a terminal.
    """
    width = min(num_columns(), _WIDEST)
    words = [
        one.metavar
        for one in command.get_params(context)
        if one.param_type_name == "argument"
    ]
    words += ["COMMAND ..."] * hasattr(command, "commands")
    usage = Text.assemble(
        ("Usage: ", _TITLE), " ".join([context.command_path, "[OPTIONS]", *words])
    )
    paragraphs = [
        Text(" ".join(part.split())) for part in (command.help or "").split("\n\n")
    ]
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        is_argument = parameter.param_type_name == "argument"
        if not parameter.hidden:
            title = (
                "Arguments" if is_argument else parameter.rich_help_panel or "Options"
            )
            groups.setdefault(title, []).append(
                (_named(parameter, is_argument), _described(parameter, is_argument))
            )
    for name, one in getattr(command, "commands", {}).items():
        if not one.hidden:
            groups.setdefault("Commands", []).append((name, one.short_help or ""))
    sections = [_section(title, rows, width) for title, rows in groups.items()]
    return styled(width, usage, *paragraphs, *sections)


def _named(parameter: Any, is_argument: bool) -> str:
    if is_argument:
        return str(parameter.metavar)
    takes_value = not parameter.is_flag
    return (
        ", ".join(sorted(parameter.opts, key=len))
        + f" {parameter.metavar}" * takes_value
    )


def _described(parameter: Any, is_argument: bool) -> str:
    text = parameter.help or ""
    if parameter.required:
        return text if is_argument else f"{text} Required."
    has_default = (
        not is_argument and not parameter.is_flag and parameter.default is not None
    )
    return f"{text} [default: {parameter.default}]" if has_default else text


def _section(title: str, rows: Iterable[tuple[str, str]], width: int) -> Text:
    """Names to the left, texts to the right; a long name has a line of its own."""
    rows = [*rows]
    indent = 4 + min(max(len(name) for name, _ in rows), _WIDEST_NAME)
    lines = [Text(title, _TITLE)]
    for name, text in rows:
        parts = Text(text).wrap(Console(), max(width - indent, 1), overflow="fold") or [
            Text()
        ]
        first = Text.assemble("  ", (name, _NAME))
        if first.cell_len + 2 > indent:
            lines.append(first)
            first = Text()
        first.pad_right(indent - first.cell_len)
        for part in parts:
            part.rstrip()
            lines.append(first + part)
            first = Text(" " * indent)
    return Text("\n").join(lines)
