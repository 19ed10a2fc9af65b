"""Interrupts at every line of the package, one after the other."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kbitwrap

PACKAGE = str(Path(kbitwrap.__file__).parent)


@contextlib.contextmanager
def interrupted_at(number: int | None) -> Iterator[list[str]]:
    """Raise a KeyboardInterrupt at the line of kbitwrap's with that number, counted as they run; list the lines.

    Lines of ``with`` are passed over: CPython reports one before it calls ``__exit__``, and looks for no signal there.
    """
    lines: list[str] = []

    def trace(frame: Any, event: str, _: object) -> Any:
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE):
            return None
        if event == "line" and not linecache.getline(path, frame.f_lineno).lstrip().startswith("with "):
            lines.append(f"{path}:{frame.f_lineno}")
            if len(lines) - 1 == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(outer)
