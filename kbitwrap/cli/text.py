"""English text that every CPython carries, as blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .console import InputError

NUM_BYTES = 256
_HELD_OUT_EVERY = 8  # every eighth topic is for evaluation alone
_MAX_CHARACTERS = 400_000


class ByteTokens:
    """A token is a byte of UTF-8; higher ids are special and have no text."""

    def encode(self, text: str) -> list[int]:
        """Text as token ids, without special tokens."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Token ids as text."""
        return bytes(id_ for id_ in ids if id_ < NUM_BYTES).decode(errors="replace")


class TokenizerTokens:
    """The tokens of a model's own tokenizer.

    Args:
        tokenizer: The tokenizer, from transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Text as token ids, without special tokens."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Token ids as text."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


Tokens = ByteTokens | TokenizerTokens
"""The functions that turn text into tokens and back."""


@dataclass(frozen=True)
class Blocks:
    """Text as blocks of tokens.

    Attributes:
        training: ``(num_blocks, length)``, int64, shuffled.
        held_out: ``(num_held_out, length)``, int64, of topics that training never sees.
    """

    training: torch.Tensor
    held_out: torch.Tensor


def read_blocks(tokens: Tokens, *, length: int, num_held_out: int, seed: int) -> Blocks:
    """Cut the help texts of ``pydoc`` into blocks.

    Args:
        tokens: What turns text into tokens.
        length: Tokens in a block.
        num_held_out: Blocks to hold out for evaluation.
        seed: Seed of the shuffling.

    Returns:
        The blocks, on the CPU.

    Raises:
        InputError: The tokens are too few.
    """
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    held_out_texts = texts[::_HELD_OUT_EVERY]
    del texts[::_HELD_OUT_EVERY]
    generator = torch.Generator().manual_seed(seed)

    def cut(texts: list[str]) -> torch.Tensor:
        text = "\n".join(texts)
        ids = tokens.encode(text[:_MAX_CHARACTERS])
        num_blocks = len(ids) // length
        if num_blocks < num_held_out:
            raise InputError(
                f"the tokenizer makes only {len(ids)} tokens of {len(text)} characters of English text"
            )
        blocks = torch.tensor(ids[: num_blocks * length]).view(num_blocks, length)
        return blocks[torch.randperm(num_blocks, generator=generator)]

    training = cut(texts)
    held_out = cut(held_out_texts)
    return Blocks(training, held_out[:num_held_out])
