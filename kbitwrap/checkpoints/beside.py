"""The files beside the weights of a base and of an adapter: what a merge copies of them, and what it leaves behind."""

from __future__ import annotations

import filecmp
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
# What another training left there, and settings of quantized weights that the merge does
# not have.
_OF_OTHERS = (
    *("adapter_config.json", MANIFEST_NAME, "trainer_state.json"),
    *("quantize_config.json", "quant_config.json", "hf_quant_config.json"),
)
# Other checkpoints that a run keeps in the folder of its last one, and hidden folders
# of tools.
_NOT_COPIED = re.compile(r"checkpoint-\d+|\..*")
_SETTINGS = "tokenizer_config.json"
_VOCABULARY = "tokenizer.json"
_TEMPLATES = (
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/",
)
# Files that loading reads together. If the adapter has one of a group, none of the group is
# copied from the base.
_TOGETHER = (
    (_SETTINGS, "special_tokens_map.json", "added_tokens.json"),
    _TEMPLATES,
    PROCESSOR_FILES,
)
# The files of sentence-transformers beside a model, and the folders of the modules that
# it puts after a model, which have weights of their own.
_OF_SENTENCES = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
_SENTENCE_MODULE = re.compile(r"\d+_\w+/")
_MODULES_ON_HUB = "[0-9]*_*/*"
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
    real = Path(os.path.realpath(path))  # `resolve` raises for a loop of links
    if not (real.is_relative_to(folder) or real.is_relative_to(cache)):
        return "is a link that leads out of the checkpoint"

    if path.is_symlink() and path.is_dir():
        return "links to a folder"

    return ""


def files_beside(base: StrPath, adapter: Path | None) -> tuple[Files, list[str]]:
    """Find the files to copy beside a merge's weights, and name those of the base that are left behind.

    All files of the base are copied that are no weights. A file of the adapter replaces the
    base's file of its name, and the files that are read together with it. If the adapter's
    vocabulary differs, none of the base's tokenizer is copied, except chat templates and
    processor files.
    """
    home = _with_small_files(base)
    of_base, left = _files_in(home) if home is not None else ({}, [])
    files = {}
    if adapter is not None:
        found, _ = _files_in(adapter)
        for name, path in found.items():
            is_read = is_of_a_tokenizer(name) or name.startswith(_TEMPLATES)
            is_read = is_read or bool(_SENTENCE_MODULE.match(name))
            if is_read or name in of_base or name in _OF_SENTENCES:
                files[name] = path

    # files of the base whose names begin so are left behind
    replaced: list[str] = []
    for kind in _TOGETHER:
        if any(name.startswith(kind) for name in files):
            replaced += kind
    settings = files.get(_SETTINGS)
    if settings is not None and read_json(settings).get("chat_template"):
        replaced += _TEMPLATES
    has_both = _VOCABULARY in of_base and _VOCABULARY in files
    if has_both and _vocabulary_in(of_base) != _vocabulary_in(files):
        names = {name for name in of_base if is_of_a_tokenizer(name)}
        replaced += names.difference(_TEMPLATES, PROCESSOR_FILES)
    for name in of_base.keys() - files.keys():
        if name.startswith(tuple(replaced)):
            left.append(name)
        else:
            files[name] = of_base[name]

    return files, sorted(left)


def _vocabulary_in(files: Files) -> Any:
    """Read the vocabulary of a ``tokenizer.json``, without the tokens that were added to it."""
    model = read_json(files[_VOCABULARY]).get("model")
    return model.get("vocab") if isinstance(model, dict) else None


def _files_in(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the files of a folder that may lie beside other weights, and name those that may not."""
    files = {}
    left = []
    for path in walk_files(folder):
        name = path.relative_to(folder).as_posix()
        is_weights = any(fnmatch(path.name, pattern) for pattern in _WEIGHTS)
        if is_weights and not _SENTENCE_MODULE.match(name):
            continue
        if name in _WRITTEN or path.name.startswith("."):
            continue
        if why_not_followed(path, folder) or path.name in _OF_OTHERS:
            left.append(name)
        elif path.is_file():
            files[name] = path

    return files, left


def _with_small_files(base: StrPath) -> Path | None:
    """Return the folder of a base; of one on the hub the snapshot, with all that is no weights."""
    from huggingface_hub import snapshot_download

    if os.path.isdir(base):
        return Path(base)

    try:
        name = os.fspath(base)
        snapshot_download(name, allow_patterns=_MODULES_ON_HUB)
        return Path(snapshot_download(name, ignore_patterns=[*_WEIGHTS, ".*"]))
    except (OSError, ValueError):  # no such repository, or nothing of it is here
        return None


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
