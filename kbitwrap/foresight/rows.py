"""The rows of a trainer's data set and the tokenizer that goes with them, all of the full length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Row = dict[str, Any]

_WORDS = ("<pad>", "<eos>", "<unk>")


def tokenizer_of(vocabulary_size: int, ordinary: int) -> Any:
    """A tokenizer of transformers for texts of the word ``w``, which is made in memory.

    Args:
        vocabulary_size: The number of the model's tokens.
        ordinary: The token that ``w`` stands for.

    Returns:
        The tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words: dict[str, int] = {"w": ordinary}
    free = (number for number in range(vocabulary_size) if number != ordinary)
    words.update(zip(_WORDS, free, strict=False))
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=1 << 30,
    )


def _language_modeling(args: Any, token: int, seq_len: int) -> Row:
    """A row that transformers' own collator and TRL's for SFT take."""
    row: Row = {"input_ids": [token] * seq_len, "labels": [token] * seq_len}
    if getattr(args, "packing", False) and args.packing_strategy != "wrapped":
        # packed documents are more than one, and attention keeps them apart
        half = seq_len // 2
        row["seq_lengths"] = [half, seq_len - half] if half else [seq_len]
    return row


def _pair(args: Any, token: int, seq_len: int) -> Row:
    """A prompt of half the length, with two answers."""
    prompt = seq_len // 2
    answer = [token] * (seq_len - prompt)
    return {
        "prompt_ids": [token] * prompt,
        "chosen_ids": answer,
        "rejected_ids": answer,
    }


def _ranked(args: Any, token: int, seq_len: int) -> Row:
    """Two answers."""
    ids = [token] * seq_len
    return {"chosen_ids": ids, "rejected_ids": ids}


_ROWS: dict[str, Callable[[Any, int, int], Row]] = {
    "Trainer": _language_modeling,
    "SFTTrainer": _language_modeling,
    "DPOTrainer": _pair,
    "RewardTrainer": _ranked,
}
"""Functions that make a row as the collator of a trainer takes it, by the name of the trainer's class."""


def row_of(trainer: str, args: Any, token: int, seq_len: int) -> Row | None:
    """A row of the full length.

    Args:
        trainer: The name of the trainer's class.
        args: The trainer's arguments.
        token: The token that is repeated.
        seq_len: Tokens in a sequence.

    Returns:
        The row; ``None`` for a trainer whose rows are not known.
    """
    make = _ROWS.get(trainer)
    return None if make is None else make(args, token, seq_len)
