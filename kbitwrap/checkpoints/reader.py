"""Reading a checkpoint: its headers at once, its tensors one at a time."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import StrPath
from ..errors import ConfigError, ExportError
from ..export.staging import refuse_special
from ..export.writer import read_header
from ..manifest.manifest import MANIFEST_NAME, Manifest
from ..model.pretrained import meta_model, read_config
from ..model.quantization import SKIPPED_LAYERS
from ..model.wrappers import canonical_fqn
from ..tensors.dtypes import SAFETENSORS_DTYPES, TWO_A_BYTE, find_dtype
from ..tensors.lazy import LazyTensor

# The ways to store weights, the best first: the name of a single file, and the
# beginning of the names of several.
_WAYS = (("model.safetensors", ""), ("pytorch_model.bin", "pytorch_model"))
_ADAPTER = "adapter_model"
_PICKLED = ".bin"
# The bytes read and rounded at once: below the 32,768 float32 values from which torch
# takes several threads, which cost more than they gain, and much more where other
# processes want the cores.
_PIECE = 96 << 10
# PEFT's trained copies of a base tensor, which have its canonical name.
_TRAINED_COPY = re.compile(
    r"\.(modules_to_save|ln_tuning_layers)\.|\.trainable_tokens_"
)
EIGHT_BIT_STATE = ("SCB", "weight_format")
"""The names of what bitsandbytes saves of an 8-bit layer beside its weight."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        name: Its name there.
        path: The file.
        dtype: Its dtype.
        shape: Its shape.
        start: The place of its bytes in the file.
        num_bytes: Their number.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def lazy(self, dtype: torch.dtype | None = None) -> LazyTensor:
        """Return the values, which are read when they are asked for and rounded to a dtype.

        Nothing is mapped, because a mapped file counts as memory in use. `ExportError`
        is raised where a value is too large for the dtype.
        """
        kept = dtype or self.dtype

        def pieces() -> Iterator[Tensor]:
            left = self.num_bytes
            with open(self.path, "rb") as file:
                file.seek(self.start)
                while left:
                    size = min(left, _PIECE)
                    data = bytearray(file.read(size))
                    if len(data) < size:
                        why = "the file became shorter while it was read"
                        raise OSError(errno.EIO, why, str(self.path))

                    read = torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)
                    rounded = read.to(kept)
                    # bfloat16 has nearly the range of float32: larger values round to
                    # infinity as they should.
                    is_narrow = kept == torch.float16
                    if is_narrow and rounded.isinf().sum() > read.isinf().sum():
                        raise ExportError(
                            f"{self.name}: a value is too large for {kept}, whose largest is 65504; convert to "
                            "bfloat16",
                            fqn=self.name,
                        )
                    yield rounded
                    left -= size

        def compute() -> Tensor:
            nothing = torch.empty(0, dtype=kept, device="cpu")
            return torch.cat([nothing, *pieces()]).view(self.shape)

        return LazyTensor(self.shape, kept, compute, pieces)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in safetensors files, or in those that ``torch.save`` wrote.

    Attributes:
        path: The folder or the file that was opened.
        folder: The folder.
        files: The names of the files that hold the tensors.
        tensors: The tensors by name, without those that loading ties to others.
        index: The name of the index file, or ``None``.
        config: The content of ``config.json``; empty where there is none.
    """

    path: Path
    folder: Path
    files: Sequence[str]
    tensors: Mapping[str, StoredTensor]
    index: str | None
    config: Mapping[str, Any]

    @functools.cached_property
    def beside(self) -> set[str]:
        """Name what is not the base's own: adapters, trained copies and the state of quantized weights."""
        fqns = {canonical_fqn(name) for name in self.tensors}
        found = set()
        for name in self.tensors:
            owner, _, last = canonical_fqn(name).rpartition(".")
            if last in EIGHT_BIT_STATE:
                owner = f"{owner}.weight"

            # Statistics lie below the name of a weight; an adapter lies below a module that
            # has a weight.
            is_beside = is_trained_copy(name) or owner in fqns
            while owner and not is_beside:
                owner, _, _ = owner.rpartition(".")
                is_beside = f"{owner}.weight" in fqns
            if is_beside:
                found.add(name)

        return found

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors, in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def metadata(self) -> dict[str, str] | None:
        """Read the metadata of the first file."""
        path = self.folder / self.files[0]
        if path.suffix == _PICKLED:
            return {"format": "pt"}

        header, _ = read_header(path)
        return header.get("__metadata__")

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype that the config names; ``None`` where it names none."""
        found = find_dtype(self.config.get("dtype"))
        return found or find_dtype(self.config.get("torch_dtype"))

    @property
    def is_quantized(self) -> bool:
        """Tell whether the config says that the checkpoint is quantized."""
        return self.config.get("quantization_config") is not None

    def ties(self, model: Any) -> list[list[str]]:
        """Return the names that loading ties, by group, in the model that the config describes; none without one."""
        if self.config.get("tie_word_embeddings") is False:
            return []
        return tied_names(model)

    def meta_model(self, dtype: torch.dtype | None = None) -> Any:
        """Build the model that the config describes, on the meta device, as one of another dtype where that is given.

        ``None`` where transformers knows no such model.
        """
        if not self.config:
            return None

        try:
            config = read_config(self.folder)
            config.dtype = dtype or config.dtype
            return meta_model(config)
        except ConfigError:
            return None


def open_checkpoint(path: StrPath) -> SavedCheckpoint:
    """Read the headers of a checkpoint in a folder or a file; raise `ConfigError` where it is damaged or incomplete.

    Nothing in it is run, and no name in it is opened outside its folder.
    """
    found = Path(path)
    index = None
    # Not by methods of ``Path``, which raise where a name is too long, or a folder may
    # not be searched.
    if os.path.isfile(found):
        expect_file_of_weights(found)
        folder, names = found.parent, [found.name]
    elif os.path.isdir(found):
        folder = found
        names, index = _weight_files(folder)
        if not names:
            adapters = sorted(path.name for path in folder.glob(f"{_ADAPTER}*"))
            found_there = "none"
            if adapters:
                found_there = (
                    f"only an adapter ({adapters[0]!r}); give the folder of its base"
                )
            raise ConfigError(
                f"{folder}: expected model weights (model.safetensors, pytorch_model.bin, an index of either, or "
                f"other .safetensors files), found {found_there}"
            )
    else:
        raise ConfigError(f"there is no checkpoint at {str(found)!r}")

    tensors: dict[str, StoredTensor] = {}
    for name in names:
        more = read_tensors(folder / name)
        if more.keys() & tensors.keys():
            raise ConfigError(f"{found}: one tensor is in more than one file")
        tensors.update(more)

    config_path = folder / "config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    if index is not None:
        for name in read_json(folder / index)["weight_map"]:
            if name not in tensors:
                raise ConfigError(
                    f"{folder / index}: names the tensor {name!r}, which none of its files holds"
                )

    checkpoint = SavedCheckpoint(found, folder, names, tensors, index, config)
    # In files of ``torch.save``, tensors that loading ties share their bytes: one is kept.
    if names[0].endswith(_PICKLED):
        by_fqn = {canonical_fqn(name): stored for name, stored in tensors.items()}
        for group in checkpoint.ties(checkpoint.meta_model()):
            first, *others = map(by_fqn.get, group)
            for other in others:
                if not first or not other or other.path != first.path:
                    continue
                if other.start == first.start:
                    del tensors[other.name]

    return checkpoint


def expect_file_of_weights(path: Path) -> None:
    """Raise `ConfigError` for a file of another kind."""
    if os.path.isfile(path) and path.suffix not in (".safetensors", _PICKLED):
        raise ConfigError(
            f"{str(path)!r}: expected a folder, or a .safetensors or .bin file"
        )


def tied_names(model: Any) -> list[list[str]]:
    """Return the names of each parameter that has several; none of an unknown model, which is ``None``."""
    if model is None:
        return []

    names = defaultdict(list)
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(fqn)

    return [group for group in names.values() if len(group) > 1]


def lazy_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Return tensors in files by the same names, each read when it is asked for."""
    return {name: one.lazy() for name, one in stored.items()}


