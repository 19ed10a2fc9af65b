"""Two processes on the CPU under DeepSpeed: what ``check_sharding`` says of ZeRO-2 and ZeRO-3 comes true.

Named, these are run: ``pytest tests/zero``, with the extra ``test-deepspeed``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, ManifestError, Precision, UnsupportedModelError, check_sharding
from support import forks, zoo
from support.files import SHARD, read, saved
from support.snapshot import Snapshot
from support.training import adapt

STAGES = (2, 3)


def initialize(model: nn.Module, stage: int, bf16: bool) -> Any:
    """DeepSpeed's engine around a model."""
    import deepspeed

    # DeepSpeed would compile an operation for one machine's CPU; gloo reduces instead.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trainable, config=config)[0]


def train(rank: int, engine: Any, model: nn.Module, seed: int) -> None:
    """One step, each rank on rows of its own."""
    engine.train()
    loss = engine(**zoo.inputs("llama", model, seed=2 * seed + rank)).loss
    assert loss.isfinite()
    engine.backward(loss)
    engine.step()


def lives_on(rank: int, precision: str, bf16: bool, model: nn.Module, folder: Path, expected: dict[str, bytes]) -> None:
    """Under ZeRO-2 parameters stay whole: all goes on as under DDP."""
    before = Snapshot(model)
    batch = zoo.inputs("llama", model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    manifest = prepared.manifest()
    peft_model = adapt("llama", model)
    engine = initialize(peft_model, 2, bf16)
    for seed in range(2):
        train(rank, engine, model, seed)
        with prepared.suspended(), torch.no_grad():
            engine.eval()
            suspended = engine(**batch).logits
    during = {fqn: p.dtype for fqn, p in model.named_parameters()}
    assert prepared.manifest().essence() == manifest.essence()
    prepared.export(folder / f"{rank}", max_shard_size=SHARD, overwrite=True)
    assert read(folder / f"{rank}") == expected
    # DeepSpeed casts the model to what it computes in: only what stored float32 is another then.
    assert bool(prepared.verify()) == (bf16 and precision in ("full", "compute"))
    assert during == {fqn: p.dtype for fqn, p in model.named_parameters()}
    report = prepared.restore()
    assert (report.trained, report.replaced) == ((), ())
    with torch.no_grad():
        assert torch.equal(engine(**batch).logits, suspended)
    peft_model.unload()
    assert before.diff(Snapshot(model), moved=True) == []


def is_refused_by_name(rank: int, precision: str, bf16: bool, model: nn.Module, folder: Path) -> None:
    """Under ZeRO-3 it trains, and what needs the values is refused before anything changes."""
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    engine = initialize(adapt("llama", model), 3, bf16)
    train(rank, engine, model, 0)
    flags = [p.requires_grad for p in model.parameters()]
    partition = r"embed_tokens.weight is a ZeRO-3 partition"
    for call in (prepared.restore, prepared.suspend, prepared.manifest, lambda: prepared.export(folder / "zero3")):
        with pytest.raises((UnsupportedModelError, ManifestError), match=partition) as caught:
            call()
        assert caught.value.fqn == "model.embed_tokens.weight"
    with pytest.raises(UnsupportedModelError, match=partition + r".*restore before sharding"), prepared:
        pass
    assert flags == [p.requires_grad for p in model.parameters()]
    assert not (folder / "zero3").exists()
    train(rank, engine, model, 1)


def come_true(rank: int, join: forks.Join, stage: int, folder: Path) -> None:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    cases = [(precision.value, bf16, zoo.load("llama")) for precision in Precision for bf16 in (False, True)]
    expected = saved(cases[0][2], folder / f"saved-{rank}")
    with join():
        for precision, bf16, model in cases:
            outcome = check_sharding(model, f"zero{stage}", "bfloat16" if bf16 else None).outcomes[precision]
            assert outcome.trains
            assert outcome.restores == outcome.exports == (stage == 2)
            if stage == 2:
                lives_on(rank, precision, bf16, model, folder, expected)
            else:
                is_refused_by_name(rank, precision, bf16, model, folder)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_said_of_deepspeed_comes_true(stage: int, tmp_path: Path) -> None:
    forks.run_ranks(come_true, stage, tmp_path)
