"""Two processes on the CPU under DeepSpeed: what ``check_sharding`` says of ZeRO-2 and ZeRO-3 comes true.

Named, these are run: ``pytest tests/zero``, with the extra ``test-deepspeed``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import distributed, nn

from kbitwrap import KbitPreparedModel, Precision, UnsupportedModelError, check_sharding
from support import forks, zoo
from support.files import SHARD, read, saved
from support.losing import TIMEOUT, export_until_killed, lose
from support.snapshot import Snapshot
from support.starting import import_deepspeed
from support.training import adapt, is_checkpointing

STAGES = (2, 3)
STORES_NOTHING = ("norms", "adapted", "none")
FORMS = ("half", "mixed", "quantized")
Files = dict[str, bytes]


class Whole(NamedTuple):
    """What a model that nobody sharded is written as: its base, and merged in each form."""

    saved: Files
    merged: dict[str, Files]


def merges(prepared: KbitPreparedModel, folder: Path) -> dict[str, Files]:
    for form in FORMS:
        prepared.export(folder / form, merge_adapters=True, merge_as=form, max_shard_size=SHARD)
    return {form: read(folder / form) for form in FORMS}


def read_whole(model: nn.Module, folder: Path, name: str = "llama") -> Whole:
    files = saved(model, folder / "saved")
    prepared = KbitPreparedModel(model, precision="none", gradient_checkpointing=False).prepare()
    adapt(name, model, lora_alpha=0.25)
    return Whole(files, merges(prepared, folder))


def initialize(model: nn.Module, stage: int, bf16: bool) -> Any:
    """DeepSpeed's engine around a model."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    deepspeed = import_deepspeed(distributed.get_rank())
    return deepspeed.initialize(model=model, model_parameters=trainable, config=config)[0]


def train(rank: int, engine: Any, model: nn.Module, seed: int) -> None:
    """One step, each rank on rows of its own."""
    engine.train()
    loss = engine(**zoo.inputs("llama", model, seed=2 * seed + rank)).loss
    assert loss.isfinite()
    engine.backward(loss)
    engine.step()


def computes_in_float32(norm: Any) -> bool:
    """Whether a norm of Llama takes its weight in float32: of what is multiplied in half other bits come out."""
    weight = norm.weight.detach()
    given = torch.linspace(-3, 3, 10 * len(weight)).view(10, -1).to(torch.bfloat16)
    wide = given.float()
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    with torch.no_grad():
        found = norm(given)
    assert not torch.equal((weight.float() * normal).bfloat16(), weight * normal.bfloat16())
    return torch.equal(found, (weight.float() * normal).bfloat16())


def lives_on(rank: int, precision: str, bf16: bool, model: nn.Module, folder: Path, expected: dict[str, bytes]) -> None:
    """Under ZeRO-2 parameters stay whole: all goes on as under DDP."""
    batch = zoo.inputs("llama", model)
    if getattr(model, "is_loaded_in_8bit", False):
        with torch.no_grad():
            model(**batch)  # the first forward, prepared or not, moves the scales and codes to the layers' state
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    manifest = prepared.manifest()
    peft_model = adapt("llama", model)
    engine = initialize(peft_model, 2, bf16)
    if precision in ("norms", "none"):
        assert computes_in_float32(model.model.norm) == (precision == "norms")
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