def adapter_file(folder: Path) -> Path | None:
    """Find the file of the adapter that PEFT saved in a folder: of one in both formats, the safetensors file."""
    for suffix in (".safetensors", _PICKLED):
        file = folder / f"{_ADAPTER}{suffix}"
        if os.path.isfile(file):
            return file
    return None


def load_manifest(given: Manifest | StrPath) -> Manifest:
    """Return a manifest that a caller gave, itself or as its path."""
    return given if isinstance(given, Manifest) else Manifest.load(given)


def saved_manifest(folder: Path) -> Manifest | None:
    """Read the manifest that was saved in a folder, if there is one; `ManifestError` is raised for a damaged one."""
    path = folder / MANIFEST_NAME
    return Manifest.load(path) if os.path.isfile(path) else None


def recorded_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the floating-point tensors of a manifest: of a packed weight, that of its storage."""
    return {
        fqn: record.shape
        for fqn, record in manifest.tensors.items()
        if "float" in record.original_dtype
    }


def recorded_quantization(manifest: Manifest) -> dict[str, Any] | None:
    """Return the settings that quantize the layers that a manifest records; ``None`` of an unquantized base."""
    config = manifest.model.quantization.config
    if not config:
        return None

    # The tensors, and not the config, tell which layers stayed as they are.
    plain = [
        fqn.removesuffix(".weight")
        for fqn in recorded_shapes(manifest)
        if f"{fqn}.quant_map" not in manifest.rows
    ]
    return {**config, SKIPPED_LAYERS: plain}


def has_weights(path: Path) -> bool:
    """Tell whether a path is a file, or a folder with the weights of a model."""
    return os.path.isfile(path) or bool(_weight_files(path)[0])


def _weight_files(folder: Path) -> tuple[list[str], str | None]:
    """Name the files with the weights, if there are any, and the index, if there is one."""
    for single, beginning in _WAYS:
        index = f"{single}.index.json"
        if os.path.lexists(folder / index):
            return _files_in_index(folder / index), index
        if (folder / single).is_file():
            return [single], None

        found = folder.glob(f"{beginning}*{Path(single).suffix}")
        names = sorted(path.name for path in found if path.is_file())
        names = [name for name in names if not name.startswith(_ADAPTER)]
        if names:
            return names, None

    return [], None


def _files_in_index(path: Path) -> list[str]:
    """Return the names of the files that an index names, which lie beside the index."""
    content = read_json(path)
    weight_map: Any = content.get("weight_map")
    has_metadata = isinstance(content.get("metadata", {}), dict)
    is_map = isinstance(weight_map, dict) and _are_names(weight_map.values())
    if not is_map or not has_metadata:
        raise ConfigError(
            f"{path}: expected objects as its metadata and its weight_map, and names of files in this"
        )

    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not os.path.isfile(path.parent / name):
            raise ConfigError(f"{path}: names {name!r}: expected a file beside it")

    return names


def _are_names(found: Collection[Any]) -> bool:
    return all(isinstance(name, str) for name in found)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raise `ConfigError` where it holds something else.
    """
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


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors of a file by name, in the order of their bytes; none is read."""
    read = _read_pickled if path.suffix == _PICKLED else _read_safetensors
    in_order = sorted(read(path), key=lambda tensor: tensor.start)
    return {tensor.name: tensor for tensor in in_order}


def _read_safetensors(path: Path) -> Iterator[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        refuse_special(path)
        # The library checks sizes, offsets and shapes against the file.
        with safe_open(path, framework="pt"):
            pass
        header, beginning = read_header(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as safetensors: {error}") from error

    header.pop("__metadata__", None)
    for name, entry in header.items():
        code = entry["dtype"]
        dtype = SAFETENSORS_DTYPES.get(code)
        if dtype is None:
            raise ConfigError(
                f"{path}: {name}: torch {torch.__version__} has no dtype {code}"
            )

        shape = list(entry["shape"])
        if code == TWO_A_BYTE:
            shape[-1] //= 2
        start, end = entry["data_offsets"]
        place = beginning + start
        yield StoredTensor(name, path, dtype, tuple(shape), place, end - start)


def load_pickled(path: Path) -> dict[str, Any]:
    """Load a file that ``torch.save`` wrote, with fake tensors.

    No tensor is read, and no code run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        refuse_special(path)
        with warnings.catch_warnings():
            # on files from an older torch or another device
            warnings.simplefilter("ignore")
            with FakeTensorMode():
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{path}: expected a file of tensors, found a damaged one or other objects ({type(error).__name__}); "
            "no code in it was run"
        ) from error

    if isinstance(content, dict) and _are_names(content):
        return content

    raise ConfigError(
        f"{path}: expected tensors by name, found a {type(content).__name__}"
    )


def _read_pickled(path: Path) -> Iterator[StoredTensor]:
    """Find the tensors in a file that ``torch.save`` wrote, whose bytes lie in it unchanged."""
    for name, tensor in load_pickled(path).items():
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        beginning = None
        if is_dense and tensor.is_contiguous():
            storage: Any = tensor.untyped_storage()
            beginning = getattr(storage, "_checkpoint_offset", None)
        if beginning is None:
            raise ConfigError(
                f"{path}: {name}: expected a dense and contiguous tensor, saved by torch 1.6 or later; load the file "
                "with torch.load and save its tensors as safetensors"
            )

        start = beginning + tensor.storage_offset() * tensor.itemsize
        shape = tuple(tensor.shape)
        yield StoredTensor(name, path, tensor.dtype, shape, start, tensor.nbytes)


def is_trained_copy(name: str) -> bool:
    """Tell whether a stored tensor, by its name, is a copy of a base tensor that PEFT trained."""
    return _TRAINED_COPY.search(f".{name}") is not None
