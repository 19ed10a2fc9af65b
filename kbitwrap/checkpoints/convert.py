"""Conversion of a checkpoint that was saved while prepared back to its original dtypes."""

from __future__ import annotations

import filecmp
import functools
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, ManifestMismatchError
from ..export.writer import Progress, checkpoint_writer, is_of_a_model, split_into_files
from ..manifest.manifest import Manifest
from ..model.quantization import is_of_another_library
from ..model.wrappers import canonical_fqn
from ..reports import Differences, ExportReport, first_of
from ..tensors.dtypes import HALF_DTYPES, dtype_name, find_dtype, parse_dtype
from .reader import (
    SavedCheckpoint,
    StoredTensor,
    config_dtype,
    is_beside,
    is_trained_copy,
    open_checkpoint,
    read_json,
)

_CONFIG = "config.json"
# Other checkpoints that a run keeps in the folder of its last one, and hidden folders
# of tools.
_NOT_COPIED = re.compile(r"checkpoint-\d+|\..*")
_Originals = Mapping[str, torch.Tensor | StoredTensor]
"""The tensors from before a preparation, of which only the dtypes and the shapes are read."""


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    manifest: Manifest | str | os.PathLike[str] | None = None,
    *,
    like: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool | Progress = False,
) -> ExportReport:
    """Write a checkpoint again, with the dtypes from before a preparation made some tensors float32.

    Tensors are read, rounded and written one at a time. Only float32 tensors are
    rounded, and only where the original is known to be half: by the manifest; or else
    by the tensor of the same name in a reference checkpoint; or else by a dtype, in
    which ``from_pretrained`` would load what is not kept in float32 by its
    architecture. Adapters, the state of quantized weights, trained copies
    (``modules_to_save``) and every other file are copied as they are; the config gets
    its dtype back. Values that training did not change get their original bits, except
    payloads of NaNs.

    Args:
        src: A folder with safetensors files, or with ``pytorch_model.bin`` or its
            shards, which become safetensors files; or one such file. Names may be those
            that PEFT gave.
        dst: The folder to make: complete in the end, or absent.
        manifest: The record of the preparation, or the path of its file.
        like: A checkpoint of the original model, quantized or not, or its
            ``config.json``: its dtypes are taken.
        dtype: ``torch.bfloat16`` or ``torch.float16``, or its name. Without
            ``manifest`` and ``like`` the default is the dtype that the config of
            ``src`` names.
        max_shard_size: The maximum size of a file in bytes, or a string such as
            ``"5GB"``; ``None`` keeps the files of ``src``.
        overwrite: Replace the files of a checkpoint at ``dst``; where others are there,
            nothing is written.
        progress: Show a bar of the bytes written, on a terminal; or a function that is
            called with each number of them.

    Returns:
        The report of what was written.

    Raises:
        ConfigError: There is no checkpoint at ``src`` or ``like``, it is damaged, no
            dtype is known, or ``max_shard_size`` is invalid.
        ManifestError: The manifest cannot be read.
        ManifestMismatchError: A tensor is not one of the manifest's, or has another
            shape or dtype. Nothing was written.
        ExportError: It could not be written, ``dst`` is, holds or lies in what is read,
            or a value is too large for float16. Nothing was left at ``dst``.

    Example:
        >>> import os, tempfile, torch
        >>> from safetensors.torch import load_file, save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file(
        ...     {"norm.weight": torch.ones(4)},
        ...     os.path.join(folder, "model.safetensors"),
        ... )
        >>> report = convert_checkpoint(folder, f"{folder}-bf16", dtype="bfloat16")
        >>> report.converted, report.num_bytes, report.saved_bytes
        (('norm.weight',), 8, 8)
        >>> load_file(report.path / "model.safetensors")["norm.weight"].dtype
        torch.bfloat16
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(src)
    casts, chosen = _casts(checkpoint, manifest, like, dtype)
    tensors = {
        name: stored.lazy(casts.get(name))
        for name, stored in checkpoint.tensors.items()
    }
    if max_shard_size is None:
        held = checkpoint.files.items()
        files = {
            re.sub(r"^(?:pytorch_)?(.*)\.bin$", r"\1.safetensors", file): list(names)
            for file, names in held
        }
    else:
        files = split_into_files(tensors, max_shard_size)
    first = next(iter(checkpoint.metadata.values()))
    metadata = {file: checkpoint.metadata.get(file, first) for file in files}
    # Files that keep their names keep the index's name too.
    index_name = checkpoint.index if files.keys() == checkpoint.files.keys() else None
    written = {*files, index_name}

    def is_replaced(found: Path) -> bool:
        if found.name in written or checkpoint.path.is_file():
            return found.name in written
        source = checkpoint.folder / found.name
        return is_of_a_model(found) or (
            source.is_file() and filecmp.cmp(found, source, shallow=False)
        )

    index = (
        read_json(checkpoint.folder / checkpoint.index) if checkpoint.index else None
    )
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    shown = None if progress is True else progress
    with checkpoint_writer(
        dst,
        "convert",
        overwrite=overwrite,
        progress=shown,
        sources=[
            path
            for path in (src, like, manifest)
            if isinstance(path, (str, os.PathLike))
        ],
        owns=is_replaced,
        num_bytes=num_bytes,
    ) as writer:
        if checkpoint.path.is_dir():
            _copy_rest(checkpoint, writer.folder, chosen)
        writer.save(tensors, files, metadata, index_name, index)
    seconds = time.perf_counter() - start
    saved = (
        sum(stored.num_bytes for stored in checkpoint.tensors.values())
        - writer.num_bytes
    )
    return ExportReport(
        Path(dst),
        writer.files,
        writer.num_tensors,
        writer.num_bytes,
        tuple(casts),
        (),
        seconds,
        saved,
    )


def _casts(
    checkpoint: SavedCheckpoint,
    manifest: Manifest | str | os.PathLike[str] | None,
    like: str | os.PathLike[str] | None,
    dtype: torch.dtype | str | None,
) -> tuple[dict[str, torch.dtype], torch.dtype | None]:
    """The dtypes to cast tensors to, by name, and the dtype for the config, if it is known."""
    if sum(source is not None for source in (manifest, like, dtype)) > 1:
        raise ConfigError(
            "expected at most one source of dtypes: a manifest, a reference or a dtype"
        )
    if manifest is not None:
        record = manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
        return casts_by_manifest(checkpoint, record), find_dtype(record.model.dtype)
    if like is not None:
        return _casts_by_reference(checkpoint, like)
    chosen = parse_dtype(dtype) if dtype is not None else checkpoint.dtype
    if chosen not in HALF_DTYPES:
        found = "its config names none" if chosen is None else f"found {chosen}"
        raise ConfigError(
            f"{checkpoint.path}: the original dtype is not known: expected float16 or bfloat16, {found}; give a "
            "manifest, a reference checkpoint, or a dtype"
        )
    return casts_by_dtype(checkpoint, chosen), chosen


def casts_by_manifest(
    checkpoint: SavedCheckpoint, manifest: Manifest
) -> dict[str, torch.dtype]:
    """The casts that give a checkpoint a manifest's dtypes; raises where it is not of the manifest's model."""
    originals: _Originals = {
        fqn: torch.empty(
            record.shape, dtype=parse_dtype(record.original_dtype), device="meta"
        )
        for fqn, record in manifest.tensors.items()
    }
    unexpected = _unexpected(checkpoint, originals)
    model = checkpoint.meta_model() if unexpected else None
    if model is not None:  # its tensors may be saved under other names
        originals = {**_renamed(model, originals), **originals}
        unexpected = _unexpected(checkpoint, originals)
    casts = {}
    different: dict[str, dict[str, tuple[Any, Any]]] = {}
    for name, stored in checkpoint.tensors.items():
        original = _original(name, originals)
        if original is None:
            continue
        if stored.shape != original.shape:
            different[name] = {"shape": (tuple(original.shape), stored.shape)}
        elif stored.dtype == torch.float32 and original.dtype in HALF_DTYPES:
            casts[name] = original.dtype
        elif stored.dtype != original.dtype:
            different[name] = {"dtype": (original.dtype, stored.dtype)}
    if unexpected or different:
        lines = Differences(different).lines() + [
            f"{name}: the manifest has no such tensor" for name in unexpected
        ]
        raise ManifestMismatchError(
            f"{checkpoint.path} is not a checkpoint of the model that the manifest records: "
            f"{first_of(lines, 3, '; ')}; nothing was written",
            unexpected=unexpected,
            different=different,
        )
    return casts


def _unexpected(checkpoint: SavedCheckpoint, originals: _Originals) -> tuple[str, ...]:
    return tuple(
        name
        for name in checkpoint.tensors
        if not is_trained_copy(name)
        and _original(name, originals) is None
        and not is_beside(name, originals)
    )


def _original(name: str, originals: _Originals) -> torch.Tensor | StoredTensor | None:
    """The original of a stored tensor, if it is known; a trained copy, which is not the base's, has none."""
    if is_trained_copy(name):
        return None
    fqn = canonical_fqn(name)
    # Prompt learning puts the model itself at `base_model`.
    return originals.get(fqn if fqn in originals else fqn.removeprefix("base_model."))


