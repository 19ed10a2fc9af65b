"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from huggingface_hub import constants

if sys.platform != "win32":
    import fcntl

from ..config import StrPath
from ..edits.journal import finish
from ..errors import ExportError
from ..reports import first_of

# Names in the hidden folder: the new content; the old files while they are moved out,
# and when all of them are.
_NEW, _OLD, _REPLACED = "new", "old", "replaced"
_HIDDEN = ".kbitwrap-"
# A folder without them is taken for no checkpoint.
_LAST = ("adapter_config.json", "config.json")
_MOST_NAMED = 5

Owns = Callable[[Path], bool]
"""Tells of a file or a folder at a destination whether overwriting replaces it."""


def refuse_special(path: StrPath) -> None:
    """Raise ``OSError`` for what is there and no file.

    Reading a pipe waits for a writer, and a device has no end.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a file", os.fspath(path))


@contextlib.contextmanager
def staged(
    destination: StrPath,
    *,
    overwrite: bool = False,
    owns: Owns = lambda path: False,
    sources: Iterable[object] = (),
) -> Iterator[Path]:
    """Yield a hidden folder whose content is at the destination when the body ends.

    It is gone if the body raises. An empty folder may stand at the destination. With
    ``overwrite``, files may lie in it: they are replaced if ``owns`` tells all of them.
    Nothing is flushed, as when the libraries save a checkpoint: a power failure loses
    what the system has not written by then.
    """
    where = os.fspath(destination)
    _refuse_sources(_resolved(destination), where, sources)
    with beside(destination) as (hidden, target):
        _refuse_strange(target, where, owns, overwrite)
        folder = hidden / _NEW
        folder.mkdir()
        yield folder
        _refuse_strange(target, where, owns, overwrite)
        try:
            os.rename(folder, target)
        except OSError:  # it is not empty, or no folder can be renamed there
            target.mkdir(exist_ok=True)
            _replace_files(hidden, target)


def atomic_write(path: StrPath, data: bytes, owns: Owns) -> None:
    """Write a file, or replace one that ``owns`` tells.

    It is whole, or as it was where `ExportError` is raised.
    """
    with beside(path) as (hidden, target):
        if os.path.lexists(target) and not (target.is_file() and owns(target)):
            found = "a folder" if target.is_dir() else "another file"
            raise ExportError(
                f"{os.fspath(path)}: expected nothing, or a file that a save has "
                f"written before, found {found}; nothing was written: choose another "
                "name"
            )
        with open(hidden / _NEW, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden / _NEW, target)


# --------------------------------------------------------------------------------------
# What is refused.
# --------------------------------------------------------------------------------------


def _refuse_strange(target: Path, where: str, owns: Owns, overwrite: bool) -> None:
    """Raise where something is at the destination that must not be replaced.

    It is asked again when the new content is there: others may have written meanwhile.
    """
    if not os.path.lexists(target):
        return

    if not target.is_dir():
        raise ExportError(
            f"{where}: expected a folder or nothing, found a file; nothing was written"
        )

    entries = sorted(
        entry for entry in target.iterdir() if not entry.name.startswith(_HIDDEN)
    )
    if entries and not overwrite:
        raise ExportError(
            f"{where}: exists and is not empty; choose another folder, or replace this "
            "one (overwrite=True, --overwrite)"
        )

    strange = [entry.name for entry in entries if entry.is_symlink() or not owns(entry)]
    if not strange:
        return

    named = first_of([repr(name) for name in strange], _MOST_NAMED)
    raise ExportError(
        f"{where}: holds what overwriting would delete and no checkpoint of this kind "
        f"consists of: {named}; nothing was written: move that away, or choose another "
        "destination"
    )


def _refuse_sources(target: Path, where: str, sources: Iterable[object]) -> None:
    """Raise where a destination is, holds or lies in one of the sources, by whatever link."""
    for given in sources:
        if not isinstance(given, (str, os.PathLike)) or not os.path.exists(given):
            continue
        source = Path(os.path.realpath(given))
        # the source, and the folders that hold it, or what links in it lead to
        held = {source, *source.parents}
        for entry in source.iterdir() if source.is_dir() else []:
            if entry.is_symlink():
                held.update(Path(os.path.realpath(entry)).parents)
        if target in held or source in target.parents:
            raise ExportError(
                f"{where}: is, holds or lies in {os.fspath(given)!r}, which is read; "
                "nothing was written: choose a destination outside"
            )


# --------------------------------------------------------------------------------------
# The hidden folder.
# --------------------------------------------------------------------------------------


@contextlib.contextmanager
def beside(path: StrPath) -> Iterator[tuple[Path, Path]]:
    """Make a hidden folder in a folder, or beside a file, and remove it in the end.

    It is locked while its process lives.
    """
    where, target = os.fspath(path), _resolved(path)
    made = [parent for parent in target.parents if not os.path.lexists(parent)]
    # A hash, because the destination's own name may be as long as names can be.
    prefix = f"{_HIDDEN}{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"
    hidden = lock = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        home = target if target.is_dir() else target.parent
        # the hidden folders that killed processes left, beside the destination or in it
        found = [*target.parent.glob(f"{prefix}*"), *target.glob(f"{prefix}*")]
        for leftover in found if sys.platform != "win32" else []:
            lock = _lock(leftover)
            if lock is not None:
                _clear(leftover, target)
                os.close(lock)
                lock = None
        # another one where it was taken for a leftover before it was locked
        while lock is None:
            hidden = home / f"{prefix}{secrets.token_hex(8)}"
            hidden.mkdir(mode=0o700)
            lock = _lock(hidden)
        assert hidden is not None
        yield hidden, target
        finish(_clear, hidden, target)
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise ExportError(
            f"{where}: cannot be written: {error.strerror or error}{name}; nothing was "
            "left there"
        ) from error
    finally:
        # again, where an error came at the line above
        if hidden is not None:
            finish(_clear, hidden, target)
        for parent in made:
            with contextlib.suppress(OSError):  # not empty
                parent.rmdir()
        if lock is not None:
            os.close(lock)


def _resolved(path: StrPath) -> Path:
    """Return the path without links.

    `ExportError` is raised for what is no path, or lies in the hub's cache.
    """
    if not os.fspath(path):
        raise ExportError("'': expected a path; '.' is the working directory")
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a NUL
        raise ExportError(f"{os.fspath(path)!r}: not a valid path: {error}") from error

    # A base that was given by its name lies in the cache, and so do others' models.
    cache = Path(os.path.realpath(constants.HF_HUB_CACHE))
    if cache in (target, *target.parents):
        raise ExportError(
            f"{os.fspath(path)}: {os.fspath(cache)!r} is the hub's cache, from which "
            "other programs load; nothing was written: choose a destination outside"
        )

    return target


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends.

    ``None`` is returned where it is locked, gone or another user's.
    """
    # folders cannot be opened there: nothing is locked, and nothing taken for a
    # leftover
    if sys.platform == "win32":
        return os.open(os.devnull, os.O_RDONLY)

    with contextlib.suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return descriptor
        os.close(descriptor)

    return None


