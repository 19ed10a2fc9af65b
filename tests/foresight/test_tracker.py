"""A tracker's phases follow the step, whatever stands around its passes."""

from __future__ import annotations

import torch
from torch import nn

from kbitwrap import StepTracker


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model whose gradients take more than its activations."""
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.zeros(1, 64)
    return model, torch.optim.SGD(model.parameters(), lr=1e-4), inputs


def test_gradients_that_stay_after_the_optimizers_step_are_not_of_the_forward_pass() -> None:
    model, optimizer, inputs = model_and_optimizer()
    with StepTracker(model, inputs=[inputs]) as alone:
        loss = model(inputs).sum()
    with StepTracker(model, optimizer, [inputs]) as tracker:
        loss = model(inputs).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
        optimizer.zero_grad(set_to_none=False)
    assert list(tracker.phases) == ["forward", "backward", "optimizer"]
    assert tracker.phases["forward"] == alone.phases["forward"]


def test_the_forward_pass_after_a_backward_pass_or_a_step_holds_the_gradients() -> None:
    model, optimizer, inputs = model_and_optimizer()
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    for ends_with_a_step in (False, True):
        with StepTracker(model, optimizer, [inputs]) as tracker:
            for _ in range(2):
                model(inputs).sum().backward()
                if ends_with_a_step:
                    optimizer.step()
        assert tracker.phases["forward"] > tracker.static_bytes + gradients
        optimizer.zero_grad()