def _casts_by_reference(
    checkpoint: SavedCheckpoint, reference: str | os.PathLike[str]
) -> tuple[dict[str, torch.dtype], torch.dtype | None]:
    path = Path(reference)
    originals: _Originals = {}
    if path.suffix == ".json":
        config = read_json(path)
    elif (
        os.path.isdir(path)
        and not any(path.glob("*.safetensors"))
        and (path / _CONFIG).is_file()
    ):
        config = read_json(path / _CONFIG)
    else:
        found = open_checkpoint(path)
        config = dict(found.config)
        originals = {
            canonical_fqn(name): stored for name, stored in found.tensors.items()
        }
    chosen = config_dtype(config) or checkpoint.dtype
    default = casts_by_dtype(checkpoint, chosen) if chosen in HALF_DTYPES else {}
    casts = {}
    for name, stored in checkpoint.tensors.items():
        original = _original(name, originals)
        wanted = default.get(name) if original is None else original.dtype
        if stored.dtype == torch.float32 and wanted in HALF_DTYPES:
            casts[name] = wanted
    return casts, chosen


def casts_by_dtype(
    checkpoint: SavedCheckpoint, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The casts to what a model loaded in a half dtype saves; adapters, trained copies and quantization state stay."""
    stored_names = {canonical_fqn(name) for name in checkpoint.tensors}
    model = checkpoint.meta_model(dtype)
    originals: dict[str, torch.Tensor] = {}
    if model is not None:  # no preparation casts buffers, so a float32 one was float32
        originals = {
            n: torch.empty(b.shape, dtype=torch.float32, device="meta")
            for n, b in model.named_buffers()
        }
        originals |= model.named_parameters(remove_duplicate=False)
        originals = {**_renamed(model, originals), **originals}
    is_foreign = is_of_another_library(checkpoint.config.get("quantization_config"))
    casts = {}
    for name, stored in checkpoint.tensors.items():
        if (
            stored.dtype != torch.float32
            or is_trained_copy(name)
            or is_beside(name, stored_names)
        ):
            continue
        original = _original(name, originals)
        if not is_foreign if original is None else original.dtype in HALF_DTYPES:
            casts[name] = dtype
    return casts


def _renamed(model: Any, originals: _Originals) -> dict[str, torch.Tensor]:
    """The tensors as transformers saves them: renamed, split, merged."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, under their own names
        return {}
    tensors = {
        fqn: torch.empty(known.shape, dtype=known.dtype, device="meta")
        for fqn, known in originals.items()
    }
    return dict(revert_weight_conversion(model, tensors))


def _copy_rest(
    checkpoint: SavedCheckpoint, folder: Path, dtype: torch.dtype | None
) -> None:
    """Copy every file that holds no weights; the config gets the original dtype where that is known."""
    written = {*checkpoint.files, checkpoint.index}
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_dir() and not _NOT_COPIED.fullmatch(path.name):
            copy = functools.partial(_copy_own, checkpoint.folder)
            shutil.copytree(
                path, folder / path.name, ignore=_ignored, copy_function=copy
            )
        elif path.is_file() and path.name not in written:
            _copy_own(checkpoint.folder, path, folder / path.name)
    key = next(
        (key for key in ("dtype", "torch_dtype") if key in checkpoint.config), None
    )
    if key is not None and dtype is not None and checkpoint.dtype != dtype:
        config = {**checkpoint.config, key: dtype_name(dtype)}
        (folder / _CONFIG).write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )


def _copy_own(folder: Path, src: str | Path, dst: str | Path) -> None:
    """Copy a file of a folder; raise where it is a link that leads out of it, and of the hub's cache that it is of."""
    home = folder.resolve()
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    real = Path(src).resolve()
    if not (real.is_relative_to(home) or real.is_relative_to(cache)):
        raise ConfigError(
            f"{src}: is a link that leads out of the checkpoint; put a copy in its place, or remove it"
        )
    shutil.copyfile(real, dst)


def _ignored(folder: str, names: list[str]) -> list[str]:
    """The names in a folder that are not copied."""
    folders = {
        name: path
        for name in names
        if os.path.isdir(path := os.path.join(folder, name))
    }
    linked = [path for path in folders.values() if os.path.islink(path)]
    if linked:
        raise ConfigError(
            f"{linked[0]}: links to a folder; put a copy in its place, or remove it"
        )
    return [name for name in folders if _NOT_COPIED.fullmatch(name)]
