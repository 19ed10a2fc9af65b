"""Reading a checkpoint: its headers at once, its tensors one at a time."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..errors import ConfigError, ExportError
from ..export.staging import refuse_special
from ..export.writer import read_header
from ..manifest.manifest import MANIFEST_NAME, Manifest
from ..model.pretrained import meta_model
from ..model.wrappers import canonical_fqn
from ..tensors.dtypes import SAFETENSORS_DTYPES, TWO_A_BYTE, find_dtype
from ..tensors.lazy import LazyTensor

# The ways to store weights, the best first: the name of a single file, and the
# beginning of the names of several.
_WAYS = (("model.safetensors", ""), ("pytorch_model.bin", "pytorch_model"))
_ADAPTER = "adapter_model"
_PICKLED = ".bin"
# The bytes rounded at once: they fit the processor's cache, and are below the 32,768
# elements from which torch takes several threads, which cost more than they gain, and
# much more where other processes want the cores.
_PIECE = 96 << 10
# The elements read and written at once: few enough for the allocator to reuse their
# memory.
_READ = 1 << 20
# PEFT's trained copies of a base tensor, which have its canonical name.
_TRAINED_COPY = re.compile(
    r"\.(modules_to_save|ln_tuning_layers)\.|\.trainable_tokens_"
)
EIGHT_BIT_STATE = ("SCB", "weight_format")
"""The names of what bitsandbytes saves of an 8-bit layer beside its weight."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose bytes begin at ``start``."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def lazy(self, dtype: torch.dtype | None = None) -> LazyTensor:
        """The values, read when they are asked for and rounded to a dtype; `ExportError` then if one is too large."""
        kept = dtype or self.dtype

        def compute() -> torch.Tensor:
            return torch.cat(
                [torch.empty(0, dtype=kept, device="cpu"), *self._pieces(kept)]
            ).view(self.shape)

        return LazyTensor(
            self.shape, kept, compute, functools.partial(self._pieces, kept)
        )

    def _pieces(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Read a few mebibytes at a time; nothing is mapped, because a mapped file counts as memory in use."""
        left = math.prod(self.shape)
        with open(self.path, "rb") as file:
            file.seek(self.start)
            while left:
                piece = torch.empty(min(left, _READ), dtype=dtype, device="cpu")
                self._round(piece, file)
                left -= len(piece)
                yield piece

    def _round(self, flat: torch.Tensor, file: BinaryIO) -> None:
        """Fill a flat tensor with the next values of the file, rounded to its dtype."""
        if flat.dtype == self.dtype:
            self._fill(flat, file)
            return
        piece = torch.empty(
            min(len(flat), _PIECE // self.dtype.itemsize),
            dtype=self.dtype,
            device="cpu",
        )
        for target in flat.split(max(len(piece), 1)):
            source = piece[: len(target)]
            self._fill(source, file)
            target.copy_(source)
            # bfloat16 has nearly the range of float32: larger values round to infinity
            # as they should.
            if flat.dtype == torch.float16 and not torch.equal(
                target.isinf(), source.isinf()
            ):
                raise ExportError(
                    f"{self.name}: a value is too large for {flat.dtype}, whose largest is 65504; convert to bfloat16",
                    fqn=self.name,
                )

    def _fill(self, target: torch.Tensor, file: BinaryIO) -> None:
        if file.readinto(target.view(torch.uint8).numpy().data) < target.nbytes:  # type: ignore[attr-defined]
            raise OSError(
                errno.EIO, "the file became shorter while it was read", str(self.path)
            )


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in safetensors files, or in those that ``torch.save`` wrote."""

    path: Path  # the folder or the file that was opened
    folder: Path
    # by file and name, without those that loading ties to others
    files: Mapping[str, Mapping[str, StoredTensor]]
    metadata: Mapping[str, Mapping[str, str] | None]  # by file
    index: str | None  # the name of the index file
    # the content of ``config.json``; empty where there is none
    config: Mapping[str, Any]

    @functools.cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by name."""
        return {
            name: tensor
            for tensors in self.files.values()
            for name, tensor in tensors.items()
        }

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that the config names; ``None`` where it names none."""
        return config_dtype(self.config)

    def meta_model(self, dtype: torch.dtype | None = None) -> Any:
        """The model that the config describes, on the meta device; ``None`` where transformers knows no such model."""
        try:
            return meta_model(self.folder, dtype=dtype) if self.config else None
        except ConfigError:
            return None


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that the content of a ``config.json`` names; ``None`` where it names none."""
    return find_dtype(config.get("dtype")) or find_dtype(config.get("torch_dtype"))


def open_checkpoint(path: str | os.PathLike[str]) -> SavedCheckpoint:
    """Read the headers of a checkpoint in a folder or a file; raise `ConfigError` where it is damaged or incomplete.

    Nothing in it is run, and no name in it is opened outside its folder.
    """
    found = Path(path)
    # Not by methods of ``Path``, which raise where a name is too long, or a folder may
    # not be searched.
    if os.path.isfile(found):
        if found.suffix not in (".safetensors", _PICKLED):
            raise ConfigError(
                f"{found}: expected a folder, or a .safetensors or .bin file"
            )
        folder, names, index = found.parent, [found.name], None
    elif os.path.isdir(found):
        folder = found
        names, index = _weight_files(found)
    else:
        raise ConfigError(f"there is no checkpoint at {str(found)!r}")
    files, metadata = {}, {}
    for name in names:
        files[name], metadata[name] = read_tensors(folder / name)
    config_path = folder / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    checkpoint = SavedCheckpoint(found, folder, files, metadata, index, config)
    num_tensors = sum(map(len, files.values()))
    if len(checkpoint.tensors) < num_tensors:
        raise ConfigError(
            f"{found}: {num_tensors - len(checkpoint.tensors)} tensors are in more than one file"
        )
    if index is not None:
        absent = [
            name
            for name in read_json(folder / index)["weight_map"]
            if name not in checkpoint.tensors
        ]
        if absent:
            raise ConfigError(
                f"{folder / index}: names the tensor {absent[0]!r}, which none of its files holds"
            )
    return _without_ties(checkpoint)


def _without_ties(checkpoint: SavedCheckpoint) -> SavedCheckpoint:
    """Leave out tensors that share another's bytes, as in files of ``torch.save``, and are tied to it by loading."""
    sharing: dict[tuple[Any, ...], set[str]] = {}
    for name, stored in checkpoint.tensors.items():
        sharing.setdefault(
            (stored.path, stored.start, stored.shape, stored.dtype), set()
        ).add(canonical_fqn(name))
    groups = [names for names in sharing.values() if len(names) > 1]
    model = checkpoint.meta_model() if groups else None
    if model is None:  # its ties are not known
        return checkpoint
    ties = [(first, fqn) for first, *others in tied_names(model) for fqn in others]
    tied = {
        fqn for first, fqn in ties if any({first, fqn} <= names for names in groups)
    }
    files = {
        file: {
            name: stored
            for name, stored in tensors.items()
            if canonical_fqn(name) not in tied
        }
        for file, tensors in checkpoint.files.items()
    }
    return dataclasses.replace(checkpoint, files=files)


def tied_names(model: Any) -> list[list[str]]:
    """The names of each parameter of a model that has several."""
    found: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(fqn)
    return [names for names in found.values() if len(names) > 1]


def adapter_file(folder: Path) -> Path | None:
    """The file of the adapter that PEFT saved in a folder; of one in both formats, the safetensors file."""
    files = [folder / f"{_ADAPTER}{suffix}" for suffix in (".safetensors", _PICKLED)]
    return next((file for file in files if file.is_file()), None)


def saved_manifest(folder: Path) -> Manifest | None:
    """The manifest that was saved in a folder; `ManifestError` where it cannot be read."""
    path = folder / MANIFEST_NAME
    return Manifest.load(path) if path.is_file() else None


def recorded_quantization(manifest: Manifest) -> dict[str, Any] | None:
    """How to quantize a base so that it has the layers that a manifest records; ``None`` of an unquantized one."""
    config = manifest.model.quantization.config
    # The tensors, and not the config, tell which layers stayed as they are.
    halves = [
        fqn
        for fqn, tensor in manifest.tensors.items()
        if "float" in tensor.original_dtype
    ]
    plain = [
        fqn.removesuffix(".weight")
        for fqn in halves
        if f"{fqn}.quant_map" not in manifest.rows
    ]
    return {**config, "llm_int8_skip_modules": plain} if config else None


def has_weights(path: Path) -> bool:
    """Whether a path is a file, or a folder with the weights of a model."""
    return os.path.isfile(path) or any(_weight_files_of(path, *way)[0] for way in _WAYS)


def _weight_files(folder: Path) -> tuple[list[str], str | None]:
    """The names of the files with the weights, and of the index, if there is one."""
    for single, beginning in _WAYS:
        names, index = _weight_files_of(folder, single, beginning)
        if names:
            return names, index
    adapter = next((path.name for path in sorted(folder.glob(f"{_ADAPTER}*"))), None)
    if adapter is not None:
        raise ConfigError(
            f"{folder}: expected model weights, found only an adapter ({adapter!r}); give the folder of its base"
        )
    raise ConfigError(
        f"{folder}: expected model weights (model.safetensors, pytorch_model.bin, an index of either, or other "
        ".safetensors files), found none"
    )


def _weight_files_of(
    folder: Path, single: str, beginning: str
) -> tuple[list[str], str | None]:
    """The same for one of the ways to store weights; no names where none are stored so."""
    suffix = Path(single).suffix
    indexes = sorted(
        path.name for path in folder.glob(f"{beginning}*{suffix}.index.json")
    )
    if indexes:
        index = (
            f"{single}.index.json" if f"{single}.index.json" in indexes else indexes[0]
        )
        content = read_json(folder / index)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise ConfigError(f"{folder / index}: expected a weight_map of file names")
        if not isinstance(content.get("metadata", {}), dict):
            raise ConfigError(f"{folder / index}: expected an object as its metadata")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise ConfigError(
                    f"{folder / index}: names {name!r}: expected a file name without a folder"
                )
            if not os.path.isfile(folder / name):
                raise ConfigError(
                    f"{folder / index}: names the file {name!r}, which does not exist"
                )
        return names, index
    if (folder / single).is_file():
        return [single], None
    names = [path.name for path in folder.glob(f"{beginning}*{suffix}")]
    return sorted(name for name in names if not name.startswith(_ADAPTER)), None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; raise `ConfigError` where it holds something else."""
    try:
        refuse_special(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: expected a JSON object, found a {type(found).__name__}"
        )
    return found


def read_tensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str] | None]:
    """The tensors of a file by name, in the order of their bytes, and its metadata."""
    if path.suffix == _PICKLED:
        return _read_pickled(path), {"format": "pt"}
    from safetensors import SafetensorError, safe_open

    try:
        refuse_special(path)
        # The library checks sizes, offsets and shapes against the file.
        with safe_open(path, framework="pt"):
            pass
        header, beginning = read_header(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ConfigError(
                f"{path}: {name}: torch {torch.__version__} has no dtype {entry['dtype']}"
            )
        start, end = entry["data_offsets"]
        shape = list(entry["shape"])
        if entry["dtype"] == TWO_A_BYTE:
            shape[-1] //= 2
        tensors[name] = StoredTensor(
            name, path, dtype, tuple(shape), beginning + start, end - start
        )
    return tensors, metadata


def load_pickled(path: Path) -> dict[str, Any]:
    """The content of a file that ``torch.save`` wrote, with fake tensors; no tensor is read, and no code run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        refuse_special(path)
        with FakeTensorMode(), warnings.catch_warnings():
            # on files from an older torch or another device
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{path}: expected a file of tensors, found a damaged one or other objects ({type(error).__name__}); "
            "no code in it was run"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(key, str) for key in content
    ):
        raise ConfigError(
            f"{path}: expected tensors by name, found a {type(content).__name__}"
        )
    return content


