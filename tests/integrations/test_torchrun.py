"""Trainer in two processes that torchrun's launcher starts on the CPU."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from kbitwrap import KbitPreparedModel, Manifest
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation
from support import forks, zoo
from support.snapshot import Snapshot
from support.trainers import NUM_STEPS, RecordingTrainer, adapt, dataset, trainer_for

BLOCKS = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
FSDP: dict[str, dict[str, Any]] = {
    "none": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, **BLOCKS}},
    # By default, accelerate asks for a device to send rank 0's values from, and raises where there is none.
    "fsdp1": {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False, **BLOCKS}},
}


class SuspendingTrainer(SuspendedEvaluation, RecordingTrainer):
    """Evaluates in the original state."""


def load() -> torch.nn.Module:
    """A model from a checkpoint that transformers lets only the first of several processes write."""
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    with mock.patch.dict(os.environ, others, clear=True):
        return zoo.load("llama")


def train(precision: str, options: dict[str, Any], folder: Path) -> None:
    """All ranks train the same adapters, one writes, and the base is as it was on each."""
    model = load()
    before = Snapshot(model)
    with KbitPreparedModel(model, precision=precision) as prepared:
        peft_model = adapt(model)
        trainer = trainer_for(
            peft_model, folder, callbacks=[KbitTrainerCallback(prepared)], cls=SuspendingTrainer,
            eval_dataset=dataset(model), eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
            ddp_backend="gloo", ddp_find_unused_parameters=False, **options,
        )  # fmt: skip
        trainer.train()
        assert trainer.args.world_size == forks.WORLD_SIZE
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert not trainer.is_fsdp_enabled
        assert len([row for row in trainer.state.log_history if "eval_loss" in row]) == NUM_STEPS
        assert not prepared.verify()
        Manifest.load(folder / f"checkpoint-{NUM_STEPS}" / "kbitwrap.json").check(peft_model)
    trained = torch.cat([p.detach().flatten() for fqn, p in peft_model.named_parameters() if "lora_" in fqn])
    others = [torch.zeros_like(trained) for _ in range(forks.WORLD_SIZE)]
    distributed.all_gather(others, trained)
    assert torch.equal(*others)
    peft_model.unload()
    # Moved: accelerate and DistributedDataParallel give the parameters new memory, prepared or not.
    assert before.diff(Snapshot(model), moved=True) == []


def train_each(cases: list[tuple[str, str]], folder: Path) -> int:
    """Train in one process; what is returned is its rank."""
    warnings.simplefilter("ignore")
    for precision, fsdp in cases:
        train(precision, FSDP[fsdp], folder / f"{precision}-{fsdp}")
    return distributed.get_rank()


OF_DDP = [("full", "none"), ("norms", "none")]
OF_FSDP = [("norms", "fsdp2"), ("norms", "fsdp1")]  # of which accelerate makes DDP on a CPU


@pytest.mark.thorough
@pytest.mark.parametrize("cases", [OF_DDP, OF_FSDP], ids=["ddp", "fsdp"])
def test_trainer_under_torchrun_trains_and_gives_the_base_back(cases: list[tuple[str, str]], tmp_path: Path) -> None:
    forks.context()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=forks.WORLD_SIZE, run_id="kbitwrap", rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", start_method="forkserver", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    assert elastic_launch(config, train_each)(cases, tmp_path) == {0: 0, 1: 1}
