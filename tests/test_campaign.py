"""A short run of the campaign: one seed of each kind, or a part of it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import peft
import pytest
import torch
from torch import nn

from campaign import faults, kills
from kbitwrap.model.roles import returns_float32
from support.failing import failing_at, line, primitive
from support.thorough import few


def hold(trials: Sequence[list[str]], at_least: int) -> None:
    assert [line for violations in trials for line in violations] == []
    assert len(trials) >= at_least


@pytest.mark.parametrize(("stride", "at_least"), few([(805, 200), (6421, 25)], [(6421, 25)]))
@pytest.mark.parametrize("precision", few(["full", "compute", "norms"], ["full"]))
def test_a_fault_at_any_step_on_a_plain_model_leaves_it_whole(precision: str, stride: int, at_least: int) -> None:
    hold([*faults.trials(0, [None], [precision], stride=stride)], at_least)


@pytest.mark.thorough
@pytest.mark.parametrize(("stride", "at_least"), [(67, 40)])
@pytest.mark.parametrize(("name", "precision"), [("llama", "full"), ("gemma2", "compute")])
def test_a_fault_at_any_step_on_a_quantized_model_leaves_it_whole(
    name: str, precision: str, stride: int, at_least: int
) -> None:
    hold([*faults.trials(0, [name], [precision], stride=stride)], at_least)


@pytest.mark.thorough
def test_a_fault_at_the_last_lines_of_adopting_adopts_all_or_nothing() -> None:
    subject = [make() for _, make in faults.subjects("llama", "adapted")][1]
    count = subject.count("adopt", line)
    for number, error in itertools.product(range(count - 260, count, 13), (KeyboardInterrupt, MemoryError)):
        assert [*subject.fail("adopt", number, error(), line)] == [], (number, subject.where)


@pytest.mark.thorough
def test_a_kill_at_any_moment_leaves_what_is_written_whole_or_not_there() -> None:
    hold([*kills.trials(0, tries=6)], 30)


def test_an_interrupt_while_an_adapter_is_asked_for_its_dtype_leaves_autograd_on() -> None:
    layer = peft.tuners.lora.Linear(nn.Linear(4, 4), "default", peft.LoraConfig(), r=2)
    returns_float32(layer, torch.bfloat16)  # torch compiles and caches much at the first call
    with failing_at(None, kind=primitive) as steps:
        returns_float32(layer, torch.bfloat16)
    assert steps.count > 25
    for number in range(0, steps.count, max(steps.count // 60, 1)):
        with contextlib.suppress(KeyboardInterrupt), failing_at(number, kind=primitive):
            returns_float32(layer, torch.bfloat16)
        assert torch.is_grad_enabled(), number
