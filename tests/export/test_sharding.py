"""Exporting by two processes what FSDP2 sharded after it was prepared: the very files that were saved before."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from kbitwrap import ConfigError, ExportError, KbitPreparedModel, UnsupportedModelError
from support import forks, zoo
from support.engines import SHARDS_INTEGERS, load_for_fsdp2
from support.files import SHARD, read, saved
from support.snapshot import Snapshot
from support.training import adapt, step

TIED = {"gpt2"}


class Case(NamedTuple):
    architecture: str
    quant: str
    precision: str
    quant_storage: torch.dtype = torch.uint8


EXACT = [
    Case("llama", "nf4", "norms"),
    Case("llama", "nf4", "none", torch.bfloat16),
    Case("llama", "nf4-double", "full"),
    Case("llama", "nf4", "compute"),
    Case("llama", "int8", "full"),
    Case("gpt2", "nf4", "norms"),
    Case("gpt2", "nf4", "full"),
]
FEW = EXACT[1::3]
REFUSED = [Case("llama", "nf4", "full")] * 3 + [Case("llama", "int8", "norms")]


def load(case: Case) -> transformers.PreTrainedModel:
    if case.quant_storage == torch.uint8:
        model = load_for_fsdp2(case.architecture, case.quant)
    else:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=case.quant,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=case.quant_storage,
        )
        model = zoo.load(case.architecture, case.quant, quantization_config=config)
    # A NaN's payload, which does not survive float32, in a row that no batch looks up.
    table = model.get_input_embeddings().weight
    if case.architecture not in TIED:
        table.data[5, 3:5].view(torch.int16).copy_(torch.tensor([0x7FA5, -3]))
    return model


def blocks(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def shard(live: nn.Module, **kwargs: Any) -> None:
    """Each block, then the rest, as users do it; 8-bit weights stay whole, because their scales would be lost."""
    ignored = {p for p in live.parameters() if type(p).__name__ == "Int8Params"}
    for block in blocks(live):
        fully_shard(block, ignored_params=ignored, **kwargs)
    fully_shard(live, ignored_params=ignored, **kwargs)


def load_and_save(case: Case, folder: Path) -> tuple[transformers.PreTrainedModel, dict[str, bytes]]:
    model = load(case)
    return model, saved(model, folder)


# ----------------------------------------------------------------------------------------------------
# The very files that were saved before.
# ----------------------------------------------------------------------------------------------------


def exports_exactly(rank: int, join: forks.Join, cases: list[Case], folder: Path) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    models = [load_and_save(case, folder / f"saved-{rank}-{index}") for index, case in enumerate(cases)]
    with join():
        export_all(cases, models, folder)


def export_all(
    cases: list[Case], models: list[tuple[transformers.PreTrainedModel, dict[str, bytes]]], folder: Path
) -> None:
    for index, (case, (model, expected)) in enumerate(zip(cases, models, strict=True)):
        name = case.architecture
        prepared = KbitPreparedModel(model, precision=case.precision).prepare()
        peft_model = adapt(name, model)
        prepared.adopt(peft_model)
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16) if case.precision == "full" else MixedPrecisionPolicy()
        )
        shard(peft_model, mp_policy=policy)

        def export(when: str, expected: dict[str, bytes] = expected, index: int = index) -> None:
            path = folder / f"{when}-{index}"
            report = prepared.export(path, max_shard_size=SHARD)  # noqa: B023
            assert read(path) == expected
            assert report.files == tuple(sorted(expected))
            assert bool(report.converted) == (case.precision in ("full", "compute"))  # noqa: B023

        export("sharded")
        if case.precision == "compute":
            continue  # FSDP2 does not train what stands in front of its parameters
        step(name, peft_model)
        before = Snapshot(peft_model)
        export("trained")
        assert before.diff(Snapshot(peft_model)) == []
        table = model.get_input_embeddings()
        assert isinstance(table.weight, DTensor)
        with torch.no_grad():
            peft_model(**zoo.inputs(name, model))
        if not isinstance(table.weight, DTensor):
            export("whole")
            assert isinstance(table.weight, DTensor)
        step(name, peft_model, seed=1)
        flat = torch.cat([p.to_local().flatten() for p in peft_model.parameters() if p.requires_grad])
        assert flat.isfinite().all()
    assert {path.name for path in folder.glob("whole-*")}  # the root stays whole after a forward without backward


@pytest.mark.thorough
@pytest.mark.parametrize("cases", [FEW, EXACT], ids=["few", "exact"])
def test_the_files_are_those_saved_before(cases: list[Case], tmp_path: Path) -> None:
    forks.run_ranks(exports_exactly, cases, tmp_path)


# ----------------------------------------------------------------------------------------------------
# What fails, on all ranks.
# ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def fails_on_all(rank: int, join: forks.Join, folder: Path) -> None:
    model, expected = load_and_save(REFUSED[0], folder / f"saved-{rank}")
    others = [load(case) for case in REFUSED[1:]]
    with join():
        fail(rank, model, expected, *others, folder=folder)


def fail(
    rank: int,
    model: transformers.PreTrainedModel,
    expected: dict[str, bytes],
    merged: transformers.PreTrainedModel,
    sharing: transformers.PreTrainedModel,
    eight_bits: transformers.PreTrainedModel,
    *,
    folder: Path,
) -> None:
    prepared = KbitPreparedModel(model, precision="full").prepare()
    peft_model = adapt("llama", model)
    shard(peft_model)
    step("llama", peft_model)
    before = Snapshot(peft_model)
    path = folder / "export"

    with pytest.raises(UnsupportedModelError, match=r"sharded after it was prepared.*export\(\) on every rank"):
        prepared.suspended().__enter__()
    # What the first rank alone reads, and refuses.
    with pytest.raises(ConfigError, match="expected names out of"):
        list(prepared.merged_weights("other"))
    with pytest.raises(ConfigError, match="max_shard_size"):
        prepared.export(path, max_shard_size=-1)
    # A mistake of the last rank alone.
    error, message = (
        (ExportError, r"rank 1 cannot export: model: expected") if rank == 0 else (UnsupportedModelError, "")
    )
    with pytest.raises(error, match=message):
        prepared.export(path, model=None if rank == 0 else nn.Linear(2, 2))
    # Failures of the first rank alone: before it writes, and after it has written some.
    (folder / "taken").mkdir(exist_ok=True)
    (folder / "taken" / "file").touch()
    with pytest.raises(ExportError, match="exists and is not empty"):
        prepared.export(folder / "taken")
    sizes = [len(data) for name, data in sorted(expected.items()) if name.endswith(".safetensors")]
    assert sizes[0] < max(sizes)
    with (
        files_up_to(max(sizes) - 1),
        pytest.raises(ExportError, match="rank 0 could not export" if rank else "written"),
    ):
        prepared.export(path, max_shard_size=SHARD)
    assert not path.exists()
    assert before.diff(Snapshot(peft_model)) == []
    prepared.export(path, max_shard_size=SHARD)
    assert read(path) == expected

    prepared = KbitPreparedModel(merged, precision="norms").prepare()
    shard(adapt("llama", merged).merge_and_unload())
    with pytest.raises(ExportError, match=r"q_proj.weight was replaced") as caught:
        prepared.export(folder / "merged")
    assert caught.value.fqn == "model.layers.0.self_attn.q_proj.weight"

    sharing.lm_head.weight = nn.Parameter(sharing.model.embed_tokens.weight.data)
    prepared = KbitPreparedModel(sharing, precision="none").prepare()
    shard(adapt("llama", sharing))
    with pytest.raises(ExportError, match=r"embed_tokens.weight: it was added .*, or shared its memory with another"):
        prepared.export(folder / "sharing")

    plain = nn.Sequential(nn.LayerNorm(8)).bfloat16()
    prepared = KbitPreparedModel(plain, precision="none").prepare()
    plain[0] = FullyShardedDataParallel(plain[0], device_id=torch.device("cpu"), use_orig_params=False)
    with pytest.raises(UnsupportedModelError, match=r"sharded by FSDP .*use_orig_params=False.*before sharding"):
        prepared.export(folder / "plain")
    for call in (prepared.restore, prepared.suspend):
        with pytest.raises(UnsupportedModelError, match=r"use_orig_params=False.*wrap it with use_orig_params=True"):
            call()
    with pytest.raises(UnsupportedModelError, match=r"use_orig_params=False"):
        prepared.manifest()

    other = nn.Sequential(OrderedDict({f"of_rank_{rank}": nn.LayerNorm(8)})).bfloat16()
    prepared = KbitPreparedModel(other, precision="none").prepare()
    fully_shard(other)
    with pytest.raises(ExportError, match=f"rank {1 - rank} holds different sharded parameters than rank {rank}"):
        prepared.export(folder / "other")

    if SHARDS_INTEGERS:
        prepared = KbitPreparedModel(eight_bits, precision="norms").prepare()
        fully_shard(eight_bits)
        with pytest.raises(ExportError, match=r"removed the scales of this Int8Params.*ignored_params"):
            prepared.export(folder / "eight-bits")
    assert {path.name for path in folder.iterdir() if "saved" not in path.name} == {"export", "taken"}


@pytest.mark.thorough
def test_a_failure_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    forks.run_ranks(fails_on_all, tmp_path)
