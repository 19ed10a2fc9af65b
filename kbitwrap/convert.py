"""A checkpoint that was saved while prepared, streamed back to its original dtypes."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from .checkpoint import Checkpoint, StoredTensor, is_beside, is_trained_copy, open_checkpoint, read_json
from .errors import ConfigError, ExportError, ManifestMismatchError
from .lazy import LazyTensor
from .manifest import Manifest
from .pretrained import meta_model
from .quantization import HALF_DTYPES
from .reports import ExportReport
from .stream import staged, write_safetensors
from .topology import canonical_fqn

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_PATTERN = "model{suffix}.safetensors"
# Other checkpoints, which a run keeps in the folder of its last one, and what tools hide there.
_NOT_COPIED = re.compile(r"checkpoint-\d+|\..*")


class Original(NamedTuple):
    """What is known of a tensor as it was before a preparation.

    Attributes:
        dtype: Its dtype.
        shape: Its shape; ``None`` where that is not known.
    """

    dtype: torch.dtype
    shape: tuple[int, ...] | None


def convert_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    manifest: Manifest | str | os.PathLike[str] | None = None,
    *,
    reference: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ExportReport:
    """Write a checkpoint again with the dtypes that it had before a preparation made some of it float32.

    Tensors are read, rounded and written one at a time. Only float32 tensors are rounded, and only where the original
    is known to be half: by the manifest; or else by the tensor of the same name in a reference checkpoint; or else by
    a dtype, in which ``from_pretrained`` would load what is not kept in float32 by its architecture. Adapters, the
    state of quantized weights, trained copies (``modules_to_save``) and every other file are copied as they are; the
    config gets its dtype back. Values that training left alone get their original bits, but for the payloads of NaNs.

    Args:
        src: A folder with safetensors files, or with ``pytorch_model.bin`` or its shards, which become safetensors
            files; or one such file. Names may be those that PEFT gave.
        dst: The folder to make. It is there whole in the end, or not at all.
        manifest: The record of the preparation, or the path of its file.
        reference: A checkpoint of the original model, quantized or not, or its ``config.json``: its dtypes are taken.
        dtype: ``torch.bfloat16`` or ``torch.float16``, or its name. Without ``manifest`` and ``reference`` the default
            is the dtype that the config of ``src`` names.
        max_shard_size: The most bytes in a file, or a string such as ``"5GB"``; ``None`` keeps the files of ``src``.
        overwrite: Replace a folder that is not empty.
        progress: Show a bar of the bytes written, on a terminal.

    Returns:
        What was written.

    Raises:
        ConfigError: There is no checkpoint at ``src`` or ``reference``, it is damaged, or no dtype is known.
        ManifestError: The manifest cannot be read.
        ManifestMismatchError: A tensor is not one of the manifest's, or has another shape or dtype. Nothing was
            written.
        ExportError: It could not be written, or a value is too large for float16. Nothing was left at ``dst``.

    Example:
        >>> import os, tempfile, torch
        >>> from safetensors.torch import load_file, save_file
        >>> folder = tempfile.mkdtemp()
        >>> save_file({"norm.weight": torch.ones(4)}, os.path.join(folder, "model.safetensors"))
        >>> report = convert_checkpoint(folder, os.path.join(folder, "bf16"), dtype="bfloat16")
        >>> report.converted, report.num_bytes, report.saved_bytes
        (('norm.weight',), 8, 8)
        >>> load_file(report.path / "model.safetensors")["norm.weight"].dtype
        torch.bfloat16
    """
    start = time.perf_counter()
    checkpoint = open_checkpoint(src)
    casts, chosen = _casts(checkpoint, manifest, reference, dtype)
    tensors = {name: _lazy(name, stored, casts.get(name)) for name, stored in checkpoint.tensors.items()}
    files = _layout(checkpoint, tensors, max_shard_size)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    with staged(dst, overwrite=overwrite) as folder:
        if checkpoint.path.is_dir():
            _copy_rest(checkpoint, folder)
            if checkpoint.config:
                _write_config(checkpoint, folder, chosen)
        disable = None if progress else True  # None: where there is no terminal
        with tqdm(total=num_bytes, desc="convert", unit="B", unit_scale=True, disable=disable, leave=False) as bar:
            for file, names in files.items():
                metadata = checkpoint.metadata.get(file, next(iter(checkpoint.metadata.values())))
                write_safetensors(folder / file, {name: tensors[name] for name in names}, metadata, progress=bar.update)
        _write_index(checkpoint, folder, files, num_bytes)
        written = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    return ExportReport(
        path=Path(dst),
        files=written,
        num_tensors=len(tensors),
        num_bytes=num_bytes,
        converted=tuple(casts),
        seconds=time.perf_counter() - start,
        saved_bytes=sum(stored.num_bytes for stored in checkpoint.tensors.values()) - num_bytes,
    )


# ----------------------------------------------------------------------------------------------------
# What is cast.
# ----------------------------------------------------------------------------------------------------


def _casts(
    checkpoint: Checkpoint,
    manifest: Manifest | str | os.PathLike[str] | None,
    reference: str | os.PathLike[str] | None,
    dtype: torch.dtype | str | None,
) -> tuple[dict[str, torch.dtype], torch.dtype | None]:
    """The tensors to cast and to what, and the dtype that the config is to name, if it is known."""
    if sum(source is not None for source in (manifest, reference, dtype)) > 1:
        raise ConfigError("expected one of manifest, reference and dtype: each says what the dtypes were")
    if manifest is not None:
        record = manifest if isinstance(manifest, Manifest) else Manifest.load(manifest)
        return casts_by_manifest(checkpoint, record), _as_dtype(record.model.dtype)
    if reference is not None:
        return _casts_by_reference(checkpoint, reference)
    chosen = _as_dtype(dtype) if dtype is not None else checkpoint.dtype
    if chosen not in HALF_DTYPES:
        found = "its config names none" if chosen is None else f"found {chosen}"
        raise ConfigError(
            f"{checkpoint.path}: the original dtype is not known: expected float16 or bfloat16, {found}; give a "
            "manifest, a reference checkpoint, or a dtype"
        )
    return casts_by_dtype(checkpoint, chosen), chosen


def _as_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype: expected a dtype such as torch.bfloat16 or 'bfloat16', found {value!r}")
    return found


def casts_by_manifest(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, torch.dtype]:
    """Find what to cast so that a checkpoint has the dtypes of a manifest.

    Args:
        checkpoint: The checkpoint.
        manifest: The record of its preparation.

    Returns:
        ``{name: dtype}`` of the stored tensors to cast.

    Raises:
        ManifestMismatchError: A tensor is not one of the manifest's, or has another shape or dtype.
    """
    originals = {
        fqn: Original(getattr(torch, record.original_dtype), tuple(record.shape))
        for fqn, record in manifest.tensors.items()
    }
    unexpected = _unexpected(checkpoint, originals)
    if unexpected:
        originals = {**_as_saved(checkpoint, originals), **originals}
        unexpected = _unexpected(checkpoint, originals)
    casts = {}
    different: dict[str, dict[str, tuple[Any, Any]]] = {}
    for name, stored in checkpoint.tensors.items():
        original = _original(name, originals)
        if original is None:
            continue
        if stored.shape != original.shape:
            different[name] = {"shape": (original.shape, stored.shape)}
        elif stored.dtype == torch.float32 and original.dtype in HALF_DTYPES:
            casts[name] = original.dtype
        elif stored.dtype != original.dtype:
            different[name] = {"dtype": (original.dtype, stored.dtype)}
    if unexpected or different:
        lines = [
            f"{name}: {what}: expected {values[0]}, found {values[1]}"
            for name, row in different.items()
            for what, values in row.items()
        ]
        lines += [f"{name}: the manifest has no such tensor" for name in unexpected]
        more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise ManifestMismatchError(
            f"{checkpoint.path} is not a checkpoint of the model that the manifest records: "
            f"{'; '.join(lines[:3])}{more}; nothing was written",
            unexpected=unexpected,
            different=different,
        )
    return casts


def _unexpected(checkpoint: Checkpoint, originals: Mapping[str, Original]) -> tuple[str, ...]:
    return tuple(
        name
        for name in checkpoint.tensors
        if not is_trained_copy(name) and _original(name, originals) is None and not is_beside(name, originals)
    )


def _original(name: str, originals: Mapping[str, Original]) -> Original | None:
    """What is known of a stored tensor; of a trained copy, which is not the base's, nothing."""
    if is_trained_copy(name):
        return None
    fqn = canonical_fqn(name)
    # Prompt learning puts the model itself at `base_model`.
    return originals.get(fqn) or originals.get(fqn.removeprefix("base_model."))


