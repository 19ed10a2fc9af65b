"""The rows of a trainer's data set and the tokenizer that goes with them, all of the full length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Row = dict[str, Any]

_WORD = "w"
_SPECIAL = ("<pad>", "<eos>", "<unk>")


def tokenizer_of(vocabulary_size: int, ordinary: int) -> Any:
    """Return a tokenizer of transformers for texts of one word, which is made in memory.

    Args:
        vocabulary_size: The number of the model's tokens.
        ordinary: The token that the word stands for.

    Returns:
        The tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {_WORD: ordinary}
    free = (number for number in range(vocabulary_size) if number != ordinary)
    words.update(zip(_SPECIAL, free, strict=False))
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=1 << 30,
    )


def _text(length: int) -> str:
    return " ".join([_WORD] * length)


def _tokens(args: Any, token: int, seq_len: int) -> Row:
    """Return a row that transformers' own collator and TRL's for SFT take."""
    row = {"input_ids": [token] * seq_len, "labels": [token] * seq_len}
    if getattr(args, "packing", False) and args.packing_strategy != "wrapped":
        # packed documents are more than one, and attention keeps them apart
        half = seq_len // 2
        row["seq_lengths"] = [half, seq_len - half] if half else [seq_len]
    return row


def _pair(args: Any, token: int, seq_len: int) -> Row:
    """Return a prompt of half the length, with two answers."""
    prompt = seq_len // 2
    answer = [token] * (seq_len - prompt)
    return {
        "prompt_ids": [token] * prompt,
        "chosen_ids": answer,
        "rejected_ids": answer,
    }


def _unpaired(args: Any, token: int, seq_len: int) -> Row:
    """Return a prompt of half the length with one answer, and another's answer where the loss compares with those."""
    prompt = seq_len // 2
    answer = [token] * (seq_len - prompt)
    row = {"prompt_ids": [token] * prompt, "completion_ids": answer, "label": True}
    if args.loss_type == "kto":
        row["KL_completion_ids"] = answer
    return row


def _ranked(args: Any, token: int, seq_len: int) -> Row:
    """Two answers."""
    ids = [token] * seq_len
    return {"chosen_ids": ids, "rejected_ids": ids}


def _prompt(args: Any, token: int, seq_len: int) -> Row:
    """Return a prompt that leaves room for a completion."""
    return {"prompt": _text(max(1, seq_len - completion_length(args, seq_len)))}


def completion_length(args: Any, seq_len: int) -> int:
    """Return the tokens of a completion, in a sequence of so many: as many as the arguments allow beside a prompt."""
    most = args.max_completion_length or seq_len
    return max(1, min(most, seq_len - 1))


class Rows(NamedTuple):
    """The rows of a trainer.

    Attributes:
        first: The columns of a row as a user has it, for the trainer's constructor.
        make: Makes a row as the trainer's collator takes it, of its arguments, a token
            that is repeated, and a length.
        said: What is assumed of the rows.
    """

    first: Row
    make: Callable[[Any, int, int], Row]
    said: str = ""


_COMPLETIONS = (
    "prompts and completions are given: what generates completions, and what scores them, "
    "is not in the step"
)

ROWS = {
    "Trainer": Rows({"input_ids": [0], "labels": [0]}, _tokens),
    "SFTTrainer": Rows({"input_ids": [0, 0, 0, 0]}, _tokens),
    "DPOTrainer": Rows(
        {"prompt": _WORD, "chosen": f" {_WORD}", "rejected": f" {_WORD}"},
        _pair,
        "prompts of pairs are taken to be half of each sequence",
    ),
    "KTOTrainer": Rows(
        {"prompt": _WORD, "completion": f" {_WORD}", "label": True},
        _unpaired,
        "prompts are taken to be half of each sequence, and all completions to be desirable",
    ),
    "RewardTrainer": Rows({"chosen": _text(2), "rejected": _text(2)}, _ranked),
    "GRPOTrainer": Rows({"prompt": _WORD}, _prompt, _COMPLETIONS),
    "RLOOTrainer": Rows({"prompt": _WORD}, _prompt, _COMPLETIONS),
}
"""The rows by the name of the trainer's class."""
