"""Two processes on the CPU: DDP trains a prepared model, and what is sharded is refused."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from kbitwrap import KbitPreparedModel, StateError, UnsupportedModelError
from support import forks, zoo
from support.engines import load_for_fsdp2
from support.snapshot import Snapshot
from support.training import adapt


def trains_equally(rank: int, model: torch.nn.Module) -> None:
    for precision in ("full", "norms"):
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt("llama", model, modules_to_save=True)
        parallel = DistributedDataParallel(peft_model)
        trainable = [p for p in parallel.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        losses = []
        for seed in range(3):
            parallel.train()
            loss = parallel(**zoo.inputs("llama", model, seed=2 * seed + rank)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if precision == "full":
                with pytest.raises(StateError, match=r"lm_head\.weight.*DistributedDataParallel"), prepared.suspended():
                    pass
            else:
                with prepared.suspended():
                    pass
            assert not prepared.verify()
        flat = torch.cat([p.detach().float().flatten() for p in trainable])
        others = [torch.zeros_like(flat) for _ in range(forks.WORLD_SIZE)]
        distributed.all_gather(others, flat)
        assert torch.equal(others[0], others[1])
        prepared.restore()
        original_head = model.lm_head.original_module
        peft_model.unload()
        model.lm_head = original_head
        assert before.diff(Snapshot(model), moved=True) == []


def drifts_apart_after_a_restore(rank: int, model: torch.nn.Module) -> None:
    """What the page on sharding warns of: DDP synchronizes what was trainable when it was made."""
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    parallel = DistributedDataParallel(adapt("llama", model), find_unused_parameters=True)
    prepared.restore()
    optimizer = torch.optim.SGD([p for p in parallel.parameters() if p.requires_grad], lr=0.1)
    parallel(**zoo.inputs("llama", model, seed=rank)).loss.backward()
    optimizer.step()
    for parameter, is_same in ((model.lm_head.weight, False), (parameters_of_lora(model)[0], True)):
        flat = parameter.detach().float().flatten()
        others = [torch.zeros_like(flat) for _ in range(forks.WORLD_SIZE)]
        distributed.all_gather(others, flat)
        assert torch.equal(*others) == is_same


def parameters_of_lora(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for fqn, p in model.named_parameters() if "lora_B" in fqn]


def refuses_what_is_sharded(rank: int, model: torch.nn.Module) -> None:
    prepared = KbitPreparedModel(model, precision="full").prepare()
    for layer in model.model.layers:
        fully_shard(layer)
    during = Snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"sharded after it was prepared.*layers\.0") as caught:
        prepared.suspended().__enter__()
    assert caught.value.fqn.startswith("model.layers.0")
    assert during.diff(Snapshot(model)) == []
    with pytest.raises(UnsupportedModelError, match="before it is sharded"):
        KbitPreparedModel(model)
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(UnsupportedModelError, match="FSDP1"):
        KbitPreparedModel(FullyShardedDataParallel(linear, device_id=torch.device("cpu")))


def train_and_shard(rank: int, join: forks.Join) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    models = [zoo.load("llama"), load_for_fsdp2("llama"), zoo.load("llama")]
    with join():
        trains_equally(rank, models[0])
        refuses_what_is_sharded(rank, models[1])
        drifts_apart_after_a_restore(rank, models[2])


def test_in_two_processes() -> None:
    forks.run_ranks(train_and_shard)