def _clear(hidden: Path, target: Path) -> None:
    """Remove a hidden folder.

    A replacement of files that was stopped is taken back first; it is completed where
    all old files were out.
    """
    if (hidden / _OLD).exists():
        _move(_in_order(hidden / _OLD), target)
    elif (hidden / _REPLACED).exists() and (hidden / _NEW).exists():
        _move(_in_order(hidden / _NEW), target)
    shutil.rmtree(hidden, ignore_errors=True)


def _replace_files(hidden: Path, target: Path) -> None:
    """Put the new files in the place of those in a folder.

    At no moment is it a checkpoint of both old and new ones.
    """
    new, old = hidden / _NEW, hidden / _OLD
    old.mkdir()
    _move(reversed(_in_order(target)), old)
    # If the process stops after this line, `_clear` continues with the new content.
    os.rename(old, hidden / _REPLACED)
    _move(_in_order(new), target)
    for path in new.iterdir():
        raise FileExistsError(errno.EEXIST, "written by others", target / path.name)


def _in_order(folder: Path) -> list[Path]:
    """Return what is in a folder; without the last one the folder is taken for no checkpoint."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(_HIDDEN)]
    return sorted(entries, key=lambda path: (path.name in _LAST, path.name))


def _move(paths: Iterable[Path], folder: Path) -> None:
    """Move files to another folder; where one of the same name is there, it stays."""
    for path in paths:
        if not os.path.lexists(folder / path.name):
            os.rename(path, folder / path.name)
