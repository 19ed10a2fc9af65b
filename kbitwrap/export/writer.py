"""Checkpoints written one tensor at a time: safetensors files, in shards, with their index."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from ..errors import ConfigError, ExportError
from ..tensors.dtypes import SAFETENSORS_DTYPES, TWO_A_BYTE
from ..tensors.lazy import LazyTensor, keeping_last, pieces
from .staging import Owns, staged

INDEX_NAME = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    ),
    *(
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "tokenizer.model",
        "spiece.model",
        "sentencepiece.bpe.model",
    ),
)
"""What a tokenizer is saved as."""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What a processor adds to its tokenizer."""
_RARE_TOKENIZER_FILES = (
    *(
        "bpe.codes",
        "byte_maps.json",
        "dict.txt",
        "emoji.json",
        "entity_vocab.json",
        "normalizer.json",
    ),
    *(
        "prophetnet.tokenizer",
        "sentencepiece.model",
        "source.spm",
        "spm.model",
        "spm_char.model",
        "target.spm",
    ),
    *(
        "target_vocab.json",
        "vocab-src.json",
        "vocab-tgt.json",
        "word_pronunciation.json",
        "word_shape.json",
    ),
)
# What a checkpoint of a model consists of: the files that another one replaces.
_NAMED = (
    *("config.json", "generation_config.json", "audio_tokenizer_config.json"),
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
    *_RARE_TOKENIZER_FILES,
)
_WEIGHTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
)
_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_CODES)}
_ALIGNMENT = 8  # of the first tensor's bytes, in bytes
_PIECE = 16 << 20  # the most bytes in one write
# fewer bytes take less time to write than to hand over to another thread
_SMALL = 1 << 20

Progress = Callable[[int], object]
"""Called with a number of bytes each time that as many were written."""
Reported = Progress | bool | None
"""How to tell of the bytes written: by a function, by a bar or not at all, or (``None``) by a bar on a terminal."""


@dataclass
class CheckpointWriter:
    """Writes the tensors of a checkpoint into a folder, and counts them."""

    folder: Path
    progress: Progress | None = None
    num_tensors: int = 0
    num_bytes: int = 0
    # all in the folder, relative to it and sorted; empty until the writing ends
    files: tuple[str, ...] = ()

    def save_file(
        self,
        tensors: Mapping[str, torch.Tensor],
        path: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write one file and count its tensors; called as ``safetensors.torch.save_file`` is."""
        self.num_bytes += write_safetensors(
            path, tensors, metadata, progress=self.progress
        )
        self.num_tensors += len(tensors)

    def save(
        self,
        tensors: Mapping[str, torch.Tensor],
        files: Mapping[str, Iterable[str]],
        metadata: Mapping[str, str] | None,
        index_name: str | None = None,
        index: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the tensors named for each file, and an index where there are several files or it is named."""
        for file, names in files.items():
            chosen = {name: tensors[name] for name in names}
            self.save_file(chosen, self.folder / file, metadata)
        if index_name is None and len(files) < 2:
            return
        old = dict(index or {})
        content = {
            **old,
            "metadata": {**old.get("metadata", {}), "total_size": self.num_bytes},
            "weight_map": {
                name: file for file, names in files.items() for name in names
            },
        }
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self.folder / (index_name or INDEX_NAME)).write_text(text, encoding="utf-8")


def is_of_a_model(path: Path) -> bool:
    """Whether a file, by its name, is one of a model's checkpoint."""
    return path.name in _NAMED or _WEIGHTS.fullmatch(path.name) is not None


@contextlib.contextmanager
def checkpoint_writer(
    path: str | os.PathLike[str],
    task: str,
    *,
    overwrite: bool,
    progress: Reported,
    sources: Iterable[object],
    owns: Owns = is_of_a_model,
    num_bytes: int | None = None,
) -> Iterator[CheckpointWriter]:
    """Write a checkpoint as `staged` writes a folder, and tell of the bytes."""
    disable = None if progress is None else progress is not True
    with staged(path, overwrite=overwrite, owns=owns, sources=sources) as folder:
        with tqdm(
            total=num_bytes,
            desc=task,
            unit="B",
            unit_scale=True,
            disable=disable,
            leave=False,
        ) as bar:
            writer = CheckpointWriter(
                folder, progress if callable(progress) else bar.update
            )
            yield writer
        writer.files = tuple(
            sorted(
                p.relative_to(folder).as_posix()
                for p in folder.rglob("*")
                if p.is_file()
            )
        )


