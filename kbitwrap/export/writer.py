"""Checkpoints written one tensor at a time.

They are safetensors files, in shards, with their index.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..config import StrPath
from ..errors import ConfigError, ExportError
from ..tensors.dtypes import SAFETENSORS_DTYPES, TWO_A_BYTE
from ..tensors.lazy import LazyTensor, keeping_last, pieces
from .staging import Owns, staged

INDEX_NAME = "model.safetensors.index.json"
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""The files that a processor adds to those of its tokenizer."""
# What a checkpoint of a model consists of besides.
_CONFIGS = ("config.json", "generation_config.json")
_OF_TOKENIZERS = {
    *PROCESSOR_FILES,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "audio_tokenizer_config.json",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "entity_vocab.json",
    "normalizer.json",
    "prophetnet.tokenizer",
    "sentencepiece.model",
    "source.spm",
    "spm.model",
    "spm_char.model",
    "target.spm",
    "target_vocab.json",
    "vocab-src.json",
    "vocab-tgt.json",
    "word_pronunciation.json",
    "word_shape.json",
}
_WEIGHTS = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
)
CARD = "README.md"
"""The name of the model card."""
# the card of a merge, which it writes itself
_WRITTEN_CARD = re.compile(
    r"---\n(base_model: .*\n)?library_name: transformers\ntags:\n- merged\n---\n\n# .*\n\n.* Written by kbitwrap .*\n"
)
_CODES = {dtype: code for code, dtype in SAFETENSORS_DTYPES.items()}
_ORDER = {dtype: place for place, dtype in enumerate(_CODES)}
_ALIGNMENT = 8  # of the first tensor's bytes, in bytes

Tensors = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None
Progress = Callable[[int], object]
"""Called with a number of bytes each time that as many were written."""
Reported = Progress | bool | None
"""The way to tell of the bytes written: by a function, by a bar or not at all.

``None`` shows a bar on a terminal.
"""


