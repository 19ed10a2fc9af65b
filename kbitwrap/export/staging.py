"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

if sys.platform != "win32":
    import fcntl

from ..errors import ExportError

# In the hidden folder beside a destination: what takes its place, and what stood there and was moved out of the way.
_NEW, _OLD = "new", "old"


@contextlib.contextmanager
def staged(destination: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder so that it is there whole, or not at all.

    The folder is written in a hidden one beside the destination and takes its place in one step when the body ends; it
    is removed when the body raises. What killed processes left there of the same destination is removed first. As when
    the libraries save a checkpoint, nothing is flushed: a power failure loses what the system has not written by then.

    An empty folder may stand at the destination. With ``overwrite``, any other folder without subfolders may, and is
    replaced as a whole; a crash leaves the old one or the new one.

    Args:
        destination: The folder to make; missing parents are made too. A symbolic link is followed.
        overwrite: Replace a folder that is not empty.

    Yields:
        The folder to write to.

    Raises:
        ExportError: Something stands at the destination (nothing was written), or writing failed (nothing is left).
    """
    with _beside(destination) as (hidden, target):
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
    """Write a file so that it is there whole, or as it was before.

    Args:
        path: The file; one that exists is replaced. Missing parents are made. A symbolic link is followed.
        data: The content.

    Raises:
        ExportError: It cannot be written; it is as it was before.
    """
    with _beside(path) as (hidden, target):
        with open(hidden / _NEW, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden / _NEW, target)


def _check_replaceable(target: Path, destination: str | os.PathLike[str], overwrite: bool) -> bool:
    """Whether a folder that is not empty is to be replaced; raises where what stands there may not be."""
    where = os.fspath(destination)
    if not os.path.lexists(target):
        return False
    if not target.is_dir():
        raise ExportError(f"{where}: expected a folder or nothing, found a file; nothing was written")
    entries = list(target.iterdir())
    if entries and not overwrite:
        raise ExportError(
            f"{where}: exists and is not empty; choose another folder, or have it replaced "
            "(overwrite=True, --overwrite)"
        )
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        raise ExportError(
            f"{where}: holds the folder {folders[0]!r}, and would be replaced as a whole; nothing was written: remove "
            "it yourself, or choose another folder"
        )
    return bool(entries)


@contextlib.contextmanager
def _beside(path: str | os.PathLike[str]) -> Iterator[tuple[Path, Path]]:
    """Make a hidden folder beside a path, so that a rename between them is atomic, and clear it in the end.

    It is locked while its process lives: one that is not locked was left by a killed process.
    """
    where = os.fspath(path)
    if not where:
        raise ExportError("'': expected a path; '.' is the working directory")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL
        raise ExportError(f"{where!r}: cannot be a path: {error}") from error
    made = [parent for parent in target.parents if not os.path.lexists(parent)]
    # Short, because the destination's own name may be as long as names can be.
    prefix = f".kbitwrap-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _recover(target, prefix)
        hidden, lock = _make(target.parent, prefix)
        try:
            yield hidden, target
        finally:
            _clear(hidden, target, lock)
    except BaseException as error:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            name = f" ({error.filename})" if error.filename else ""
            raise ExportError(
                f"{where}: cannot be written: {error.strerror or error}{name}; nothing was left there"
            ) from error
        raise


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a hidden folder and lock it; another one where it was taken for a leftover in between."""
    while True:
        hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _lock(hidden)
        if lock is not None:
            return hidden, lock


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
    """Clear what killed processes left of a destination."""
    if sys.platform == "win32":
        return
    for leftover in target.parent.glob(f"{prefix}*"):
        with contextlib.suppress(PermissionError):  # another user's
            lock = _lock(leftover)
            if lock is not None:
                _clear(leftover, target, lock)


def _clear(hidden: Path, target: Path, lock: int) -> None:
    """Remove a hidden folder, then its lock; what stood at the destination goes back if nothing is there now."""
    try:
        old = hidden / _OLD
        if old.exists():
            # Renamed in either case: what was partly removed is never taken for the old folder.
            os.rename(old, hidden / "replaced" if os.path.lexists(target) else target)
        shutil.rmtree(hidden, ignore_errors=True)
    finally:
        os.close(lock)


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
