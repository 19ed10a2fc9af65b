"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

from ..edits.journal import finish
from ..errors import ExportError

# Names in the hidden folder beside a destination: its new content, and the old content that was moved out of the way.
_NEW, _OLD = "new", "old"


def refuse_special(path: str | os.PathLike[str]) -> None:
    """Raise ``OSError`` for what is there and no file: reading a pipe waits for a writer, and a device has no end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a file", os.fspath(path))


@contextlib.contextmanager
def staged(destination: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a hidden folder that replaces the destination in one step when the body ends, and is gone if it raises.

    An empty folder may stand at the destination; with ``overwrite``, any folder without subfolders. Nothing is flushed,
    as when the libraries save a checkpoint: a power failure loses what the system has not written by then.
    """
    with beside(destination) as (hidden, target):
        _check_replaceable(target, destination, overwrite)
        folder = hidden / _NEW
        folder.mkdir()
        yield folder
        if not _check_replaceable(target, destination, overwrite):
            os.rename(folder, target)  # takes the place of an empty folder, and of nothing else
        elif not _exchange(folder, target):
            os.rename(target, hidden / _OLD)
            os.rename(folder, target)


def atomic_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write or replace a file; it is whole, or as it was before where `ExportError` is raised."""
    with beside(path) as (hidden, target):
        with open(hidden / _NEW, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden / _NEW, target)


def _check_replaceable(target: Path, destination: str | os.PathLike[str], overwrite: bool) -> bool:
    """Whether a folder that is not empty is to be replaced; raises where something else is in the way."""
    where = os.fspath(destination)
    if not os.path.lexists(target):
        return False
    if not target.is_dir():
        raise ExportError(f"{where}: expected a folder or nothing, found a file; nothing was written")
    entries = list(target.iterdir())
    if entries and not overwrite:
        raise ExportError(
            f"{where}: exists and is not empty; choose another folder, or replace this one "
            "(overwrite=True, --overwrite)"
        )
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        raise ExportError(
            f"{where}: contains the folder {folders[0]!r}, which overwriting would delete; nothing was written: remove "
            "that folder yourself, or choose another destination"
        )
    return bool(entries)


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """Make a hidden folder beside a path, locked while its process lives, and remove it in the end."""
    where = os.fspath(path)
    if not where:
        raise ExportError("'': expected a path; '.' is the working directory")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL
        raise ExportError(f"{where!r}: not a valid path: {error}") from error
    made = [parent for parent in target.parents if not os.path.lexists(parent)]
    # A hash, because the destination's own name may be as long as names can be.
    prefix = f".kbitwrap-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
    hidden = lock = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target, prefix)
        while lock is None:  # another one where it was taken for a leftover before it was locked
            hidden = target.parent / f"{prefix}{secrets.token_hex(8)}"
            hidden.mkdir(mode=0o700)
            lock = _lock(hidden)
        assert hidden is not None
        yield hidden, target
        finish(_clear, hidden, target)
    except BaseException as error:
        if hidden is not None:
            finish(_clear, hidden, target)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            name = f" ({error.filename})" if error.filename else ""
            raise ExportError(
                f"{where}: cannot be written: {error.strerror or error}{name}; nothing was left there"
            ) from error
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends; ``None`` where it is locked or gone."""
    if sys.platform == "win32":  # folders cannot be opened there: nothing is locked, and nothing taken for a leftover
        return os.open(os.devnull, os.O_RDONLY)
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return descriptor
        os.close(descriptor)
    return None


def _recover(target: Path, prefix: str) -> None:
    """Clear the hidden folders that killed processes left beside a destination."""
    if sys.platform == "win32":
        return
    for leftover in target.parent.glob(f"{prefix}*"):
        with contextlib.suppress(PermissionError):  # another user's
            lock = _lock(leftover)
            if lock is not None:
                try:
                    _clear(leftover, target)
                finally:
                    os.close(lock)


def _clear(hidden: Path, target: Path) -> None:
    """Remove a hidden folder; the old content goes back if nothing is at the destination now."""
    old = hidden / _OLD
    if old.exists():
        # Renamed in either case, so that a partly removed folder is never taken for the old content.
        os.rename(old, hidden / "replaced" if os.path.lexists(target) else target)
    shutil.rmtree(hidden, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step; false where the system cannot."""
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    at_working_directory, exchange = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h
    paths = os.fsencode(first), os.fsencode(second)
    return bool(renameat2(at_working_directory, paths[0], at_working_directory, paths[1], exchange) == 0)
