"""Conversion of a checkpoint that was saved while prepared back to its original dtypes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import torch

from ..config import StrPath
from ..errors import ConfigError, ManifestMismatchError
from ..export.writer import Progress, checkpoint_writer, is_of_a_model, split_into_files
from ..manifest.manifest import Manifest
from ..model.pretrained import unexpected_names
from ..model.quantization import is_of_another_library
from ..model.wrappers import canonical_fqn
from ..reports import Differences, ExportReport, first_of
from ..tensors.dtypes import HALF_DTYPES, dtype_name, find_dtype, parse_dtype
from .beside import are_copies, copy_files, walk_files, why_not_followed
from .reader import (
    SavedCheckpoint,
    is_trained_copy,
    load_manifest,
    open_checkpoint,
    read_json,
)

_CONFIG = "config.json"
_DTypes = dict[str, torch.dtype]
_Originals = dict[str, Any]
"""The tensors from before a preparation, of which only the dtypes and the shapes are read."""


def convert_checkpoint(
    src: StrPath,
    dst: StrPath,
    manifest: Manifest | StrPath | None = None,
    *,
    like: StrPath | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool | Progress = False,
) -> ExportReport:
    """Write a checkpoint again, with the dtypes from before a preparation made some tensors float32.

    Tensors are read, rounded and written one at a time. Only float32 tensors are
    rounded, and only where the original is known to be half: by the manifest; or else
    by the tensor of the same name in a reference checkpoint; or else by a dtype: then
    the tensors are rounded that ``from_pretrained`` would load in it. Adapters, the
    state of quantized weights, trained copies (``modules_to_save``) and every other
    file are copied as they are; the config gets its dtype back. Values that training
    did not change get their original bits, except payloads of NaNs.

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
        ConfigError: There is no checkpoint at ``src`` or ``like``, it is damaged,
            ``like`` has a tensor of another shape, no dtype is known, or ``max_shard_size`` is invalid.
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
    casts, chosen = _choose_casts(checkpoint, manifest, like, dtype)
    tensors = {}
    files: dict[str, list[str]] = {_file_name(old): [] for old in checkpoint.files}
    for name, stored in checkpoint.tensors.items():
        tensors[name] = stored.lazy(casts.get(name))
        files[_file_name(stored.path.name)].append(name)

    if max_shard_size is not None:
        files = split_into_files(tensors, max_shard_size)

    # Files that keep their names keep the index's name too.
    index_name = checkpoint.index if set(files) == set(checkpoint.files) else None
    index = {}
    if checkpoint.index is not None:
        index = read_json(checkpoint.folder / checkpoint.index)

    is_folder = checkpoint.path.is_dir()
    copied = _other_files(checkpoint) if is_folder else {}

    def is_replaced(found: Path) -> bool:
        """Tell the files of a model, and those that were copied from the same checkpoint."""
        if not found.is_file():
            return False
        if found.name in files or found.name == index_name:
            return True
        is_copy = are_copies(found, found.parent, copied)
        return is_copy or (is_folder and is_of_a_model(found))

    with checkpoint_writer(
        dst,
        "convert",
        overwrite=overwrite,
        progress=None if progress is True else progress,
        sources=[src, like, manifest],
        owns=is_replaced,
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
    ) as writer:
        copy_files(copied, writer.folder)
        keys = [key for key in ("dtype", "torch_dtype") if key in checkpoint.config]
        if is_folder and keys and chosen not in (None, checkpoint.dtype):
            config = {**checkpoint.config, keys[0]: dtype_name(chosen)}
            text = json.dumps(config, indent=2) + "\n"
            (writer.folder / _CONFIG).write_text(text, encoding="utf-8")
        writer.save(tensors, files, checkpoint.metadata, index_name, index)

    return ExportReport(
        Path(dst),
        writer.files,
        writer.num_tensors,
        writer.num_bytes,
        tuple(casts),
        seconds=time.perf_counter() - start,
        saved_bytes=checkpoint.num_bytes - writer.num_bytes,
    )


