"""The contents of checkpoints: files byte for byte, and tensors by name."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

SHARD = 20_000  # bytes: several files for every tiny model


def read(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def saved(model: nn.Module, folder: Path, shard: int | str = SHARD) -> dict[str, bytes]:
    """Save a model by its own `save_pretrained`, and read the files."""
    model.save_pretrained(folder, max_shard_size=shard)  # type: ignore[operator]
    return read(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in safetensors files."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
