"""Models for the demonstration of the command line that are smaller than its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers


def save_llama(folder: Path, **fields: Any) -> str:
    """Save a model of one block; what is returned is the folder's name."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**{**shape, "vocab_size": 300, "max_position_embeddings": 128, **fields})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)
