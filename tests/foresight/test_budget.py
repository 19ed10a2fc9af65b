"""The longest sequence and the largest batch that a budget allows."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from torch import nn
from torch.nn import functional as F

from kbitwrap import StepPredictor
from kbitwrap.foresight.budget import largest


@given(
    fixed=st.integers(0, 10_000),
    slope=st.integers(1, 1_000),
    square=st.integers(0, 20),
    step=st.integers(1, 512),
    budget=st.integers(0, 10_000_000),
    start=st.integers(1, 5_000),
    limit=st.integers(1, 100_000),
)
def test_the_largest_number_within_a_budget_is_found_in_few_trials(
    fixed: int, slope: int, square: int, step: int, budget: int, start: int, limit: int
) -> None:
    trials: list[int] = []

    def num_bytes(number: int) -> int:
        trials.append(number)
        return -(-(fixed + slope * number + square * number * number) // step) * step

    found = largest(num_bytes, budget, start, limit)
    assert found == 0 or num_bytes(found) <= budget
    assert found == limit or num_bytes(found + 1) > budget
    assert len(trials) <= 42


def test_a_line_is_followed_to_its_end_in_five_trials() -> None:
    trials: list[int] = []

    def num_bytes(number: int) -> int:
        trials.append(number)
        return 5_000_000_000 + 1_234_567 * number

    assert largest(num_bytes, 8 * 2**30, 2048, 131_072) == 2907
    assert len(trials) <= 5


class Bigrams(nn.Module):
    """A language model as small as there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_the_largest_batch_and_the_longest_sequence_fit_a_budget_that_one_more_does_not() -> None:
    lora = LoraConfig(target_modules=["head"])
    predict = StepPredictor(Bigrams(), precision="none", gradient_checkpointing=False, lora=lora, kernels="cpu")
    budget = predict(50, 7).peak_bytes
    assert predict.largest_batch(budget, 7) == 50
    assert predict.largest_batch(budget - 1, 7) == 49
    assert predict.longest_sequence(budget, 50) == 7