def _file_name(old: str) -> str:
    """Return the name of the safetensors file that a file of weights becomes."""
    return re.sub(r"^(?:pytorch_)?(.*)\.bin$", r"\1.safetensors", old)


def _other_files(checkpoint: SavedCheckpoint) -> dict[str, Path]:
    """Find every file that holds no weights; a link that leads out of the checkpoint is refused."""
    home = checkpoint.folder
    files = {}
    for path in walk_files(home):
        name = path.relative_to(home).as_posix()
        if name in checkpoint.files or name == checkpoint.index or not path.exists():
            continue
        why = why_not_followed(path, home)
        if why:
            raise ConfigError(f"{path}: {why}; put a copy in its place, or remove it")
        if path.is_file():
            files[name] = path

    return files


# ----------------------------------------------------------------------------------------------------
# What is cast.
# ----------------------------------------------------------------------------------------------------


def _choose_casts(
    checkpoint: SavedCheckpoint,
    manifest: Manifest | StrPath | None,
    like: StrPath | None,
    dtype: torch.dtype | str | None,
) -> tuple[_DTypes, torch.dtype | None]:
    """Return the dtypes to cast tensors to, by name, and the dtype for the config, if it is known."""
    if sum(source is not None for source in (manifest, like, dtype)) > 1:
        raise ConfigError(
            "expected at most one source of dtypes: a manifest, a reference or a dtype"
        )

    if manifest is not None:
        record = load_manifest(manifest)
        originals = _tensors_in_manifest(checkpoint, record)
        return _casts_to_originals(checkpoint, originals, None), find_dtype(
            record.model.dtype
        )

    if like is not None:
        return _casts_by_reference(checkpoint, Path(like))

    chosen = checkpoint.dtype if dtype is None else parse_dtype(dtype)
    if chosen not in HALF_DTYPES:
        found = "its config names none" if chosen is None else f"found {chosen}"
        raise ConfigError(
            f"{checkpoint.path}: the original dtype is not known: expected float16 or bfloat16, {found}; give a "
            "manifest, a reference checkpoint, or a dtype"
        )

    return casts_by_dtype(checkpoint, chosen), chosen


def casts_by_dtype(checkpoint: SavedCheckpoint, dtype: torch.dtype) -> _DTypes:
    """Return the casts to what a model loaded in a half dtype saves.

    Tensors that the class does not build stay: no preparation cast them.
    """
    casts = _casts_to_originals(
        checkpoint, _tensors_as_loaded(checkpoint, dtype), dtype
    )
    model = checkpoint.meta_model() if casts else None
    if model is None:
        return casts

    is_quantized = checkpoint.is_quantized
    names = {canonical_fqn(name): name for name in casts}
    for fqn in unexpected_names(model, names, is_quantized=is_quantized):
        del casts[names[fqn]]

    return casts


def _casts_by_reference(
    checkpoint: SavedCheckpoint, path: Path
) -> tuple[_DTypes, torch.dtype | None]:
    """Return the casts to the dtypes of a reference's tensors, or of the config alone.

    Raise where a float32 tensor has another shape than that of its name there.
    """
    if path.suffix == ".json":
        reference = SavedCheckpoint(path, path.parent, [], {}, None, read_json(path))
    else:
        reference = open_checkpoint(path)

    stored = reference.tensors
    references = {canonical_fqn(name): one for name, one in stored.items()}
    different = {}
    for name, found in checkpoint.tensors.items():
        original = _original(name, references)
        if original is None or found.dtype != torch.float32:
            continue
        # a packed 4-bit weight, which may lie in floating-point storage, has no shape to compare
        is_packed = f"{original.name}.absmax" in stored
        is_compared = original.dtype.is_floating_point and not is_packed
        if is_compared and found.shape != original.shape:
            different[name] = {"shape": (original.shape, found.shape)}

    if different:
        lines = first_of(Differences(different).lines(), 3, "; ")
        raise ConfigError(
            f"{reference.path} is not a checkpoint of the model in {checkpoint.path}, for it has other shapes: "
            f"{lines}; nothing was written: give the model that was prepared, or a dtype"
        )

    chosen = reference.dtype or checkpoint.dtype
    loaded = _tensors_as_loaded(checkpoint, chosen) if chosen in HALF_DTYPES else {}
    return _casts_to_originals(checkpoint, {**loaded, **references}, chosen), chosen


