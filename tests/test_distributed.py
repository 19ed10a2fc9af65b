"""Two processes on the CPU: DDP trains a prepared model, and what is sharded is refused."""

from __future__ import annotations

import os
import socket
import warnings

import pytest
import torch
import torch.multiprocessing
from torch import distributed
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import zoo
from kbitwrap import KbitPreparedModel, StateError, UnsupportedModelError
from snapshot import Snapshot
from training import adapt

WORLD_SIZE = 2


def spawn(function: object) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(enter, (function, port), nprocs=WORLD_SIZE)


def enter(rank: int, function: object, port: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    model = zoo.load("llama")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    try:
        function(rank, model)  # type: ignore[operator]
    finally:
        distributed.destroy_process_group()


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
        others = [torch.zeros_like(flat) for _ in range(WORLD_SIZE)]
        distributed.all_gather(others, flat)
        assert torch.equal(others[0], others[1])
        prepared.restore()
        original_head = model.lm_head.original_module
        peft_model.unload()
        model.lm_head = original_head
        assert before.diff(Snapshot(model), moved=True) == []


def refuses_what_is_sharded(rank: int, model: torch.nn.Module) -> None:
    prepared = KbitPreparedModel(model, precision="full").prepare()
    for layer in model.model.layers:
        fully_shard(layer)
    during = Snapshot(model)
    for call in (prepared.restore, lambda: prepared.suspended().__enter__()):
        with pytest.raises(UnsupportedModelError, match=r"sharded after it was prepared.*layers\.0") as caught:
            call()
        assert caught.value.fqn.startswith("model.layers.0")
    assert during.diff(Snapshot(model)) == []
    with pytest.raises(UnsupportedModelError, match="before it is sharded"):
        KbitPreparedModel(model)
    linear = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(UnsupportedModelError, match="FSDP1"):
        KbitPreparedModel(FullyShardedDataParallel(linear, device_id=torch.device("cpu")))


@pytest.mark.parametrize("function", [trains_equally, refuses_what_is_sharded])
def test_in_two_processes(function: object) -> None:
    spawn(function)