def without_values(rank: int, precision: str, bf16: bool, model: nn.Module, folder: Path, whole: Whole) -> None:
    """Under ZeRO-3 a parameter holds no values: what needs them gathers them, one at a time."""
    folder = folder / f"{precision}-{bf16}-{type(model.model.layers[0].self_attn.q_proj).__name__}"
    before = {id(p): p.requires_grad for p in model.parameters()}
    names = {fqn for fqn, _ in model.named_parameters()}
    prepared = KbitPreparedModel(model, precision=precision).prepare(engine="zero3")
    manifest = prepared.manifest()
    peft_model = adapt("llama", model, lora_alpha=0.25)
    prepared.adopt(peft_model)
    engine = initialize(peft_model, 3, bf16)
    if not bf16:  # else DeepSpeed rounded the adapters
        assert merges(prepared, folder) == whole.merged
        handed_out = dict(prepared.merged_weights())
        assert bool(handed_out) == (rank == 0)
    train(rank, engine, model, 0)
    assert prepared.manifest().essence() == manifest.essence()
    prepared.export(folder / "base", max_shard_size=SHARD)
    assert read(folder / "base") == whole.saved
    if precision in STORES_NOTHING:
        with prepared.suspended(), torch.no_grad():
            assert all(p.requires_grad == before.get(id(p), True) for p in model.parameters())
            engine.eval()
            assert engine(**zoo.inputs("llama", model)).logits.isfinite().all()
        assert not prepared.verify()
    else:
        with pytest.raises(UnsupportedModelError, match="sharded after it was prepared"):
            prepared.suspend()
    train(rank, engine, model, 1)
    report = prepared.restore()
    assert (report.trained, report.replaced) == ((), ())
    assert {*report.not_compared} == names
    cast = {record.fqn for record in manifest.tensors.values() if record.prepared_dtype != record.original_dtype}
    assert {*report.kept_dtype} == (set() if bf16 else cast)  # DeepSpeed casts all of a model
    assert all(p.requires_grad == before.get(id(p), True) for p in model.parameters())
    assert not is_checkpointing(model)


def come_true(rank: int, join: forks.Join, stage: int, folder: Path) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    names = [(precision.value, bf16, "nf4") for precision in Precision for bf16 in (False, True)]
    names += [("norms", False, "int8"), ("full", False, "int8")]
    cases = [(*name, zoo.load("llama", name[2])) for name in names]
    whole = {quant: read_whole(zoo.load("llama", quant), folder / f"{quant}-{rank}") for quant in ("nf4", "int8")}
    with join():
        for precision, bf16, quant, model in cases:
            outcome = check_sharding(model, f"zero{stage}", "bfloat16" if bf16 else None).outcomes[precision]
            assert outcome.trains
            assert outcome.exports
            assert outcome.restores == (stage == 2 or precision in STORES_NOTHING)
            if stage == 2:
                lives_on(rank, precision, bf16, model, folder, whole[quant].saved)
            else:
                without_values(rank, precision, bf16, model, folder, whole[quant])


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_said_of_deepspeed_comes_true(stage: int, tmp_path: Path) -> None:
    forks.run_ranks(come_true, stage, tmp_path)


ARCHITECTURES = ("qwen3", "gemma2", "gpt2", "opt", "mixtral", "mistral", "phi3", "falcon", "bloom", "gpt_neox")


def merge_each(rank: int, join: forks.Join, folder: Path) -> None:
    models = {
        name: (zoo.load(name), read_whole(zoo.load(name), folder / f"{name}-{rank}", name)) for name in ARCHITECTURES
    }
    with join():
        for name, (model, whole) in models.items():
            prepared = KbitPreparedModel(model, precision="norms").prepare()
            engine = initialize(adapt(name, model, lora_alpha=0.25), 3, bf16=False)
            assert merges(prepared, folder / name) == whole.merged, name
            prepared.export(folder / name / "base", max_shard_size=SHARD)
            assert read(folder / name / "base") == whole.saved, name
            engine.destroy()


@pytest.mark.parametrize("world_size", [2, 4])
def test_under_zero3_the_files_are_those_of_the_model_without_it(world_size: int, tmp_path: Path) -> None:
    forks.run_ranks(merge_each, tmp_path, world_size=world_size)


def lose_one(rank: int, join: forks.Join, killed: int, folder: Path) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    peft_model = adapt("llama", model)
    with join(timeout=TIMEOUT):
        engine = initialize(peft_model, 3, bf16=False)
        train(rank, engine, model, 0)
        export_until_killed(rank, killed, prepared, folder)


@pytest.mark.parametrize(("killed", "world_size"), [(1, 2), (0, 2), (2, 4), (0, 4)])
def test_a_rank_that_is_killed_ends_the_others(killed: int, world_size: int, tmp_path: Path) -> None:
    lose(lose_one, killed, folder=tmp_path, world_size=world_size)
