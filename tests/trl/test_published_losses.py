"""The losses of TRL's earlier versions, which docs/figures/published_trl.py writes out, have the values of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trl.trainer.utils
from torch import Tensor

TOKENS, WIDTH, WORDS = 700, 16, 50


@pytest.fixture(scope="module")
def published(figures: Callable[[str], Any]) -> Any:
    return figures("published_trl")


def _found(function: Callable[..., Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(WORDS, WIDTH, generator=generator)
    labels = torch.randint(WORDS, (TOKENS,), generator=generator)
    log_probs, entropy, _, _, is_right = function(
        hidden, weight, None, labels, 1.0, 256, None, 1.0, ("entropy", "is_top1")
    )
    log_probs.sum().backward()
    gradient = hidden.grad
    assert gradient is not None
    return {"log_probs": log_probs, "entropy": entropy, "is_right": is_right, "gradient": gradient}


@pytest.mark.parametrize("code", ["trl-0.27", "trl-0.29", "trl-1.12", "trl-1.14"])
def test_it_has_the_values_of_the_installed_one(published: Any, code: str) -> None:
    own = _found(trl.trainer.utils._ChunkedLogProbFunction.apply)
    with published.loss_of(code):
        assert trl.trainer.utils._ChunkedLogProbFunction.apply is published.LOSSES[code]
        found = _found(trl.trainer.utils._ChunkedLogProbFunction.apply)
    for name, value in own.items():
        some, wanted = found[name], value
        if name == "is_right" and code < "trl-1":  # its last position was not looked at
            some, wanted = some[:-1], wanted[:-1]
        torch.testing.assert_close(some, wanted.to(some.dtype))


def test_it_is_given_back(published: Any) -> None:
    own = trl.trainer.utils._ChunkedLogProbFunction
    with pytest.raises(KeyError), published.loss_of("trl-0.29"):
        raise KeyError
    assert trl.trainer.utils._ChunkedLogProbFunction is own
