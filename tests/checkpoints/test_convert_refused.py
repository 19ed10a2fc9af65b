"""A checkpoint that is damaged is refused, and so is a place that has none."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kbitwrap import ConfigError, ExportError, convert_checkpoint, inspect_checkpoint

# ----------------------------------------------------------------------------------------------------
# What is cast, and what is not.
# ----------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


class Code:
    """Leaves a file where it is unpickled by an unpickler that runs what it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


PICKLED: dict[str, Callable[[Path], Any]] = {
    "pickled code": lambda path: {"a": torch.ones(100), "b": Code(path.parent / "was run")},
    "pickled, no tensors by name": lambda path: [torch.ones(100)],
    "pickled numbers": lambda path: {"a": 1},
    "pickled before torch 1.6": lambda path: {"a": torch.ones(100)},
    "pickled, transposed": lambda path: {"a": torch.ones(10, 20).t()},
    "pickled, cut off": lambda path: {"a": torch.ones(100)},
    "pickled, not by torch": lambda path: {"a": 1},
}


def pickle_file(path: Path, how: str) -> None:
    content = PICKLED[how](path)
    if how == "pickled, not by torch":
        path.write_bytes(pickle.dumps(content))
        return
    torch.save(content, path, _use_new_zipfile_serialization=how != "pickled before torch 1.6")
    if how == "pickled, cut off":
        path.write_bytes(path.read_bytes()[:-100])


def broken(folder: Path, how: str) -> Path:
    source = checkpoint(folder, {"a": torch.ones(100)}, dtype="bfloat16")
    weights = source / "model.safetensors"
    index = source / "model.safetensors.index.json"
    data = weights.read_bytes()
    if how == "truncated":
        weights.write_bytes(data[:-1])
    elif how == "huge header":
        weights.write_bytes(b"\xff" * 8 + data[8:])
    elif how == "no JSON":
        weights.write_bytes(data[:8] + b"#" + data[9:])
    elif how == "empty":
        weights.write_bytes(b"")
    elif how == "shard missing":
        index.write_text('{"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}')
    elif how == "shard elsewhere":
        index.write_text('{"weight_map": {"a": "../in/model.safetensors"}}')
    elif how == "shard at an absolute path":
        index.write_text(json.dumps({"weight_map": {"a": str(weights)}}))
    elif how == "index of nothing":
        index.write_text('{"weight_map": ["model.safetensors"]}')
    elif how == "tensor of no file":
        index.write_text('{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}')
    elif how == "name too long":
        index.write_text(json.dumps({"weight_map": {"a": 300 * "a"}}))
    elif how == "metadata of nothing":
        index.write_text('{"metadata": null, "weight_map": {"a": "model.safetensors"}}')
    elif how == "config":
        (source / "config.json").write_text("[]")
    elif how == "twice":
        shutil.copyfile(weights, source / "other.safetensors")
        index.write_text('{"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}')
    elif how in PICKLED:
        weights.unlink()
        pickle_file(source / "pytorch_model.bin", how)
    elif how == "no weights":
        weights.unlink()
    elif how == "adapter":
        weights.rename(source / "adapter_model.safetensors")
    return source


BROKEN = {
    "truncated": "cannot be read as safetensors",
    "huge header": "cannot be read as safetensors",
    "no JSON": "cannot be read as safetensors",
    "empty": "cannot be read as safetensors",
    "shard missing": "names 'other.safetensors': expected a file beside it",
    "shard elsewhere": "names '../in/model.safetensors': expected a file beside it",
    "shard at an absolute path": "names '/.*/model.safetensors': expected a file beside it",
    "index of nothing": "expected objects as its metadata and its weight_map, and names of files in this",
    "tensor of no file": "names the tensor 'b', which none of its files holds",
    "name too long": "names 'a+': expected a file beside it",
    "metadata of nothing": "expected objects as its metadata and",
    "config": "expected a JSON object, found a list",
    "twice": "one tensor is in more than one file",
    "pickled, not by torch": r"found a damaged one or other objects \(\w+\); no code in it was run",
    "pickled code": r"found a damaged one or other objects \(UnpicklingError\); no code in it was run",
    "pickled, cut off": r"found a damaged one or other objects \(\w+\); no code in it was run",
    "pickled, no tensors by name": "expected tensors by name, found a list",
    "pickled numbers": "a: expected a dense and contiguous tensor",
    "pickled before torch 1.6": "a: expected a dense and contiguous tensor",
    "pickled, transposed": "a: expected a dense and contiguous tensor",
    "no weights": "expected model weights",
    "adapter": r"found only an adapter \('adapter_model.safetensors'\)",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_damaged_checkpoint_is_refused(how: str, tmp_path: Path) -> None:
    source = broken(tmp_path / "in", how)
    with pytest.raises(ConfigError, match=BROKEN[how]):
        convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(ConfigError, match=BROKEN[how]):
        inspect_checkpoint(source)
    assert not (tmp_path / "out").exists()
    assert not (source / "was run").exists()


@pytest.mark.parametrize("place", ["none", "file.txt", 300 * "n", "no\0name"])
def test_a_place_without_a_checkpoint_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("1")
    with pytest.raises(
        ConfigError, match=r"there is no checkpoint at|expected a folder, or a \.safetensors or \.bin file"
    ):
        convert_checkpoint(tmp_path / place, tmp_path / "out", dtype="bfloat16")


def test_a_pipe_in_the_place_of_an_index_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors.index.json")

    def refuse(*_: object) -> None:
        raise TimeoutError("the pipe was waited for")

    before = signal.signal(signal.SIGALRM, refuse)
    signal.alarm(20)
    try:
        with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: .*not a file"):
            convert_checkpoint(tmp_path, tmp_path / "out", dtype="bfloat16")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_value_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "in", {"a": torch.tensor([1.0, float("inf")]), "b.c": torch.tensor([1.0, 7e4])})
    with pytest.raises(ExportError, match=r"b\.c: a value is too large for torch.float16") as error:
        convert_checkpoint(source, tmp_path / "out", dtype="float16")
    assert error.value.fqn == "b.c"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
