"""Files that are replaced as a whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file beside another, which it replaces when the body ends; it is gone if the body raises.

    What is there and no file, such as a pipe, is written to.

    Args:
        path: The file, or a link to it.

    Yields:
        The name to write to, with the same suffix.

    Raises:
        OSError: The file cannot be replaced.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    unfinished = target.with_name(f".kbitwrap-{os.getpid()}{target.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
