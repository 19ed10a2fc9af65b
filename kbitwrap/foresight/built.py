"""Reads a trainer that was built, and copies its data and collator to the simulated one."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..model.wrappers import loaded_class

MOST_ROWS = 10_000
"""Rows of a data set among which the longest are looked for."""
_REFERENCE = "ref"  # TRL's name of the adapter that it copies for a reference


def is_trainer(source: Any) -> bool:
    """Return whether something is a trainer of transformers, or one derived from it."""
    return isinstance(source, loaded_class("transformers.trainer", "Trainer"))


class BuiltTrainer:
    """A trainer that was built, and the longest rows of its data.

    Args:
        trainer: The trainer; nothing of it is changed.

    Attributes:
        args: Its arguments.
        model: Its model.
        note: What is assumed of the rows of the step; ``""`` where nothing is.
        seq_len: Tokens in the longest sequence of its data; ``None`` where the rows do
            not tell it.

    Raises:
        ConfigError: It holds another model, or an optimizer that its arguments do not
            name.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.args = trainer.args
        self.model: nn.Module = trainer.model
        for name, value in vars(trainer).items():
            values = value if isinstance(value, (list, tuple)) else [value]
            others = [one for one in values if isinstance(one, nn.Module)]
            if name not in ("model", "model_wrapped", "model_reward_funcs") and others:
                raise ConfigError(
                    f"args: the trainer holds another model, {name}, and its step is not predicted"
                )
        if trainer.optimizer is not None:
            raise ConfigError(
                "optimizer: one that was made before the trainer is not predicted: name it in args.optim"
            )
        rows = []
        if trainer.train_dataset is not None:
            rows = list(itertools.islice(trainer.train_dataset, MOST_ROWS))
        if not all(map(_num_tokens, rows)):
            rows = []  # some do not tell their length
        rows.sort(key=_num_tokens, reverse=True)
        self._rows = rows
        self.note = ""
        self.seq_len = None
        if rows:
            self.note = (
                f"the rows of the batch are the longest of the first {len(rows):,} that the "
                "trainer has"
            )
            longest = _num_tokens(rows[0])
            most = getattr(trainer.data_collator, "max_length", None)
            self.seq_len = min(longest, most or longest)

    def rows(self, number: int) -> list[Any]:
        """Return the longest rows.

        Args:
            number: How many; they begin again where there are fewer.
        """
        return list(itertools.islice(itertools.cycle(self._rows), number))

    @staticmethod
    def drop_reference(model: Any) -> None:
        """Delete the adapter that TRL copies for a reference, where a model has it."""
        if _REFERENCE in getattr(model, "peft_config", ()):
            model.delete_adapter(_REFERENCE)

    def hand_over(self, trainer: Any, recorded_class: Any) -> None:
        """Give another trainer what this one has beyond the arguments.

        Args:
            trainer: The other one.
            recorded_class: Derives a class whose steps are recorded.
        """
        own = self._trainer
        if _REFERENCE not in getattr(self.model, "peft_config", ()):
            self.drop_reference(trainer.model)
        if not issubclass(type(trainer), type(own)):
            trainer.__class__ = recorded_class(type(own))
        for name in ("data_collator", "processing_class", "compute_loss_func"):
            setattr(trainer, name, getattr(own, name))
        for name, value in vars(own).items():
            if name not in vars(trainer):
                setattr(trainer, name, value)


def _num_tokens(row: Any) -> int:
    """Count the tokens of a row, as trainers tokenize them; 0 where the row does not tell."""
    if not isinstance(row, dict):
        return 0
    ids = row.get("input_ids")
    if ids is not None:
        return len(ids)
    answers = [len(row[name]) for name in ("chosen_ids", "rejected_ids") if name in row]
    prompt = len(row.get("prompt_ids", ()))
    return prompt + max(answers) if answers else 0