def _casts_to_originals(
    checkpoint: SavedCheckpoint, originals: _Originals, dtype: torch.dtype | None
) -> _DTypes:
    """Return the casts of float32 tensors to the half dtypes of their originals, or else to a dtype.

    Adapters, trained copies and the state of quantized weights stay as they are.
    """
    if is_of_another_library(checkpoint.config.get("quantization_config")):
        dtype = None

    casts = {}
    for name, stored in checkpoint.tensors.items():
        original = _original(name, originals)
        wanted = None if name in checkpoint.beside else dtype
        if original is not None:
            wanted = original.dtype
        if stored.dtype == torch.float32 and wanted in HALF_DTYPES:
            casts[name] = wanted

    return casts


def _original(name: str, originals: _Originals) -> Any:
    """Find the original of a stored tensor; a trained copy, which is not the base's, has none."""
    if is_trained_copy(name):
        return None

    # Prompt learning puts the model itself at `base_model`.
    for full in (name, name.removeprefix("base_model.")):
        fqn = canonical_fqn(full)
        if fqn in originals:
            return originals[fqn]

    return None


def _tensors_as_loaded(checkpoint: SavedCheckpoint, dtype: torch.dtype) -> _Originals:
    """Return the tensors of the model that the config describes, as loaded in a dtype; none of an unknown model."""
    model = checkpoint.meta_model(dtype)
    if model is None:
        return {}

    for buffer in model.buffers():
        # No preparation casts buffers: they count as float32, and are left alone.
        buffer.data = buffer.data.float()

    tensors = dict(model.named_buffers())
    tensors |= model.named_parameters(remove_duplicate=False)
    return _by_all_names(model, tensors)


def _tensors_in_manifest(checkpoint: SavedCheckpoint, manifest: Manifest) -> _Originals:
    """Return the tensors that a manifest records; raise where a checkpoint is not of its model."""
    recorded = {}
    for fqn, record in manifest.tensors.items():
        dtype = parse_dtype(record.original_dtype)
        recorded[fqn] = torch.empty(record.shape, dtype=dtype, device="meta")
    originals = _by_all_names(checkpoint.meta_model(), recorded)

    unexpected = []
    different: dict[str, Any] = {}
    for name, stored in checkpoint.tensors.items():
        original = _original(name, originals)
        if original is None:
            if name not in checkpoint.beside:
                unexpected.append(name)
            continue
        is_upcast = stored.dtype == torch.float32 and original.dtype in HALF_DTYPES
        if stored.shape != original.shape:
            different[name] = {"shape": (tuple(original.shape), stored.shape)}
        elif stored.dtype != original.dtype and not is_upcast:
            different[name] = {"dtype": (original.dtype, stored.dtype)}

    if unexpected or different:
        lines = Differences(different).lines()
        lines += [f"{name}: the manifest has no such tensor" for name in unexpected]
        raise ManifestMismatchError(
            f"{checkpoint.path} is not a checkpoint of the model that the manifest records: "
            f"{first_of(lines, 3, '; ')}; nothing was written",
            unexpected=tuple(unexpected),
            different=different,
        )

    return originals


def _by_all_names(model: Any, tensors: _Originals) -> _Originals:
    """Return tensors by their names, and, if the model is known, also by those that transformers saves them under."""
    if model is None:
        return tensors

    from transformers.core_model_loading import revert_weight_conversion

    plain = {fqn: torch.empty_like(one, device="meta") for fqn, one in tensors.items()}
    return {**revert_weight_conversion(model, plain), **tensors}
