"""Merging by several processes what FSDP sharded: the very bytes of the merge of the unsharded model."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import peft
import pytest
import torch
import transformers
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import kbitwrap.export.merged as merged_module
from kbitwrap import KbitPreparedModel
from kbitwrap.export.sharding import Gathering
from support import forks, zoo
from support.engines import ENGINES, copy_adapters, fsdp1_of_peft, fsdp2, load_for_fsdp2
from support.files import SHARD, read, tensors_of
from support.layers import LORA, adapted_layers
from support.losing import TIMEOUT, export_until_killed, lose
from support.memory import allocations, peak
from support.merging import jitter
from support.snapshot import Snapshot
from support.thorough import few
from support.training import step

FORMS = ("half", "mixed", "quantized")
SHARDS = {
    **ENGINES,
    "fsdp1-of-peft": fsdp1_of_peft,
    "fsdp2-offloaded": functools.partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


class Case(NamedTuple):
    architecture: str
    engine: str = "fsdp2"
    quant: str | None = "nf4"
    precision: str = "norms"
    dtype: torch.dtype = torch.bfloat16
    adapters: str = "lora"

    @property
    def is_fsdp2(self) -> bool:
        return self.engine.startswith("fsdp2")


FEW = [
    Case("gpt2", precision="full", adapters="head"),
    Case("mixtral", adapters="experts"),
]
ARCHITECTURES = ("llama", "qwen3", "gemma2", "gpt2", "opt", "mixtral", "mistral", "phi3", "falcon", "bloom", "gpt_neox")
MANY = [
    *(Case(name) for name in ARCHITECTURES),
    *(Case(name, adapters="dora", precision="full") for name in ("llama", "gpt2")),
    *(Case(name, dtype=torch.float16) for name in ("llama", "qwen3", "gpt2")),
    *(Case(name, quant="int8") for name in ("llama", "gpt2", "opt")),
    Case("llama", quant="nf4-double"),
    Case("llama", quant=None),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "biases": {"lora_bias": True},
    "dora": {"use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "experts": {"target_parameters": ["experts.down_proj"]},
    "rslora": {"use_rslora": True},
    "tokens": {"trainable_token_indices": [3, 9]},
}
OF_KINDS = [
    Case(name, engine, adapters=adapters)
    for name, adapters in (
        ("gemma2", "rslora"),
        ("gemma2", "head"),  # which is tied
        ("gemma2", "embeddings"),
        ("gemma2", "tokens"),
        ("opt", "biases"),
        ("opt", "dora"),
        ("gpt2", "two"),
        ("phi3", "two"),
        ("llama", "tokens"),
    )
    for engine in ENGINES
]
OF_KINDS.append(Case("llama", "fsdp2-offloaded"))
TARGETS = {"target_modules": ["q_proj", "down_proj"]}
METHODS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"total_step": 10},
    "HiraConfig": {},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "LNTuningConfig": {"target_modules": ["input_layernorm"]},
    "LoHaConfig": {"target_modules": ["lm_head"]},
    "LoKrConfig": {"target_modules": ["lm_head"]},
    "OFTConfig": {"oft_block_size": 8},
    "RoadConfig": {"target_modules": ["lm_head"], "group_size": 16},
    "TrainableTokensConfig": {"target_modules": ["embed_tokens"], "token_indices": [3, 9]},
    "VeraConfig": {"r": 8},
}
NOT_LORA = {"head", "tokens", "experts", *METHODS}
OF_METHODS = [Case("llama", precision="full", adapters=name) for name in METHODS]
OF_FSDP1 = [
    *(Case(name, "fsdp1") for name in ARCHITECTURES),
    *(Case(name, "fsdp1", dtype=torch.float16) for name in ("llama", "qwen3", "gpt2")),
    Case("gpt2", "fsdp1", adapters="head"),
    Case("llama", "fsdp1", adapters="dora"),
    Case("llama", "fsdp1", quant=None),
    Case("llama", "fsdp1-of-peft"),
]


def load(case: Case) -> transformers.PreTrainedModel:
    """A model that the engine can shard: FSDP1 lays out flat what has one dtype, which is no integer."""
    if case.is_fsdp2 or case.quant is None:
        return load_for_fsdp2(case.architecture, case.quant, case.dtype)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=case.dtype,
        bnb_4bit_quant_storage=case.dtype,
        llm_int8_skip_modules=list(zoo.ARCHITECTURES[case.architecture].unquantized) or None,
    )
    return zoo.load(case.architecture, dtype=case.dtype, quantization_config=config)


def adapt(case: Case, model: transformers.PreTrainedModel) -> peft.PeftModel:
    """Adapters of a kind, the same at each call; FSDP1 needs them in the model's dtype."""
    if case.adapters in METHODS:
        torch.manual_seed(0)
        config = getattr(peft, case.adapters)(**TARGETS | METHODS[case.adapters])
        peft_model = peft.get_peft_model(model, config, autocast_adapter_dtype=case.is_fsdp2)
        jitter(peft_model)
        return peft_model
    # small enough for the codes of a quantized merge
    options = {"lora_alpha": 0.25} | OPTIONS.get(case.adapters, {})
    torch.manual_seed(0)
    config = zoo.lora_config(case.architecture, modules_to_save=case.adapters == "head", **options)
    peft_model = peft.get_peft_model(model, config, autocast_adapter_dtype=case.is_fsdp2)
    if case.adapters == "two":
        peft_model.add_adapter("other", config, autocast_adapter_dtype=case.is_fsdp2)
        peft_model.base_model.set_adapter(["default", "other"])
    return peft_model