def split_into_files(
    tensors: Mapping[str, torch.Tensor], max_shard_size: int | str
) -> dict[str, list[str]]:
    """The names of each file's tensors; raises `ConfigError` for a size that is neither bytes nor like ``"5GB"``."""
    from huggingface_hub import split_torch_state_dict_into_shards

    if isinstance(max_shard_size, str) or (
        type(max_shard_size) is int and max_shard_size > 0
    ):
        with contextlib.suppress(ValueError):  # of the string
            split = split_torch_state_dict_into_shards(
                dict(tensors), max_shard_size=max_shard_size
            )
            return dict(split.filename_to_tensors)
    raise ConfigError(
        f"max_shard_size: expected bytes or a string such as '5GB', found {max_shard_size!r}"
    )


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    progress: Progress | None = None,
) -> int:
    """Write the file that ``safetensors.torch.save_file`` would, with sorted metadata; return the tensors' bytes."""
    # At most two tensors' values are in memory, one being written and one computed; no
    # file is left after an error.
    if sys.byteorder == "big":
        raise ExportError(
            "safetensors files can be written on little-endian machines only"
        )
    header, offsets = _header(tensors, metadata)
    announced = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with open(path, "wb", buffering=0) as file, keeping_last():
            _reserve(file, len(header) + num_bytes)
            _write_at(file, 0, [memoryview(header)], None)
            with _in_background(file, progress) as write:
                for name in by_lineage(tensors, offsets):
                    offset = len(header) + offsets[name]
                    dtype, shape = announced[name]
                    left = shape.numel()
                    is_as_announced = tensors[name].shape == shape
                    for piece in pieces(tensors[name]):
                        left -= piece.numel()
                        is_as_announced &= piece.dtype == dtype and left >= 0
                        # it would overwrite the next tensor, or be read as another
                        # dtype
                        if not is_as_announced:
                            break
                        write(
                            offset,
                            memoryview(
                                piece.reshape(-1).view(torch.uint8).numpy().data
                            ),
                        )
                        offset += piece.nbytes
                        del piece  # its memory is free while the next one is computed
                    if left or not is_as_announced:
                        raise ExportError(
                            f"{name}: expected {shape.numel()} values of {dtype} in the shape {tuple(shape)}, found "
                            "others: the tensor changed while it was exported; export while nothing changes it",
                            fqn=name,
                        )
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    return num_bytes


def _header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the tensors, and each tensor's offset after them, in the order of the file."""
    for name, tensor in tensors.items():
        found = ""
        if tensor.layout != torch.strided:
            found = f"layout {tensor.layout}"
        elif tensor.dtype not in _CODES:
            found = f"dtype {tensor.dtype}"
        elif _CODES[tensor.dtype] == TWO_A_BYTE and not tensor.shape:
            found = f"shape () and dtype {tensor.dtype}"
        if found:
            raise ExportError(
                f"{name}: safetensors files cannot hold tensors of {found}; convert it first",
                fqn=name,
            )
    entries: dict[str, object] = (
        {} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}
    )
    offsets = {}
    start = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name)):
        tensor = tensors[name]
        shape = list(tensor.shape)
        code = _CODES[tensor.dtype]
        if code == TWO_A_BYTE:
            shape[-1] *= 2
        entries[name] = {
            "dtype": code,
            "shape": shape,
            "data_offsets": [start, start + tensor.nbytes],
        }
        offsets[name] = start
        start += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file's header, ``__metadata__`` included, and the offset of the tensors' bytes."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def by_lineage(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> list[str]:
    """The names, sorted so that tensors made from the same lazy tensor follow one another."""
    places: dict[int, int] = {}
    keys = {}
    for name in names:
        tensor = tensors[name]
        lineage = tensor.lineage if isinstance(tensor, LazyTensor) else (tensor,)
        keys[name] = [places.setdefault(id(part), len(places)) for part in lineage]
    return sorted(keys, key=lambda name: keys[name])


def _reserve(file: io.FileIO, num_bytes: int) -> None:
    """Reserve the blocks of a file, so that a full disk is noticed before anything is computed."""
    if sys.platform != "linux":
        return
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        # from file systems that cannot
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


@contextlib.contextmanager
def _in_background(
    file: io.FileIO, progress: Progress | None
) -> Iterator[Callable[[int, memoryview], None]]:
    """Yield a function that writes at an offset of a file in another thread, one call at a time."""
    pending: list[Future[None]] = []

    def wait() -> None:
        while pending:
            pending.pop().result()

    def write(offset: int, data: memoryview) -> None:
        wait()
        if len(data) < _SMALL:
            _write_at(file, offset, [data], progress)
        else:
            pending.append(thread.submit(_write_at, file, offset, [data], progress))

    with ThreadPoolExecutor(1, thread_name_prefix="kbitwrap-write") as thread:
        yield write
        wait()


def _write_at(
    file: io.FileIO, offset: int, data: list[memoryview], progress: Progress | None
) -> None:
    """Write the bytes in a list, and take them out: a thread holds its arguments for a while after it has finished."""
    left = data.pop()
    file.seek(offset)
    while left:
        num_bytes = file.write(left[:_PIECE])
        left = left[num_bytes:]
        if progress is not None:
            progress(num_bytes)
