"""The batch of a step: described by its size, by the shapes of its tensors, or by a processor's own output."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ConfigError
from ..tensors.dtypes import parse_dtype
from .fakes import FakeModel

MOST_TOKENS = 1 << 20
"""Tokens of a batch, whose ids are real tensors: what models ask of more is not computed."""

Inputs = dict[str, Tensor]
"""The tensors that a model is called with, by name."""

_LABELS_ADDED = (
    "labels of the shape of input_ids were added to the processor's output, as collators "
    "add them"
)


def complete(inputs: Any) -> tuple[Inputs | None, tuple[str, ...]]:
    """Read the inputs that were given.

    Args:
        inputs: Tensors or ``(shape, dtype)`` by name, the output of a processor, or
            ``None`` for none.

    Returns:
        Copies of the tensors, which a model may write to, and what was added to them.
        What was described is on the meta device where it has no integers.

    Raises:
        ConfigError: They are something else.
    """
    if inputs is None:
        return None, ()
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs: expected tensors or (shape, dtype) by name, found a {type(inputs).__name__}"
        )
    read = {name: _read(name, value) for name, value in inputs.items()}
    # tensors of one memory share it in the copy too
    read = copy.deepcopy(read)
    # what processors and tokenizers return, and nobody writes by hand
    is_processed = isinstance(inputs, UserDict)
    if not is_processed or "input_ids" not in read or "labels" in read:
        return read, ()
    read["labels"] = read["input_ids"].clone()
    return read, (_LABELS_ADDED,)


def _read(name: str, value: Any) -> Tensor:
    """Return an input: with its values where it has some, which a model may look at."""
    if isinstance(value, Tensor):
        return value.detach().to("meta" if value.is_meta else "cpu")
    try:
        size, kind = value
        kind = parse_dtype(kind) if isinstance(kind, str) else kind
        return torch.zeros(
            size, dtype=kind, device="meta" if kind.is_floating_point else "cpu"
        )
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"inputs: {name}: expected a tensor or (shape, dtype), found a {type(value).__name__}; "
            "a processor returns tensors if asked by return_tensors='pt'"
        ) from error


def batch_shape(
    inputs: Mapping[str, Tensor] | None, batch_size: int | None, seq_len: int | None
) -> tuple[int, int]:
    """Return the sequences of a batch and the tokens of each: those given, or else of the inputs.

    Raises:
        ConfigError: They are missing, make no batch or one that is too large, or are not
            those of the inputs.
    """
    given = {"batch_size": batch_size, "seq_len": seq_len}
    ids = None if inputs is None else inputs.get("input_ids")
    if ids is not None and ids.ndim == 2:
        for name, number in zip(given, ids.shape, strict=True):
            if given[name] not in (None, number):
                raise ConfigError(
                    f"{name}: expected {number}, as input_ids of shape {tuple(ids.shape)} say, "
                    f"found {given[name]!r}: leave it out"
                )
            given[name] = number
    sequences = _positive("batch_size", given["batch_size"])
    tokens = _positive("seq_len", given["seq_len"])
    if sequences * tokens > MOST_TOKENS:
        raise ConfigError(
            f"batch_size and seq_len: expected a batch of at most {MOST_TOKENS:,} tokens, found {sequences:,} x "
            f"{tokens:,}"
        )
    return sequences, tokens


def _positive(name: str, value: Any) -> int:
    if value is None:
        raise ConfigError(
            f"{name}: give the number, or args of a trainer, or inputs with input_ids, "
            "which say it"
        )
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}: expected a positive number, found {value!r}")
    return value


def make_batch(
    fakes: FakeModel, batch_size: int, seq_len: int, inputs: Mapping[str, Tensor] | None
) -> Inputs:
    """Return the inputs of the step: real where they have values, so that a model may look at them, and else fake.

    Without ``inputs`` they are ids and labels alone.
    """
    batch = {}
    with _disable_current_modes():  # some inputs have values
        if inputs is None:
            ordinary = ordinary_token(fakes.model)
            for name in ("input_ids", "labels"):
                batch[name] = torch.full((batch_size, seq_len), ordinary)
            return batch
        with fakes.mode:
            for name, value in inputs.items():
                batch[name] = fakes.fake(value) if value.is_meta else value
    return batch


def ordinary_token(model: nn.Module) -> int:
    """Return a token that means nothing special to a model, such as padding."""
    special = set()
    config = getattr(model, "config", None)
    parts = [] if config is None else [config, config.get_text_config()]
    for part in parts:
        for name, value in vars(part).items():
            is_token = name.endswith(("_token_id", "_token_index", "padding_idx"))
            if is_token and isinstance(value, int):
                special.add(value)
    return next(token for token in range(len(special) + 1) if token not in special)
