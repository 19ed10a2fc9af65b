"""DistributedDataParallel with one process loses a gradient accumulator as with several."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from kbitwrap import KbitPreparedModel, LifecycleState, StateError
from support import zoo


@pytest.fixture
def group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
@pytest.mark.usefixtures("group")
def test_a_suspension_that_would_end_training_is_refused_in_a_group_of_one(precision: str) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision, gradient_checkpointing=False).prepare()
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    parallel = DistributedDataParallel(peft.get_peft_model(model, config, autocast_adapter_dtype=False))

    def step() -> None:
        parallel.zero_grad()
        parallel(**zoo.inputs("llama", model)).loss.backward()

    step()
    if precision == "norms":
        with prepared.suspended():
            pass
    else:
        with pytest.raises(StateError, match=r"lm_head\.weight.*DistributedDataParallel"), prepared.suspended():
            pass
    assert prepared.state is LifecycleState.PREPARED
    for _ in range(2):
        step()
    assert all(p.grad is not None for p in parallel.parameters() if p.requires_grad)
    prepared.restore()
