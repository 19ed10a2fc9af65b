"""The files beside the weights of a base and of an adapter: what a merge copies of them, and what it leaves behind."""

from __future__ import annotations

import filecmp
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..config import StrPath
from ..export.writer import PROCESSOR_FILES, is_of_a_tokenizer
from ..manifest.manifest import MANIFEST_NAME
from .reader import read_json

# Weights and their indexes, in all formats.
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml"),
    *("*.onnx", "*.onnx?data*", "*.msgpack", "*.h5", "*.npz", "*.ot", "*.tflite"),
    "*.index.json",
)
# What the merge writes itself, by its name in the folder.
_WRITTEN = ("config.json", "README.md")
# What another training left there, or says how weights are quantized that the merge does
# not have.
_OF_OTHERS = (
    *("adapter_config.json", MANIFEST_NAME, "trainer_state.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
)
# Other checkpoints that a run keeps in the folder of its last one, and hidden folders
# of tools.
_NOT_COPIED = re.compile(r"checkpoint-\d+|\..*")
_TEMPLATES = "additional_chat_templates/"
_SETTINGS = "tokenizer_config.json"
_VOCABULARY = "tokenizer.json"
# The files that are read together: where an adapter has one of them, a base's are of
# another tokenizer.
_TOGETHER = (
    (_SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    ("chat_template.jinja", "chat_template.json", _TEMPLATES),
    PROCESSOR_FILES,
)
# The modules that sentence-transformers puts after a model, in folders.
_MODULES = "modules.json"
_OF_SENTENCES = (
    _MODULES,
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
Files = Mapping[str, Path]
"""Files by their names, relative to a folder."""


def walk_files(home: Path) -> Iterator[Path]:
    """Yield the files in a folder and below it, and links to folders, which are not followed."""
    for place, folders, files in os.walk(home):
        folders[:] = [name for name in folders if not _NOT_COPIED.fullmatch(name)]
        links = [name for name in folders if Path(place, name).is_symlink()]
        for name in sorted([*links, *files]):
            yield Path(place, name)


def why_not_followed(path: Path, home: Path) -> str:
    """Say why a link in a folder, or in the hub's cache, must not be followed; ``""`` where it may be, or is none."""
    folder = home.resolve()
    is_snapshot = folder.parent.name == "snapshots"
    cache = folder.parent.parent / "blobs" if is_snapshot else folder
    real = path.resolve()
    if not (real.is_relative_to(folder) or real.is_relative_to(cache)):
        return "is a link that leads out of the checkpoint"

    if path.is_symlink() and path.is_dir():
        return "links to a folder"

    return ""


def files_beside(base: StrPath, adapter: Path | None) -> tuple[Files, list[str]]:
    """Find the files to copy beside a merge's weights, and name those of the base that are left behind.

    All of the base's are copied that are no weights. What lies beside the adapter wins.
    """
    home = _with_small_files(base)
    of_base, left = _files_in(home) if home is not None else ({}, [])
    of_adapter: dict[str, Path] = {}
    if adapter is not None:
        found, _ = _files_in(adapter)
        read = (_TEMPLATES, *_folders_of_modules(found))
        for name, path in found.items():
            is_read = is_of_a_tokenizer(name) or name.startswith(read)
            if is_read or name in of_base or name in _OF_SENTENCES:
                of_adapter[name] = path

    # the beginnings of the names that files of the base must not have beside those
    replaced: list[str] = []
    for kind in _TOGETHER:
        if any(name.startswith(kind) for name in of_adapter):
            replaced += kind
    settings = of_adapter.get(_SETTINGS)
    if settings is not None and read_json(settings).get("chat_template"):
        replaced += _TOGETHER[1]
    has_both = _VOCABULARY in of_base and _VOCABULARY in of_adapter
    if has_both and _vocabulary_in(of_base) != _vocabulary_in(of_adapter):
        names = {name for name in of_base if is_of_a_tokenizer(name)}
        replaced += names.difference(*_TOGETHER[1:])

    files = dict(of_adapter)
    for name, path in of_base.items():
        if name not in files and name.startswith(tuple(replaced)):
            left.append(name)
        else:
            files.setdefault(name, path)

    return files, sorted(left)


def _files_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the files of a folder that may lie beside other weights, and name those that may not."""
    files: dict[str, Path] = {}
    left: list[str] = []
    weights = {}
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        if name in _WRITTEN or path.name.startswith("."):
            continue
        if any(fnmatch(path.name, pattern) for pattern in _WEIGHTS):
            weights[name] = path
        elif why_not_followed(path, folder) or path.name in _OF_OTHERS:
            left.append(name)
        elif path.is_file():
            files[name] = path

    modules = tuple(_folders_of_modules(files))
    for name, path in weights.items():
        if name.startswith(modules) and not why_not_followed(path, folder):
            files[name] = path

    return files, left


def _folders_of_modules(files: Files) -> list[str]:
    """Return the folders of the modules after a model, which have weights of their own."""
    path = files.get(_MODULES)
    if path is None:
        return []

    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        found = [module["path"] for module in modules if module["path"]]
    except (OSError, ValueError, LookupError, TypeError):  # it is of another tool
        return []

    return [f"{name}/" for name in found if isinstance(name, str)]


def _vocabulary_in(files: Files) -> Any:
    """Read the vocabulary of a ``tokenizer.json``, without the tokens that were added to it."""
    model = read_json(files[_VOCABULARY]).get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _with_small_files(base: StrPath) -> Path | None:
    """Return the folder of a base; of one on the hub the snapshot, with all that is no weights."""
    from huggingface_hub import snapshot_download

    if os.path.isdir(base):
        return Path(base)

    try:
        name = os.fspath(base)
        folder = Path(snapshot_download(name, ignore_patterns=[*_WEIGHTS, ".*"]))
        modules = _folders_of_modules({_MODULES: folder / _MODULES})
        if modules:
            snapshot_download(name, allow_patterns=modules)
    except (OSError, ValueError):  # no such repository, or nothing of it is here
        return None

    return folder


def copy_files(files: Files, folder: Path) -> None:
    """Copy files into a folder, but for those that are there."""
    for name, source in files.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)


def are_copies(found: Path, folder: Path, files: Files) -> bool:
    """Tell whether a file in a folder, or all below a folder in it, is a copy of one of these files."""
    if found.is_dir() and not found.is_symlink():
        inside = [*found.iterdir()]
        return bool(inside) and all(are_copies(one, folder, files) for one in inside)

    source = files.get(found.relative_to(folder).as_posix())
    is_there = source is not None and source.is_file() and not found.is_symlink()
    return is_there and filecmp.cmp(found, str(source), shallow=False)
