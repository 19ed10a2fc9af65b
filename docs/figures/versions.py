"""Writes the tables of docs/versions.md: with which versions the tests of `.ci/run` passed, and when.

    python docs/figures versions note FILE COLUMN [LIBRARY ...]   note what is installed here, in FILE
    python docs/figures versions compare FILE                     say how the page differs from what was noted
    python docs/figures versions write NOTED                      write what was noted, as `compare` prints it

`.ci/run` notes the versions of an environment when its tests have passed, and compares them at its end. A column keeps
what other runs noted only where the libraries of `EVERYWHERE` are still those that were tested with it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from sections import DOCS, replace_section

PAGE = DOCS / "versions.md"
FIGURES = DOCS / "benchmarks" / "versions.json"

EVERYWHERE = (
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "huggingface-hub",
    "safetensors",
    "typer",
)
COLUMNS = {
    "pinned": "pinned",
    "oldest": "oldest",
    "torch-2.11": "torch 2.11",
    "newest": "newest",
    "transformers-5.24": "transformers 5.24",
    "test-gptqmodel": "GPTQ, AWQ",
    "test-compressed": "AQLM, compressed-tensors",
}
TABLES = {
    "versions": ("pinned", "oldest", "torch-2.11", "newest", "transformers-5.24"),
    "quantizers": ("test-gptqmodel", "test-compressed"),
}
TESTED = "tested"
PYTHON = "python"
Versions = dict[str, str]
"""The day on which an environment was tested, and its versions by the name of the library."""
Noted = dict[str, Versions]
"""The versions of each environment, by the name of its column."""


# ----------------------------------------------------------------------------------------------------
# What is installed, and what was noted before.
# ----------------------------------------------------------------------------------------------------


def installed(libraries: Iterable[str]) -> Versions:
    """Today, and the versions of Python and of libraries here, without the name of a build such as `+cpu`."""
    major, minor, _ = platform.python_version_tuple()
    found = {TESTED: datetime.date.today().isoformat(), PYTHON: f"{major}.{minor}"}
    for library in libraries:
        found[library], _, _ = version(library).partition("+")
    return found


def is_same_environment(one: Versions, other: Versions) -> bool:
    """Whether Python and the libraries that every environment has are of the same versions."""
    return all(one.get(library) == other.get(library) for library in (PYTHON, *EVERYWHERE))


def merged(saved: Noted, noted: Noted) -> Noted:
    """What is known after a run: libraries that were tested with other versions around them are dropped."""
    found = {}
    for column in COLUMNS:
        before, now = saved.get(column, {}), noted.get(column, {})
        if not now or is_same_environment(before, now):
            now = before | now
        if now:
            found[column] = now
    return found


def differences(saved: Noted, noted: Noted) -> list[str]:
    """What was noted and is not saved, a line each; a run with another Python is compared with nothing."""
    lines = []
    for column, versions in noted.items():
        before = saved.get(column, {})
        if before and before[PYTHON] != versions[PYTHON]:
            print(f"{column}: tested with Python {versions[PYTHON]}, the page has {before[PYTHON]}: not compared")
            continue
        for library, found in versions.items():
            expected = before.get(library)
            if found != expected and library != TESTED:
                lines.append(f"{column}: {library} {found} was tested, the page has {expected or 'none'}")
    return lines


# ----------------------------------------------------------------------------------------------------
# The tables.
# ----------------------------------------------------------------------------------------------------


def table(saved: Noted, columns: tuple[str, ...]) -> str:
    """The versions of some environments side by side: a row for each library that one of them has."""
    libraries = dict.fromkeys(library for column in columns for library in saved.get(column, {}))
    if not libraries:
        return "Nothing was noted here yet."
    lines = [
        f"| | {' | '.join(COLUMNS[column] for column in columns)} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for library in libraries:
        cells = [saved.get(column, {}).get(library, "") for column in columns]
        lines.append(f"| {library} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read(path: Path) -> Noted:
    """The versions that a file has; none where it is not there yet."""
    if not path.exists():
        return {}
    found: Noted = json.loads(path.read_text(encoding="utf-8"))
    return found


def save(path: Path, versions: Noted) -> None:
    path.write_text(json.dumps(versions, indent=1) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------
# The three commands.
# ----------------------------------------------------------------------------------------------------


def note(path: Path, column: str, libraries: list[str]) -> int:
    """Note the environment that this runs in, beside what was noted of it before."""
    noted = read(path)
    noted[column] = noted.get(column, {}) | installed([*EVERYWHERE, *libraries])
    save(path, noted)
    return 0


def compare(path: Path) -> int:
    """Print how the page differs, and the command that writes it; a difference is no fault of what was tested."""
    noted = read(path)
    differing = differences(read(FIGURES), noted)
    if differing:
        print(*differing, sep="\n")
        print("docs/versions.md has what was tested before. This writes what was tested now:")
    else:
        print("docs/versions.md has these versions. This writes the day:")
    print(f"python docs/figures versions write {shlex.quote(json.dumps(noted))}")
    return 0


def write(noted: Noted) -> int:
    """Save what was noted, and write the tables."""
    save(FIGURES, merged(read(FIGURES), noted))
    for name, columns in TABLES.items():
        replace_section(PAGE, name, table(read(FIGURES), columns))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Note, compare or write the versions that were tested.")
    commands = parser.add_subparsers(dest="command", required=True)
    noting = commands.add_parser("note", help="note what is installed here")
    noting.add_argument("file", type=Path)
    noting.add_argument("column", choices=COLUMNS)
    noting.add_argument("libraries", nargs="*")
    comparing = commands.add_parser("compare", help="say how the page differs from what was noted")
    comparing.add_argument("file", type=Path)
    writing = commands.add_parser("write", help="write what was noted into the page")
    writing.add_argument("noted", type=json.loads)
    arguments = parser.parse_args()
    if arguments.command == "note":
        return note(arguments.file, arguments.column, arguments.libraries)
    if arguments.command == "compare":
        return compare(arguments.file)
    return write(arguments.noted)


if __name__ == "__main__":
    sys.exit(main())