def _read_pickled(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors in a file that ``torch.save`` wrote, whose bytes lie in it unchanged; none is read."""
    tensors, content = {}, load_pickled(path)
    num_bytes = path.stat().st_size
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            found = (
                tensor.layout
                if isinstance(tensor, torch.Tensor)
                else f"a {type(tensor).__name__}"
            )
            raise ConfigError(f"{path}: {name}: expected a dense tensor, found {found}")
        start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if start is None or not tensor.is_contiguous():
            old = (
                "stored in the format of torch before 1.6, or read by torch before 2.7"
            )
            found = old if start is None else "not contiguous"
            raise ConfigError(
                f"{path}: {name}: is {found}; load it with torch.load and save it as safetensors"
            )
        start += tensor.storage_offset() * tensor.itemsize
        if start + tensor.nbytes > num_bytes:
            raise ConfigError(f"{path}: {name}: reaches beyond the end of the file")
        tensors[name] = StoredTensor(
            name, path, tensor.dtype, tuple(tensor.shape), start, tensor.nbytes
        )
    return dict(sorted(tensors.items(), key=lambda item: item[1].start))


def is_trained_copy(name: str) -> bool:
    """Whether a stored tensor, by its name, is a copy of a base tensor that PEFT trained."""
    return _TRAINED_COPY.search(f".{name}") is not None


def is_beside(name: str, known: Collection[str]) -> bool:
    """Whether a tensor is an adapter's or quantization state: its name is below a known tensor's, or its module's."""
    parts = canonical_fqn(name).split(".")
    owner = ".".join(parts[:-1])
    if owner in known or (parts[-1] in EIGHT_BIT_STATE and f"{owner}.weight" in known):
        return True
    return any(
        f"{'.'.join(parts[:end])}.weight" in known for end in range(1, len(parts) - 1)
    )