def _casts_by_reference(
    checkpoint: Checkpoint, reference: str | os.PathLike[str]
) -> tuple[dict[str, torch.dtype], torch.dtype | None]:
    path = Path(reference)
    originals: dict[str, Original] = {}
    if path.suffix == ".json":
        config = read_json(path)
    elif os.path.isdir(path) and not any(path.glob("*.safetensors")) and (path / _CONFIG).is_file():
        config = read_json(path / _CONFIG)
    else:
        found = open_checkpoint(path)
        config = dict(found.config)
        originals = {canonical_fqn(name): Original(stored.dtype, None) for name, stored in found.tensors.items()}
    chosen = Checkpoint(path, path, {}, {}, None, config).dtype or checkpoint.dtype
    default = casts_by_dtype(checkpoint, chosen) if chosen in HALF_DTYPES else {}
    casts = {}
    for name, stored in checkpoint.tensors.items():
        original = _original(name, originals)
        wanted = default.get(name) if original is None else original.dtype
        if stored.dtype == torch.float32 and wanted in HALF_DTYPES:
            casts[name] = wanted
    return casts, chosen


def casts_by_dtype(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Find what to cast so that a checkpoint is as a model loaded in a half dtype is saved.

    What the architecture keeps in float32 stays float32, as do buffers, adapters and the state of quantized weights.
    Of an architecture that transformers does not know, every other float32 tensor is cast.

    Args:
        checkpoint: The checkpoint.
        dtype: The half dtype.

    Returns:
        ``{name: dtype}`` of the stored tensors to cast.
    """
    stored_names = {canonical_fqn(name): None for name in checkpoint.tensors}
    originals = _as_loaded(checkpoint, dtype)
    casts = {}
    for name, stored in checkpoint.tensors.items():
        if stored.dtype != torch.float32 or is_trained_copy(name) or is_beside(name, stored_names):
            continue
        original = _original(name, originals)
        if original is None or original.dtype in HALF_DTYPES:
            casts[name] = dtype
    return casts


def _as_loaded(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Original]:
    """The tensors of the model that the config describes, loaded in a half dtype, by the names they are saved under."""
    if not checkpoint.config:
        return {}
    try:
        model = meta_model(checkpoint.folder, dtype=dtype)
    except ConfigError:
        return {}  # an architecture of somebody else's: nothing is known of it
    originals = {fqn: Original(p.dtype, tuple(p.shape)) for fqn, p in model.named_parameters(remove_duplicate=False)}
    # No preparation casts buffers: a float32 one was float32.
    originals |= {fqn: Original(torch.float32, tuple(b.shape)) for fqn, b in model.named_buffers()}
    return {**_renamed(model, originals), **originals}


def _as_saved(checkpoint: Checkpoint, originals: Mapping[str, Original]) -> dict[str, Original]:
    """Tensors by the names that they are saved under, where transformers saves them under other names."""
    if not checkpoint.config:
        return {}
    try:
        model = meta_model(checkpoint.folder)
    except ConfigError:
        return {}
    return _renamed(model, originals)


def _renamed(model: Any, originals: Mapping[str, Original]) -> dict[str, Original]:
    """Let transformers turn tensors into those of the checkpoint's format: renamed, split, merged."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5 they were saved as they were
        return {}
    lazies: dict[str, torch.Tensor] = {
        fqn: LazyTensor(original.shape, original.dtype, _no_values)
        for fqn, original in originals.items()
        if original.shape is not None
    }
    saved = revert_weight_conversion(model, lazies)
    return {name: Original(tensor.dtype, tuple(tensor.shape)) for name, tensor in saved.items()}


def _no_values() -> torch.Tensor:
    raise RuntimeError("only shapes and dtypes are known here")


# ----------------------------------------------------------------------------------------------------
# Writing.
# ----------------------------------------------------------------------------------------------------


def _lazy(name: str, stored: StoredTensor, dtype: torch.dtype | None) -> LazyTensor:
    compute, pieces = functools.partial(stored.read, dtype), functools.partial(_pieces, name, stored, dtype)
    return LazyTensor(stored.shape, dtype or stored.dtype, compute, pieces)


def _pieces(name: str, stored: StoredTensor, dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
    try:
        yield from stored.read_pieces(dtype)
    except OverflowError as error:
        raise ExportError(f"{name}: {error}; convert to bfloat16", fqn=name) from error


def _as_safetensors(file: str) -> str:
    """The name of the safetensors file that holds what another kind of file held."""
    stem = file.removesuffix(".bin")
    return file if stem == file else f"{stem.removeprefix('pytorch_')}.safetensors"


def _layout(
    checkpoint: Checkpoint, tensors: Mapping[str, LazyTensor], max_shard_size: int | str | None
) -> dict[str, list[str]]:
    """Which file holds which tensors."""
    if max_shard_size is None:
        return {_as_safetensors(file): list(names) for file, names in checkpoint.files.items()}
    from huggingface_hub import split_torch_state_dict_into_shards

    try:
        split = split_torch_state_dict_into_shards(
            dict(tensors), filename_pattern=_PATTERN, max_shard_size=max_shard_size
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"max_shard_size: expected bytes or a string such as '5GB', found {max_shard_size!r}"
        ) from error
    return dict(split.filename_to_tensors)


def _copy_rest(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy every file that is not written anew."""
    written = {*checkpoint.files, checkpoint.index, _CONFIG}
    for path in sorted(checkpoint.folder.iterdir()):
        if path.is_dir() and not _NOT_COPIED.fullmatch(path.name):
            shutil.copytree(path, folder / path.name, ignore=_ignored, copy_function=shutil.copyfile)
        elif path.is_file() and path.name not in written:
            shutil.copyfile(path, folder / path.name)


def _ignored(folder: str, names: list[str]) -> list[str]:
    """What is not copied of a folder: what is being written may lie in it too."""
    return [name for name in names if _NOT_COPIED.fullmatch(name) and os.path.isdir(os.path.join(folder, name))]


def _write_config(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy the config; where it names a dtype, it names the original one."""
    key = next((key for key in ("dtype", "torch_dtype") if key in checkpoint.config), None)
    if key is None or dtype is None or checkpoint.dtype == dtype:
        shutil.copyfile(checkpoint.folder / _CONFIG, folder / _CONFIG)
        return
    config = {**checkpoint.config, key: str(dtype).removeprefix("torch.")}
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_index(checkpoint: Checkpoint, folder: Path, files: Mapping[str, list[str]], num_bytes: int) -> None:
    is_kept = files.keys() == checkpoint.files.keys()
    if len(files) == 1 and not (is_kept and checkpoint.index):
        return
    old = read_json(checkpoint.folder / checkpoint.index) if checkpoint.index else {}
    index = {
        **old,
        "metadata": {**old.get("metadata", {}), "total_size": num_bytes},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    name = checkpoint.index if checkpoint.index and is_kept else _INDEX
    (folder / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
