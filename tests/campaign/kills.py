"""Kills while a checkpoint, an export or a manifest is written: what is there afterwards is whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from support.killing import kill_at_random

EXPORT = """
import warnings
import torch
from kbitwrap import KbitPreparedModel
warnings.simplefilter("ignore")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(500, 100), torch.nn.Linear(100, 500), torch.nn.LayerNorm(500)).bfloat16()
prepared = KbitPreparedModel(model, precision="full").prepare()
def write(destination):
    prepared.export(destination)
"""
MANIFEST = EXPORT.replace("prepared.export(destination)", "manifest.save(destination)").replace(
    "def write", "manifest = prepared.manifest()\ndef write"
)
OVERWRITTEN = """
import os
from kbitwrap.export import staging
target = folder / "target"
def write(destination):
    with staging.staged(target, overwrite=True, owns=lambda path: True) as out:
        for name in ("config.json", *"abcde"):
            (out / name).write_text(destination.name)
"""
# Where folders cannot be exchanged a kill may leave a part of the files in sight until the next write, which makes it
# whole; but never a config, without which it is taken for no checkpoint.
FILE_BY_FILE = OVERWRITTEN.replace("target =", "staging._exchange = lambda first, second: False\ntarget =")
# As in the working directory, at a mount point and in a folder of others.
STAYS = "staging._moved_out = lambda hidden, target: None if hidden.parent == target else hidden"
IN_PLACE = OVERWRITTEN.replace("target =", f"{STAYS}\ntarget =")
CONVERT = """
from kbitwrap import convert_checkpoint
source = folder.parent / "source"
def write(destination):
    convert_checkpoint(source, destination, dtype="bfloat16")
"""
PROGRAMS = {
    "export": EXPORT,
    "manifest": MANIFEST,
    "overwrite": OVERWRITTEN,
    "overwrite file by file": FILE_BY_FILE,
    "overwrite in place": IN_PLACE,
    "convert": CONVERT,
}


def content(path: Path) -> dict[str, bytes]:
    """The files of a folder that are not hidden, or the file."""
    if not path.is_dir():
        return {"": path.read_bytes()}
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def trials(seed: int, tries: int = 20) -> Iterator[list[str]]:
    """Kill each program some times: what is at a destination is what a run that is not killed leaves there."""
    hit: list[int] = []
    for name, program in PROGRAMS.items():
        with tempfile.TemporaryDirectory() as parent:
            source, folder = Path(parent, "source"), Path(parent, "out")
            source.mkdir()
            folder.mkdir()
            save_file({f"t{i}": torch.full((300, 100), i + 1 / 3) for i in range(10)}, source / "model.safetensors")
            (source / "tokenizer.json").write_text("{}")
            for attempt, violations in enumerate(kill(program, folder, tries, seed, hit)):
                yield [f"{name}, kill {attempt}: {line}" for line in violations]
    if len(hit) < tries / 4:  # of as many times each program
        yield [f"only {len(hit)} kills hit a write"]


def kill(program: str, folder: Path, tries: int, seed: int, hit: list[int]) -> Iterator[list[str]]:
    """Kill one program, and say of each kill what is not whole; note those that left a temporary."""
    is_overwriting = "overwrite=True" in program
    is_in_one_step = "staging._" not in program
    for attempt, paths in enumerate(kill_at_random(program, folder, tries, seed=seed)):
        there = {path.name: content(path) for path in paths if not path.name.startswith(".")}
        if attempt == 0:
            expected = there.get("whole")
            continue
        if is_overwriting:
            found = there.pop("target", {})
            is_whole = {*found} == {"config.json", *"abcde"} and len(set(found.values())) == 1
            is_none = not is_in_one_step and attempt <= tries and "config.json" not in found
            violations = [] if is_whole or is_none else [f"the old and the new: {found}"]
            paths += folder.glob("target/.*")
        else:
            violations = [f"{path} is not whole" for path, found in there.items() if found != expected]
            for path in paths:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if len(paths) > len(there) + is_overwriting:
            hit.append(attempt)
        if attempt <= tries:
            yield violations
        elif is_overwriting and len(paths) > 1:
            yield [*violations, f"{len(paths) - 1} folders are left over"]
