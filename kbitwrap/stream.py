"""Writing: safetensors files one tensor at a time, and files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

if sys.platform != "win32":
    import fcntl

from .dtypes import SAFETENSORS_DTYPES
from .errors import ExportError
from .lazy import LazyTensor, keeping_last, pieces

_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_CODES)}
_TWO_A_BYTE = "F4"
_ALIGNMENT = 8  # of the first tensor's bytes, in bytes
_PIECE = 16 << 20  # written at once, in bytes
_SMALL = 1 << 20
_MOVED = "-moved"  # ends the name of what was moved out of the way


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    progress: Callable[[int], object] | None = None,
) -> int:
    """Write a safetensors file, with the values of two tensors in memory at most: one is written, the next computed.

    The file is, byte for byte, what ``safetensors.torch.save_file`` writes (which puts two and more entries of
    ``metadata`` in random order; here they are sorted). Tensors that are not contiguous are made so; tensors that
    share memory are written each by itself. What is cut from one lazy tensor is computed from it once.

    Args:
        path: The file; one that exists is overwritten.
        tensors: Dense tensors by name, lazy or not, on any device.
        metadata: What the file says about itself.
        progress: Called with the number of bytes after each piece written.

    Returns:
        The bytes of the tensors, in bytes.

    Raises:
        ExportError: A tensor is not dense, or of a dtype that the format does not have, or its pieces are not the whole
            of it; nothing is left.
        OSError: The file cannot be written; nothing is left. `staged` makes it an ``ExportError``.
    """
    header, offsets = _header(tensors, metadata)
    promised = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with open(path, "wb", buffering=0) as file, keeping_last():
            _reserve(file, len(header) + num_bytes)
            _write(file, header)
            with _Background(file, progress) as background:
                for name in _by_lineage(tensors, offsets):
                    offset = len(header) + offsets[name]
                    dtype, shape = promised[name]
                    left = shape.numel()
                    is_kept = tensors[name].shape == shape
                    for piece in pieces(tensors[name]):
                        left -= piece.numel()
                        is_kept &= piece.dtype == dtype
                        if left < 0 or not is_kept:  # it would be written over the next tensor, or as something else
                            break
                        background.write(offset, _bytes_of(piece))
                        offset += piece.nbytes
                        del piece  # it is not kept while the next one is computed
                    if left or not is_kept:
                        raise ExportError(
                            f"{name}: expected {shape.numel()} values of {dtype} in the shape {tuple(shape)}, found "
                            "others: it changed while it was exported; export while nothing replaces or resizes it",
                            fqn=name,
                        )
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return num_bytes


def _header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and where in what follows each tensor starts, in the order of the file."""
    for name, tensor in tensors.items():
        found = ""
        if tensor.layout != torch.strided:
            found = f"layout {tensor.layout}"
        elif tensor.dtype not in _CODES:
            found = f"dtype {tensor.dtype}"
        elif _CODES[tensor.dtype] == _TWO_A_BYTE and not tensor.shape:
            found = f"shape () and dtype {tensor.dtype}"
        if found:
            raise ExportError(f"{name}: safetensors files hold no tensors of {found}; convert it first", fqn=name)
    entries: dict[str, object] = {}
    if metadata is not None:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    offsets = {}
    start = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name)):
        tensor = tensors[name]
        shape = list(tensor.shape)
        code = _CODES[tensor.dtype]
        if code == _TWO_A_BYTE:
            shape[-1] *= 2  # the values are counted
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, start + tensor.nbytes]}
        offsets[name] = start
        start += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


