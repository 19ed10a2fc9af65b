"""Files and folders that are there whole or not at all.

What a killed process left in its hidden folder says how far it came: ``new`` alone, not
begun; with ``old``, files were leaving, and are put back; with ``replaced``, all were out,
and the new ones follow. The next writing to the destination does this (`_clear`).
"""

from __future__ import annotations

import contextlib
import ctypes
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
# The errors of renaming a folder where its files can still be replaced one by one: a
# mount point, a lower layer, another user's.
_IN_PLACE = (errno.EBUSY, errno.EXDEV, errno.EPERM, errno.EACCES)
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
        # in one step where the system can, else file by file
        outside = _moved_out(hidden, target)
        is_there = False
        if outside is not None and os.path.lexists(target) and any(target.iterdir()):
            is_there = _exchange(outside / _NEW, target)
        elif outside is not None:
            try:
                # takes the place of an empty folder, and of nothing else
                os.rename(outside / _NEW, target)
                is_there = True
            except OSError as error:
                if error.errno not in _IN_PLACE:
                    raise
                target.mkdir(exist_ok=True)
        if not is_there:
            _move_in(outside or hidden, target)


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
    """Raise where a destination is, holds or lies in one of the sources, by whatever link or mount."""
    around = _identities([target, *target.parents])
    for given in sources:
        if not isinstance(given, (str, os.PathLike)):
            continue
        source = os.fspath(given)
        # the source, what links in it lead to, and the folders that hold any of these
        read = [source] if os.path.exists(source) else []
        if os.path.isdir(source):
            read += [entry.path for entry in os.scandir(source) if entry.is_symlink()]
        holding: list[Path] = []
        for path in read:
            holding += Path(os.path.realpath(path)).parents
        lies_in = _identities([source]) & around
        if lies_in or _identities([target]) & _identities(holding):
            raise ExportError(
                f"{where}: is, holds or lies in {source!r}, which is read; "
                "nothing was written: choose a destination outside"
            )


def _identities(paths: Iterable[StrPath]) -> set[tuple[int, int]]:
    """Return the device and inode of each path that is there, which tell it from all others."""
    found = set()
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(path)
            found.add((status.st_dev, status.st_ino))
    return found


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
            with contextlib.suppress(PermissionError):  # another user's
                lock = _lock(leftover)
            if lock is not None:
                _clear(leftover.name, target)
                os.close(lock)
                lock = None
        # another one where it was taken for a leftover before it was locked
        while lock is None:
            hidden = home / f"{prefix}{secrets.token_hex(8)}"
            hidden.mkdir(mode=0o700)
            lock = _lock(hidden)
        assert hidden is not None
        yield hidden, target
        finish(_clear, hidden.name, target)
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        raise ExportError(
            f"{where}: cannot be written: {error.strerror or error}{name}; nothing was "
            "left there"
        ) from error
    finally:
        # again, where an error came at the line above
        if hidden is not None:
            finish(_clear, hidden.name, target)
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
    for folder in (target, *target.parents):
        has_blobs = os.path.isdir(folder / "blobs") or os.path.isdir(folder / "refs")
        is_repository = os.path.isdir(folder / "snapshots") and has_blobs
        if folder == cache or is_repository:
            raise ExportError(
                f"{os.fspath(path)}: {os.fspath(folder)!r} is the hub's cache, from which "
                "other programs load; nothing was written: choose a destination outside"
            )

    return target


def _lock(folder: Path) -> int | None:
    """Lock a folder until the descriptor is closed or the process ends.

    ``None`` is returned where it is locked or gone.
    """
    # folders cannot be opened there: nothing is locked, and nothing taken for a
    # leftover
    if sys.platform == "win32":
        return os.open(os.devnull, os.O_RDONLY)

    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists():
                return descriptor
        os.close(descriptor)

    return None


def _clear(name: str, target: Path) -> None:
    """Remove a hidden folder.

    A replacement file by file that was stopped is taken back first; it is completed
    where all old files were out.
    """
    for hidden in (target / name, target.parent / name):
        if (hidden / _OLD).exists():
            _move(_in_order(hidden / _OLD), target)
        elif (hidden / _REPLACED).exists() and (hidden / _NEW).exists():
            _move(_in_order(hidden / _NEW), target)
        shutil.rmtree(hidden, ignore_errors=True)


# --------------------------------------------------------------------------------------
# The new content takes the place of the old.
# --------------------------------------------------------------------------------------


def _moved_out(hidden: Path, target: Path) -> Path | None:
    """Move a hidden folder out of a destination.

    ``None`` is returned where no folder of ours can take the destination's place.
    """
    if hidden.parent != target:
        return hidden

    new, old = (hidden / _NEW).stat(), target.stat()
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        return None

    is_here = _identities([target]) == _identities([os.curdir])
    if is_here or len([*target.glob(f"{_HIDDEN}*")]) > 1:
        return None

    shutil.copymode(target, hidden / _NEW)
    outside = target.parent / hidden.name
    try:
        os.rename(hidden, outside)
    # a mount point, or one in a folder of another user's
    except OSError:
        return None

    return outside


def _move_in(hidden: Path, target: Path) -> None:
    """Replace the files in a folder.

    At no moment is it a checkpoint of both old and new ones.
    """
    new, old, replaced = hidden / _NEW, hidden / _OLD, hidden / _REPLACED
    old.mkdir()
    _move(reversed(_in_order(target)), old)
    # If the process stops after this line, `_clear` continues with the new content.
    os.rename(old, replaced)
    try:
        _move(_in_order(new), target)
        # Others wrote a file of the same name meanwhile: `_move` left ours.
        for path in new.iterdir():
            raise FileExistsError(
                errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target / path.name)
            )
    except OSError:
        _move(reversed(_in_order(target)), new)
        os.rename(replaced, old)
        raise


def _in_order(folder: Path) -> list[Path]:
    """Return the files in a folder; without the last one the folder is taken for no checkpoint."""
    entries = [path for path in folder.iterdir() if not path.name.startswith(_HIDDEN)]
    return sorted(entries, key=lambda path: (path.name in _LAST, path.name))


def _move(paths: Iterable[Path], folder: Path) -> None:
    """Move files, and those in folders, to another folder.

    What has the same name there stays, and what would take its place is not moved.
    """
    for path in paths:
        there = folder / path.name
        if path.is_dir() and not path.is_symlink():
            there.mkdir(exist_ok=True)
            _move(path.iterdir(), there)
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif not os.path.lexists(there):
            os.rename(path, there)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step.

    It is false where the system, or the file system, cannot; both are as they were.
    """
    if sys.platform != "linux":
        return False

    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False

    # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h
    here, exchange = -100, 2
    code = renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange)
    return bool(code == 0)
