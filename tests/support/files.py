"""The contents of checkpoints: files byte for byte, and tensors by name."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
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


def save_tokenizer(folder: Path, num_ids: int) -> None:
    """Save a tokenizer of so many ids."""
    make_tokenizer(num_ids).save_pretrained(folder)


def make_tokenizer(num_ids: int) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of words whose ids are counted from 0; the last is a chat template's token."""
    vocabulary = {f"w{number}": number for number in range(num_ids - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.add_special_tokens(["<|im_start|>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