def _by_lineage(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[str]:
    """The names, those together whose tensors are made from the same lazy tensor."""
    places: dict[int, int] = {}
    keys = {}
    for name in names:
        tensor = tensors[name]
        lineage = tensor.lineage if isinstance(tensor, LazyTensor) else (tensor,)
        keys[name] = [places.setdefault(id(part), len(places)) for part in lineage]
    return sorted(keys, key=lambda name: keys[name])


def _bytes_of(values: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    if sys.byteorder == "big":
        raise ExportError("safetensors files can be written on little-endian machines only")
    return memoryview(values.reshape(-1).view(torch.uint8).numpy().data)


def _reserve(file: io.FileIO, num_bytes: int) -> None:
    """Reserve the blocks of a file: a disk that is too full is noticed before anything is computed."""
    if sys.platform != "linux":
        return
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):  # what a file system without it says
            raise


def _write(file: io.FileIO, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


class _Background:
    """Writes to a file while the next values are computed.

    At most one tensor waits to be written while another is computed.

    Args:
        file: The file.
        progress: Called with the number of bytes after each piece written.
    """

    def __init__(self, file: io.FileIO, progress: Callable[[int], object] | None) -> None:
        self._file = file
        self._progress = progress
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kbitwrap-write")
        self._pending: deque[Future[int]] = deque()

    def __enter__(self) -> _Background:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exc_type is None:
                self._wait()
        finally:
            self._writer.shutdown(cancel_futures=True)

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes at an offset, after what was to be written before them."""
        self._wait()
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if len(piece) < _SMALL:  # sooner written than handed over
                self._wait()
                self._tell(self._write_piece(offset + start, piece))
            else:
                # In a list, to be taken out of it: the writing thread holds what it was given a while after it is done.
                self._pending.append(self._writer.submit(self._take_and_write, offset + start, [piece]))

    def _take_and_write(self, offset: int, pieces: list[memoryview]) -> int:
        return self._write_piece(offset, pieces.pop())

    def _write_piece(self, offset: int, piece: memoryview) -> int:
        self._file.seek(offset)
        _write(self._file, piece)
        return len(piece)

    def _wait(self) -> None:
        while self._pending:
            self._tell(self._pending.popleft().result())

    def _tell(self, num_bytes: int) -> None:
        if self._progress is not None:
            self._progress(num_bytes)


@contextlib.contextmanager
def staged(destination: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder so that it is there whole, or not at all.

    Yields a fresh folder beside the destination, with a hidden name, which takes the destination's place in one step
    when the body ends. It is removed when the body raises. What killed processes left behind of the same destination is
    removed first. As when the libraries save a checkpoint, the system brings it to the disk in its own time: what has
    not got there is lost when the power fails.

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
    target = _target(destination)
    with _as_export_error(destination), _parents_of(target):
        _recover(target)
        _refuse_existing(target, destination, overwrite)
        with _temporary(target, os.mkdir) as folder:
            yield folder
            _refuse_existing(target, destination, overwrite)
            _put_in_place(folder, target, overwrite)


def atomic_write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that it is there whole, or as it was before.

    Args:
        path: The file; one that exists is replaced. Missing parents are made. A symbolic link is followed.
        data: What it is to hold.

    Raises:
        ExportError: It cannot be written; it is as it was before.
    """
    target = _target(path)
    with _as_export_error(path), _parents_of(target):
        _recover(target)
        with _temporary(target, _touch) as temporary:
            with open(temporary, "wb", buffering=0) as file:
                _write(file, data)
                os.fsync(file.fileno())
            os.replace(temporary, target)
        _sync(target.parent)


def _target(path: str | os.PathLike[str]) -> Path:
    if not os.fspath(path):
        raise ExportError("'': expected a path; '.' is the working directory")
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a NUL
        raise ExportError(f"{os.fspath(path)!r}: cannot be a path: {error}") from error


@contextlib.contextmanager
def _as_export_error(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ExportError(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}{where}; nothing was left there"
        ) from error


@contextlib.contextmanager
def _parents_of(target: Path) -> Iterator[None]:
    """Make the folders above a path; remove those made if the body raises."""
    made = []
    try:
        for parent in reversed(target.parents):
            if not parent.is_dir():
                parent.mkdir(exist_ok=True)
                made.append(parent)
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for parent in reversed(made):
                parent.rmdir()
        raise


def _refuse_existing(target: Path, destination: str | os.PathLike[str], overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise ExportError(f"{os.fspath(destination)}: expected a folder or nothing, found a file; nothing was written")
    entries = list(target.iterdir())
    if entries and not overwrite:
        raise ExportError(
            f"{os.fspath(destination)}: exists and is not empty; choose another folder, or have it replaced "
            "(overwrite=True, --overwrite)"
        )
    folders = [entry.name for entry in entries if entry.is_dir()]
    if folders:
        raise ExportError(
            f"{os.fspath(destination)}: holds the folder {folders[0]!r}, and would be replaced as a whole; "
            "nothing was written: remove it yourself, or choose another folder"
        )


# ----------------------------------------------------------------------------------------------------
# Temporaries: beside the destination, so that renaming is atomic, and locked while their process lives.
# ----------------------------------------------------------------------------------------------------


def _prefix(target: Path) -> str:
    """How the temporaries of a destination are named: short, because its own name may be as long as names can be."""
    return f".kbitwrap-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"


@contextlib.contextmanager
def _temporary(target: Path, make: Callable[[Path], object]) -> Iterator[Path]:
    """Make a file or a folder beside a path, locked; remove whatever is left of it in the end."""
    lock = None
    while lock is None:  # it may be taken for a leftover before it is locked
        path = target.parent / f"{_prefix(target)}{secrets.token_hex(8)}"
        make(path)
        lock = _lock(path)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a file or folder until the descriptor is closed, or the process ends, however it ends.

    Returns:
        The descriptor, or ``None`` where another process has it locked, or it is gone.
    """
    if sys.platform == "win32":  # where folders cannot be opened: nothing is locked, and nothing taken for a leftover
        return os.open(os.devnull, os.O_RDONLY)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _recover(target: Path) -> None:
    """Remove what killed processes left of a destination; put back what one of them had moved out of the way."""
    if sys.platform == "win32":
        return
    for leftover in target.parent.glob(f"{_prefix(target)}*"):
        lock = _lock(leftover)
        if lock is None:
            continue
        try:
            if leftover.name.endswith(_MOVED) and not os.path.lexists(target):
                os.rename(leftover, target)
            else:
                _remove(leftover)
        finally:
            os.close(lock)


def _put_in_place(folder: Path, target: Path, overwrite: bool) -> None:
    if not overwrite or not target.is_dir() or not any(target.iterdir()):
        os.rename(folder, target)  # takes the place of an empty folder, and of nothing else
        return
    if _exchange(folder, target):
        return  # the old one is the temporary now
    moved = folder.with_name(folder.name + _MOVED)
    lock = _lock(target)
    os.rename(target, moved)
    try:
        os.rename(folder, target)
    except BaseException:
        os.rename(moved, target)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    _remove(moved)


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


def _touch(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, has reached the disk."""
    if sys.platform == "win32" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