def forms(case: Case) -> tuple[str, ...]:
    """The forms that a case is merged in: of weights that are not quantized there is one."""
    return FORMS[:1] if case.quant is None else FORMS[:2] if case.adapters in METHODS else FORMS


def merges(prepared: KbitPreparedModel, folder: Path, case: Case) -> dict[str, dict[str, bytes]]:
    """The files of the merged model in each form."""
    found = {}
    for form in forms(case):
        prepared.export(folder / form, merge_adapters=True, merge_as=form, max_shard_size=SHARD)
        found[form] = read(folder / form)
    return found


class Whole(NamedTuple):
    """A prepared model with adapters that nobody shards."""

    prepared: KbitPreparedModel
    peft_model: peft.PeftModel


def prepare(case: Case) -> Whole:
    prepared = KbitPreparedModel(load(case), precision=case.precision, gradient_checkpointing=False).prepare()
    peft_model = adapt(case, prepared.model)
    prepared.adopt(peft_model)
    return Whole(prepared, peft_model)


def merge_exactly(rank: int, join: forks.Join, cases: list[Case], folder: Path) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    models = [(prepare(case), prepare(case)) for case in cases]
    with join():
        for index, (case, (one, whole)) in enumerate(zip(cases, models, strict=True)):
            place = folder / f"{rank}-{index}"
            expected = merges(whole.prepared, place / "whole", case)
            live = SHARDS[case.engine](one.peft_model)
            assert merges(one.prepared, folder / f"{index}", case) == expected, case

            before = Snapshot(live)  # FSDP1 has set itself up in the first use
            handed_out = dict(one.prepared.merged_weights())
            assert before.diff(Snapshot(live)) == []
            half = tensors_of(place / "whole" / "half")
            assert handed_out.keys() == (half.keys() if rank == 0 else set())
            assert all(torch.equal(handed_out[fqn], half[fqn]) for fqn in handed_out)

            step(case.architecture, live)
            if case.adapters not in NOT_LORA:
                copy_adapters(live, whole.peft_model)
                expected = merges(whole.prepared, place / "trained", case)
                assert merges(one.prepared, folder / f"{index}-trained", case) == expected, case
            step(case.architecture, live, seed=1)


@pytest.mark.parametrize(
    ("cases", "world_size"),
    few(
        [(FEW, 2), (MANY, 2), (MANY, 4), (OF_METHODS, 2), (OF_KINDS, 2), (OF_FSDP1, 2), (OF_FSDP1, 4)],
        [(FEW, 2)],
    ),
    ids=["few", "fsdp2", "fsdp2-by-4", "methods", "kinds", "fsdp1", "fsdp1-by-4"],
)
def test_the_files_are_those_of_the_unsharded_merge(cases: list[Case], world_size: int, tmp_path: Path) -> None:
    forks.run_ranks(merge_exactly, cases, tmp_path, world_size=world_size)


# ----------------------------------------------------------------------------------------------------
# A rank that is killed in the middle, and one that asks for no more.
# ----------------------------------------------------------------------------------------------------


def lose_one(rank: int, join: forks.Join, killed: int, engine: str, folder: Path) -> None:
    one = prepare(Case("llama", engine))
    with join(timeout=TIMEOUT):
        live = ENGINES[engine](one.peft_model)  # FSDP1's wrapper gathers
        assert live is not None
        export_until_killed(rank, killed, one.prepared, folder)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("killed", "engine", "world_size"),
    [(1, "fsdp2", 2), (0, "fsdp2", 2), (2, "fsdp2", 4), (0, "fsdp2", 4), (3, "fsdp1", 4), (0, "fsdp1", 4)],
)
def test_a_rank_that_is_killed_ends_the_others(killed: int, engine: str, world_size: int, tmp_path: Path) -> None:
    lose(lose_one, killed, engine, folder=tmp_path, world_size=world_size)


def take_few(rank: int, join: forks.Join) -> None:
    one = prepare(Case("llama"))
    with join():
        live = ENGINES["fsdp2"](one.peft_model)
        for _ in zip(range(3), one.prepared.merged_weights(), strict=False):
            assert rank == 0
        step("llama", live)


@pytest.mark.thorough
def test_rank_0_may_take_a_few_weights_only() -> None:
    forks.run_ranks(take_few)


# ----------------------------------------------------------------------------------------------------
# Memory.
# ----------------------------------------------------------------------------------------------------


def gather_alone(gathering: Gathering, index: int, gather: Callable[..., Any] = Gathering._gather) -> Any:
    """Gather once gloo's thread has let go of what was sent before: it does so after it says that it was sent."""
    time.sleep(0.02)
    return gather(gathering, index)


def hold_little(rank: int, join: forks.Join, folder: Path) -> None:
    width, tensor = 512, 2 * 512 * 512
    # In as many blocks as a layer of 4096 times 4096 elements.
    merged_module._BLOCK_BYTES = 4 * width * width // 32
    layers = adapted_layers("nf4", width, **LORA)
    wrapper = KbitPreparedModel(layers, gradient_checkpointing=False).prepare()
    with join():
        fully_shard(layers)
        wrapper.export(folder / "warm", merge_adapters=True)
        with mock.patch.object(Gathering, "_gather", gather_alone):
            sizes = allocations(lambda: wrapper.export(folder / "merged", merge_adapters=True))
    mapped = (folder / "merged" / "model.safetensors").stat().st_size  # to read its header
    counted = [size for size in sizes if abs(size) != mapped]
    # Rank 0 as without shards; the others gather what is packed, and merge nothing.
    assert 0 < peak(counted) <= (2 * tensor if rank == 0 else tensor)


def test_what_is_held_beside_the_shards_is_what_one_tensor_takes(tmp_path: Path) -> None:
    forks.run_ranks(hold_little, tmp_path)