@dataclass
class CheckpointWriter:
    """Writes the tensors of a checkpoint into a folder, and counts them."""

    folder: Path
    progress: Progress | None = None
    num_tensors: int = 0
    num_bytes: int = 0
    # all in the folder, relative to it and sorted; empty until the writing ends
    files: tuple[str, ...] = ()

    def save(
        self,
        tensors: Tensors,
        files: Mapping[str, Iterable[str]],
        metadata: Metadata,
        index_name: str | None = None,
        index: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the tensors named for each file.

        An index is written where there are several files, or it is named.
        """
        where = {}
        for file, names in files.items():
            chosen = {name: tensors[name] for name in names}
            path = self.folder / file
            write_safetensors(path, chosen, metadata, progress=self.progress)
            where.update(dict.fromkeys(chosen, file))
            self.num_tensors += len(chosen)
            self.num_bytes += sum(tensor.nbytes for tensor in chosen.values())

        if index_name is None and len(files) < 2:
            return

        content = dict(index or {})
        old = content.get("metadata", {})
        content["metadata"] = {**old, "total_size": self.num_bytes}
        content["weight_map"] = where
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self.folder / (index_name or INDEX_NAME)).write_text(text, encoding="utf-8")


def is_of_a_model(path: Path) -> bool:
    """Tell whether a path is a file, by its name, of a model's checkpoint, which another one replaces."""
    if path.name == CARD and path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
        return _WRITTEN_CARD.fullmatch(text) is not None
    is_small = path.name in _CONFIGS or is_of_a_tokenizer(path.name)
    return path.is_file() and (is_small or bool(_WEIGHTS.fullmatch(path.name)))


def is_of_a_tokenizer(name: str) -> bool:
    """Tell whether a file, by its name, is one of a tokenizer or a processor."""
    return name in _OF_TOKENIZERS or name.endswith(".tiktoken")


@contextlib.contextmanager
def checkpoint_writer(
    path: StrPath,
    task: str,
    *,
    overwrite: bool,
    progress: Reported,
    sources: Iterable[object],
    owns: Owns = is_of_a_model,
    num_bytes: int | None = None,
) -> Iterator[CheckpointWriter]:
    """Write a checkpoint as `staged` writes a folder, and tell of the bytes."""
    told = progress if callable(progress) else None
    with contextlib.ExitStack() as stack:
        staging = staged(path, overwrite=overwrite, owns=owns, sources=sources)
        folder = stack.enter_context(staging)
        # a bar of tqdm starts a thread that stays, shown or not
        if progress is None or progress is True:
            bar = tqdm(
                total=num_bytes,
                desc=task,
                unit="B",
                unit_scale=True,
                disable=None if progress is None else False,
                leave=False,
            )
            told = stack.enter_context(bar).update
        writer = CheckpointWriter(folder, told)
        yield writer
        found = [path for path in folder.rglob("*") if path.is_file()]
        names = [path.relative_to(folder).as_posix() for path in found]
        writer.files = tuple(sorted(names))


def split_into_files(
    tensors: Tensors, max_shard_size: int | str
) -> dict[str, list[str]]:
    """Return the names of each file's tensors.

    `ConfigError` is raised for a size that is neither bytes nor like ``"5GB"``.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    is_bytes = type(max_shard_size) is int and max_shard_size > 0
    if is_bytes or isinstance(max_shard_size, str):
        with contextlib.suppress(ValueError):  # of the string
            split = split_torch_state_dict_into_shards(
                dict(tensors), max_shard_size=max_shard_size
            )
            return dict(split.filename_to_tensors)

    raise ConfigError(
        "max_shard_size: expected bytes or a string such as '5GB', found "
        f"{max_shard_size!r}"
    )


def write_safetensors(
    path: StrPath,
    tensors: Tensors,
    metadata: Metadata = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Write the file that ``safetensors.torch.save_file`` would, metadata sorted.

    One tensor's values are in memory at a time. No file is left after an error.
    """
    header, offsets = _header(tensors, metadata)
    announced = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    try:
        with open(path, "wb") as file, keeping_last():
            # a full disk is noticed before anything is computed
            if sys.platform == "linux":
                num_bytes = sum(tensor.nbytes for tensor in tensors.values())
                try:
                    os.posix_fallocate(file.fileno(), 0, len(header) + num_bytes)
                except OSError as error:
                    unsupported = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
                    if error.errno not in unsupported:
                        raise
            file.write(header)
            for name in by_lineage(tensors, offsets):
                file.seek(len(header) + offsets[name])
                dtype, shape = announced[name]
                left = shape.numel()
                is_same = tensors[name].shape == shape
                for piece in pieces(tensors[name]):
                    is_same = is_same and piece.dtype == dtype
                    left -= piece.numel()
                    file.write(piece.reshape(-1).view(torch.uint8).numpy().data)
                    if progress is not None:
                        progress(piece.nbytes)
                    del piece  # its memory is free while the next one is computed

                if left or not is_same:
                    raise ExportError(
                        f"{name}: expected {shape.numel()} values of {dtype} in the "
                        f"shape {tuple(shape)}, found others: the tensor changed while "
                        "it was exported; export while nothing changes it",
                        fqn=name,
                    )
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _header(tensors: Tensors, metadata: Metadata) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the tensors, and each tensor's offset after them, in the order of the file."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _CODES:
            raise ExportError(
                f"{name}: safetensors files cannot hold tensors of {tensor.layout} and "
                f"{tensor.dtype}; convert it first",
                fqn=name,
            )

    entries: dict[str, object] = {}
    if metadata is not None:
        entries["__metadata__"] = dict(sorted(metadata.items()))

    offsets = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name)):
        tensor = tensors[name]
        offsets[name], end = end, end + tensor.nbytes
        code, shape = _CODES[tensor.dtype], [*tensor.shape]
        if code == TWO_A_BYTE:
            shape[-1] *= 2
        place = [offsets[name], end]
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": place}

    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the entries of a safetensors file's header, and where the tensors' bytes begin.

    ``__metadata__`` is one of the entries.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def by_lineage(tensors: Tensors, names: Iterable[str]) -> list[str]:
    """Sort names so that tensors made from the same lazy tensor, which is computed once, follow one another."""
    places: dict[int, int] = {}
    keys = {}
    for name in names:
        tensor = tensors[name]
        lineage = tensor.lineage if isinstance(tensor, LazyTensor) else (tensor,)
        keys[name] = [places.setdefault(id(part), len(places)) for part in lineage]
    return sorted(keys, key=lambda name: keys[name])
