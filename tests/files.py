"""What checkpoints hold, byte for byte."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

SHARD = 20_000  # bytes: several files for every tiny model


def read(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def saved(model: PreTrainedModel, folder: Path, shard: int | str = SHARD) -> dict[str, bytes]:
    """What the model's own `save_pretrained` writes."""
    model.save_pretrained(folder, max_shard_size=shard)
    return read(folder)
