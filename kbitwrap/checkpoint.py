"""Reading a checkpoint: its headers at once, its tensors one at a time."""

from __future__ import annotations

import errno
import functools
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import ConfigError
from .stream import DTYPES
from .topology import canonical_fqn

_INDEX_SUFFIX = ".safetensors.index.json"
_SINGLE = "model.safetensors"
# Rounded at once, in bytes: it stays in the processor's cache, and is below the 32,768 elements from which torch takes
# several threads, whose meeting costs more than it gains, and a great deal where other processes want the cores.
_PIECE = 96 << 10
# Read and written at once, in elements: as many as an allocator gives the memory of again, as it does not with whole
# tensors.
_READ = 1 << 20
# What PEFT trains of a base module beside it has the base module's canonical name.
_TRAINED_COPY = re.compile(r"\.(modules_to_save|ln_tuning_layers)\.|\.trainable_tokens_")
# What bitsandbytes saves of an 8-bit layer beside its weight.
_EIGHT_BIT_STATE = ("SCB", "weight_format")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        path: The file.
        dtype: Its dtype.
        shape: Its shape.
        start: Where its bytes start in the file.
        num_bytes: How many there are.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def read(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Read it into memory of its own: a mapped file would count as the process's memory too.

        Args:
            dtype: Round it to this dtype, piece by piece, so that no more than the result is in memory.

        Returns:
            The tensor.

        Raises:
            OverflowError: A value is finite, and too large for ``dtype``.
        """
        result = torch.empty(self.shape, dtype=dtype or self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            self._round(result.reshape(-1), file)
        return result

    def read_pieces(self, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """Read it a few mebibytes at a time.

        Args:
            dtype: Round it to this dtype.

        Yields:
            Flat tensors, which follow one another.

        Raises:
            OverflowError: A value is finite, and too large for ``dtype``.
        """
        left = math.prod(self.shape)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start)
            while left:
                piece = torch.empty(min(left, _READ), dtype=dtype or self.dtype)
                self._round(piece, file)
                left -= len(piece)
                yield piece

    def _round(self, flat: torch.Tensor, file: io.FileIO) -> None:
        """Read what is next in the file into a flat tensor."""
        if flat.dtype == self.dtype:
            self._fill(flat, file)
            return
        piece = torch.empty(min(len(flat), _PIECE // self.dtype.itemsize), dtype=self.dtype)
        for target in flat.split(max(len(piece), 1)):
            source = piece[: len(target)]
            self._fill(source, file)
            target.copy_(source)
            # bfloat16 has the range of float32, or nearly: what lies beyond rounds to infinity as it should.
            if flat.dtype == torch.float16 and not torch.equal(target.isinf(), source.isinf()):
                raise OverflowError(f"a value is too large for {flat.dtype}, whose largest is 65504")

    def _fill(self, target: torch.Tensor, file: io.FileIO) -> None:
        left = memoryview(target.view(torch.uint8).numpy().data)
        while left:
            num_read = file.readinto(left)
            if not num_read:
                raise OSError(errno.EIO, "became shorter while it was read", str(self.path))
            left = left[num_read:]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in safetensors files.

    Attributes:
        path: What was opened: a folder or a file.
        folder: The folder that its files are in.
        files: The tensors by file and name.
        metadata: What each file says about itself.
        index: The name of the index file; ``None`` where there is none.
        config: What ``config.json`` beside it holds; empty where there is none.
    """

    path: Path
    folder: Path
    files: Mapping[str, Mapping[str, StoredTensor]]
    metadata: Mapping[str, Mapping[str, str] | None]
    index: str | None
    config: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name."""
        return {name: tensor for tensors in self.files.values() for name, tensor in tensors.items()}

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the config names; ``None`` where it names none."""
        for key in ("dtype", "torch_dtype"):
            found = getattr(torch, str(self.config.get(key)), None)
            if isinstance(found, torch.dtype):
                return found
        return None


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint. Nothing is unpickled, and no name in it is opened outside its folder.

    Args:
        path: A folder with ``model.safetensors`` or with an index and its shards, or one safetensors file.

    Returns:
        The checkpoint.

    Raises:
        ConfigError: There is none, or it is damaged or incomplete.
    """
    found = Path(path)
    # Not by methods of ``Path``, which raise where a name is too long, or a folder may not be searched.
    if os.path.isfile(found):
        if found.suffix != ".safetensors":
            raise ConfigError(f"{found}: expected a folder or a .safetensors file")
        folder, names, index = found.parent, [found.name], None
    elif os.path.isdir(found):
        folder = found
        names, index = _weight_files(found)
    else:
        raise ConfigError(f"there is no checkpoint at {str(found)!r}")
    files, metadata = {}, {}
    for name in names:
        files[name], metadata[name] = read_header(folder / name)
    config_path = folder / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    checkpoint = Checkpoint(found, folder, files, metadata, index, config)
    num_tensors = sum(map(len, files.values()))
    if len(checkpoint.tensors) < num_tensors:
        raise ConfigError(f"{found}: {num_tensors - len(checkpoint.tensors)} tensors are in more than one file")
    if index is not None:
        absent = [name for name in read_json(folder / index)["weight_map"] if name not in checkpoint.tensors]
        if absent:
            raise ConfigError(f"{folder / index}: names the tensor {absent[0]!r}, which is in none of its files")
    return checkpoint


def _weight_files(folder: Path) -> tuple[list[str], str | None]:
    """The names of the files that hold the weights, and of the index, if there is one."""
    indexes = sorted(path.name for path in folder.glob(f"*{_INDEX_SUFFIX}"))
    if indexes:
        index = f"model{_INDEX_SUFFIX}" if f"model{_INDEX_SUFFIX}" in indexes else indexes[0]
        content = read_json(folder / index)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigError(f"{folder / index}: expected a weight_map of file names")
        if not isinstance(content.get("metadata", {}), dict):
            raise ConfigError(f"{folder / index}: expected an object as its metadata")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(f"{folder / index}: names {name!r}, which is no file of its folder")
            if not os.path.isfile(folder / name):
                raise ConfigError(f"{folder / index}: names {name!r}, which is not there")
        return names, index
    if (folder / _SINGLE).is_file():
        return [_SINGLE], None
    names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_model"))
    if names:
        return names, None
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise ConfigError(
            f"{folder}: holds its weights in {pickles[0]!r}, which is pickled and not read here; load it with "
            "transformers and save it again, which writes safetensors"
        )
    raise ConfigError(f"{folder}: there are no weights in it (no model.safetensors, no index, no other .safetensors)")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Args:
        path: The file.

    Returns:
        The object.

    Raises:
        ConfigError: It cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a JSON object, found a {type(found).__name__}")
    return found


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str] | None]:
    """Read the header of a safetensors file.

    Args:
        path: The file.

    Returns:
        Its tensors by name, in the order of their bytes, and what it says about itself.

    Raises:
        ConfigError: It is damaged, or has a dtype that this torch has not.
    """
    from safetensors import SafetensorError, safe_open

    try:
        # The library checks sizes, offsets and shapes against the file.
        with safe_open(path, framework="pt"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ConfigError(f"{path}: {name}: torch {torch.__version__} has no dtype {entry['dtype']}")
        start, end = entry["data_offsets"]
        shape = list(entry["shape"])
        if math.prod(shape) * dtype.itemsize == 2 * (end - start):
            shape[-1] //= 2  # two values a byte, counted one by one
        tensors[name] = StoredTensor(path, dtype, tuple(shape), 8 + length + start, end - start)
    return tensors, metadata


def is_trained_copy(name: str) -> bool:
    """Whether a stored tensor is a copy of a base tensor that PEFT trained.

    Args:
        name: Its name in a checkpoint.

    Returns:
        Whether it is.
    """
    return _TRAINED_COPY.search(f".{name}") is not None


def is_beside(name: str, known: Mapping[str, Any]) -> bool:
    """Whether a stored tensor belongs to a known one: an adapter of its module, or its quantization.

    Args:
        name: Its name in a checkpoint.
        known: The canonical names of the base's tensors.

    Returns:
        Whether it lies below a known tensor, or below a module whose weight is known.

    Example:
        >>> known = {"model.q_proj.weight": None}
        >>> is_beside("base_model.model.model.q_proj.lora_A.default.weight", known)
        True
        >>> is_beside("model.q_proj.weight.absmax", known), is_beside("model.q_proj.bias", known)
        (True, False)
    """
    parts = canonical_fqn(name).split(".")
    owner = ".".join(parts[:-1])
    if owner in known or (parts[-1] in _EIGHT_BIT_STATE and f"{owner}.weight" in known):
        return True
    return any(f"{'.'.join(parts[:end])}.weight" in known for end in range(1, len(parts) - 1))
