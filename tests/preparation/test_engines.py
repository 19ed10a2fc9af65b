"""Two processes on the CPU: what a preparation can still do once FSDP has sharded its model."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from kbitwrap import (
    ConfigError,
    ExportError,
    KbitPreparedModel,
    Manifest,
    ManifestError,
    StateDiff,
    UnsupportedModelError,
    build_plan,
    check_sharding,
)
from kbitwrap.integrations import KbitTrainerCallback, SuspendedEvaluation
from support import forks, settings, zoo
from support.engines import ENGINES, FSDP2_STORAGE, copy_adapters, flags, fsdp1, whole
from support.files import SHARD, read, saved
from support.snapshot import Snapshot
from support.trainers import dataset
from support.training import step

STORES_NOTHING = ("norms", "adapted", "none")


def load(engine: str) -> transformers.PreTrainedModel:
    """A model that the engine can shard: FSDP1 lays out flat what has one dtype, which is no integer."""
    storage = torch.bfloat16 if engine == "fsdp1" else FSDP2_STORAGE
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    return zoo.load("llama", quantization_config=config)


def adapt(model: transformers.PreTrainedModel) -> peft.PeftModel:
    """A LoRA in the model's dtype, the same at each call."""
    torch.manual_seed(0)
    return peft.get_peft_model(model, zoo.lora_config("llama"), autocast_adapter_dtype=False)


def not_repacking(engine: str) -> transformers.PreTrainedModel:
    """A model that computes in eval mode as in training, as all do while they are sharded."""
    with pytest.MonkeyPatch.context() as patch:
        settings.repack(patch, False)
        return load(engine)


def repacking(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """A model whose 4-bit layers ask to be repacked in eval mode, as on CPUs with AVX512-BF16."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True
    return model


def agree(rank: int) -> None:
    """All ranks meet here; had one of them communicated on its own, they would not."""
    ones = torch.ones(rank + 3 - rank)
    torch.distributed.all_reduce(ones)
    assert ones.tolist() == [forks.WORLD_SIZE] * 3


def without_time(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_copy(update={"created": "2000-01-01T00:00:00+00:00"}).model_dump()


def lives_on(
    rank: int, engine: str, precision: str, model: nn.Module, plain: nn.Module, folder: Path, expected: dict[str, bytes]
) -> None:
    """Manifest, training, evaluation and generation while suspended, the end of the with-block."""
    plain = adapt(plain).eval()
    before, attributes = flags(model), {id(m): vars(m).keys() for m in model.modules()}
    names = {fqn for fqn, _ in model.named_parameters()}
    batch = zoo.inputs("llama", model)
    prompt = {"input_ids": batch["input_ids"][:, :4], "attention_mask": torch.ones(len(batch["input_ids"]), 4).long()}
    head = "float32" if precision == "norms" else None
    with KbitPreparedModel(model, precision=precision, head=head) as prepared:
        peft_model = adapt(model)
        manifest = prepared.manifest()
        prepared.adopt(peft_model)
        live = ENGINES[engine](peft_model)
        frozen = flags(model)
        assert not any(flag for (owner, _), flag in frozen.items() if owner in attributes and (owner, _) in before)
        assert not prepared.verify()
        assert without_time(prepared.manifest()) == without_time(manifest)
        step("llama", live)
        for _ in range(2):  # the second time, what the first forward left whole is sharded again
            copy_adapters(live, plain)
            with prepared.suspended(), torch.no_grad():
                assert all(flags(model)[place] == flag for place, flag in before.items())
                with whole(live, recurse=False):
                    tokens = live.eval().generate(**prompt, max_new_tokens=4, do_sample=False)
                assert torch.equal(tokens, plain.generate(**prompt, max_new_tokens=4, do_sample=False))
                assert torch.equal(live(**batch).logits, plain(**batch).logits)
            assert flags(model) == frozen
            if rank == 0:
                prepared.suspend()
                prepared.resume()
            agree(rank)
            assert not prepared.verify()
            step("llama", live, seed=1)
        prepared.export(folder / precision, max_shard_size=SHARD)
        assert read(folder / precision) == expected
        with torch.no_grad():
            assert live(**batch).logits.dtype == (torch.float32 if head else torch.bfloat16)
        assert engine != "fsdp2" or not isinstance(model.model.embed_tokens.weight, DTensor)
        manifest.check(model)
        assert without_time(prepared.manifest()) == without_time(manifest)
        if engine == "fsdp2":  # a shard is the recorded weight's while its layer has the recorded statistics
            layer = model.model.layers[0].mlp.up_proj
            statistics = layer.quant_state
            layer.quant_state = copy.copy(statistics)
            assert "model.layers.0.mlp.up_proj.weight" in str(prepared.verify())
            layer.quant_state = statistics
            assert not prepared.verify()
        if rank == 0:
            assert prepared.restore() is prepared.restore()
        agree(rank)
    report = prepared.restore()
    assert set(report.not_compared) == names
    assert (report.trained, report.replaced) == ((), ())
    assert all(flags(model)[place] == flag for place, flag in before.items())
    changed = {m: keys ^ vars(m).keys() for m in model.modules() if (keys := attributes.get(id(m))) is not None}
    assert not any("forward" in keys or "gradient_checkpointing" in keys for keys in changed.values())


def live_on(rank: int, join: forks.Join, engine: str, precision: str, folder: Path) -> None:
    # Before the group exists: transformers lets only the first of several processes write a checkpoint.
    model, plain = repacking(load(engine)), not_repacking(engine)
    expected = saved(model, folder / f"saved-{rank}")
    with join():
        lives_on(rank, engine, precision, model, plain, folder, expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "precision"), [*itertools.product(ENGINES, STORES_NOTHING)])
def test_what_stores_no_other_dtype_is_suspended_and_restored_while_sharded(
    engine: str, precision: str, tmp_path: Path
) -> None:
    forks.run_ranks(live_on, engine, precision, tmp_path)


def lives_on_unpacked(
    engine: str, model: nn.Module, plain: nn.Module, folder: Path, expected: dict[str, bytes]
) -> None:
    """A base that was repacked before it was prepared, and whose body fails while it is suspended."""
    plain = adapt(plain).eval()
    before, batch = flags(model), zoo.inputs("llama", model)
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    peft_model = adapt(model)
    manifest = prepared.manifest()
    live = ENGINES[engine](peft_model)
    for seed in range(2):
        step("llama", live, seed=seed)
        copy_adapters(live, plain)
        with pytest.raises(ZeroDivisionError), prepared.suspended():
            fail_after_evaluating(live, plain, batch)
        assert not prepared.verify()
    prepared.export(folder / "export", max_shard_size=SHARD)
    assert read(folder / "export") == expected
    assert without_time(prepared.manifest()) == without_time(manifest)
    prepared.restore()
    assert all(flags(model)[place] == flag for place, flag in before.items())
    evaluate_alike(live, plain, batch)


def evaluate_alike(live: nn.Module, plain: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """The second time, what the first forward repacked would have been gathered again."""
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(live.eval()(**batch).logits, plain(**batch).logits)


def fail_after_evaluating(live: nn.Module, plain: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    evaluate_alike(live, plain, batch)
    raise ZeroDivisionError


def live_on_unpacked(rank: int, join: forks.Join, engine: str, folder: Path) -> None:
    plain = not_repacking(engine)
    expected = saved(plain, folder / f"saved-{rank}")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        settings.repack(patch)
        model = load(engine)
        model(**zoo.inputs("llama", model))
    assert model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu
    with join():
        lives_on_unpacked(engine, model, plain, folder, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_cpu_repacked_is_unpacked_while_sharded(engine: str, tmp_path: Path) -> None:
    forks.run_ranks(live_on_unpacked, engine, tmp_path)


def keeps_its_dtypes(
    rank: int, engine: str, precision: str, model: nn.Module, folder: Path, expected: dict[str, bytes]
) -> None:
    """The first use warns, and a restore gives back all but the dtypes of what is sharded, which it names."""
    flags_before, attributes = flags(model), {id(m): vars(m).keys() for m in model.modules()}
    dtypes = {fqn: p.dtype for fqn, p in model.named_parameters()}
    as_full = build_plan(model, precision="full")
    prepared = KbitPreparedModel(model, precision=precision).prepare(engine=engine)
    assert prepared.plan.added_bytes == as_full.added_bytes
    assert precision == "full" or "stands in front of a weight" in str([edit.reason for edit in prepared.plan.edits])
    cast = {fqn for fqn, p in model.named_parameters() if p.dtype != dtypes[fqn]}
    peft_model = adapt(model)
    prepared.adopt(peft_model)
    manifest = prepared.manifest()
    live = ENGINES[engine](peft_model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step("llama", live)
        step("llama", live, seed=1)
    messages = [str(warning.message) for warning in caught if "export() on every rank" in str(warning.message)]
    assert len(messages) == 1
    assert all(word in message for word in ("restore()", "suspended()", "with-block") for message in messages)
    if rank == 0:
        with pytest.raises(UnsupportedModelError, match="sharded after"), prepared.suspended():
            pass
    agree(rank)
    assert without_time(prepared.manifest()) == without_time(manifest)
    prepared.export(folder / precision, max_shard_size=SHARD)
    assert read(folder / precision) == expected
    assert not prepared.verify()
    if rank == 0:
        with pytest.raises(ZeroDivisionError), prepared:
            raise ZeroDivisionError
    else:
        with prepared:
            pass
    report = prepared.restore()
    agree(rank)
    assert set(report.kept_dtype) == cast
    assert (report.trained, report.replaced) == ((), ())
    assert set(report.not_compared) == dtypes.keys()
    assert all(flags(model)[place] == flag for place, flag in flags_before.items())
    changed = {m: keys ^ vars(m).keys() for m in model.modules() if (keys := attributes.get(id(m))) is not None}
    assert not any(keys & {"forward", "gradient_checkpointing", "weight"} for keys in changed.values())
    with torch.no_grad():
        assert live(**zoo.inputs("llama", model)).logits.isfinite().all()


def stay_as_they_are(rank: int, join: forks.Join, engine: str, folder: Path) -> None:
    models = [(precision, load(engine)) for precision in ("full", "compute")]
    untold = load(engine)
    expected = saved(models[0][1], folder / f"saved-{rank}")
    with join():
        for precision, model in models:
            keeps_its_dtypes(rank, engine, precision, model, folder, expected)

        KbitPreparedModel(untold, precision="compute").prepare()
        live = ENGINES[engine](adapt(untold))
        with pytest.raises(UnsupportedModelError, match=r"Embedding.weight.*prepare\(engine='fsdp2'\)"):
            step("llama", live)


@pytest.mark.thorough
def test_what_is_sharded_keeps_its_dtype_and_is_named_and_all_else_is_restored(tmp_path: Path) -> None:
    forks.run_ranks(stay_as_they_are, "fsdp2", tmp_path)


def test_a_preparation_for_no_engine_is_refused() -> None:
    prepared = KbitPreparedModel(load("fsdp2"), precision="compute")
    with pytest.raises(ConfigError, match="engine: expected one of 'ddp'"):
        prepared.prepare(engine="fsdp")
    assert prepared.state == "new"


# ----------------------------------------------------------------------------------------------------
# Values that changed, and the Trainer's callback.
# ----------------------------------------------------------------------------------------------------


def reads_what_changed(rank: int, engine: str, frozen: nn.Module, trained: nn.Module, folder: Path) -> None:
    """All ranks learn of a change that one shard alone shows."""
    prepared = KbitPreparedModel(frozen, precision="norms").prepare()
    live = ENGINES[engine](adapt(frozen))
    if rank == 1:
        local(frozen.lm_head.weight).add_(1)
    for call, error in ((prepared.manifest, ManifestError), (lambda: prepared.export(folder / "drift"), ExportError)):
        with pytest.raises(error, match=r"lm_head.weight is frozen, but its values have changed"):
            call()
    assert prepared.verify() == StateDiff()
    del live

    prepared = KbitPreparedModel(trained, precision="norms", freeze=False).prepare()
    live = ENGINES[engine](trained)
    prepared.manifest()
    step("llama", live)
    with pytest.raises(ManifestError, match=r"was trained since"):
        prepared.manifest()
    prepared.export(folder / "trained")
    assert prepared.restore().not_compared


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard, to be written to."""
    return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


class Arguments(transformers.TrainingArguments):
    """Those of a process that only the first lets save."""

    @property
    def should_save(self) -> bool:
        return torch.distributed.get_rank() == 0


def trains_with_the_callback(rank: int, engine: str, model: nn.Module, folder: Path) -> None:
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    manifest = prepared.manifest()
    peft_model = adapt(model)
    callback = KbitTrainerCallback(prepared)
    arguments = Arguments(
        str(folder), use_cpu=True, max_steps=2, report_to=[], disable_tqdm=True, save_strategy="no",
        eval_strategy="steps", eval_steps=1, per_device_train_batch_size=2, remove_unused_columns=False,
    )  # fmt: skip
    rows = dataset(model)
    trainer = SuspendedEvaluation(peft_model, arguments, train_dataset=rows, eval_dataset=rows, callbacks=[callback])
    # As Trainer does when accelerate shards; on a CPU accelerate knows of DDP alone.
    trainer.accelerator.prepare_model = lambda model, **kwargs: model
    trainer.model = trainer.model_wrapped = trainer.callback_handler.model = ENGINES[engine](peft_model)
    trainer.train()
    assert trainer.state.global_step == 2
    assert callback.state()["preparation"] == manifest.essence()
    assert len([row for row in trainer.state.log_history if "eval_loss" in row]) == 2
    prepared.restore()


def see_what_changed(rank: int, join: forks.Join, engine: str, folder: Path) -> None:
    models = [load(engine) for _ in range(3)]
    with join():
        reads_what_changed(rank, engine, *models[:2], folder)
        trains_with_the_callback(rank, engine, models[2], folder / f"{rank}")


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_read_what_changed_and_the_callbacks_manifest(engine: str, tmp_path: Path) -> None:
    forks.run_ranks(see_what_changed, engine, tmp_path)


# ----------------------------------------------------------------------------------------------------
# What is said beforehand.
# ----------------------------------------------------------------------------------------------------


def trains(engine: str, model: nn.Module, precision: str) -> bool:
    """Whether a step comes about."""
    try:
        prepared = KbitPreparedModel(model, precision=precision).prepare(engine=engine)
        step("llama", ENGINES[engine](adapt(model)))
    except (UnsupportedModelError, ValueError, RuntimeError):
        return False
    assert prepared.state == "prepared"
    return True


def come_true(rank: int, join: forks.Join) -> None:
    cases = [
        (engine, precision, load(engine)) for engine in ENGINES for precision in ("full", "compute", "norms", "none")
    ]
    cases.append(("fsdp2", "norms", zoo.load("llama")))  # packed in integers
    with_float32 = peft.get_peft_model(load("fsdp1"), zoo.lora_config("llama"))
    with join():
        for engine, precision, model in cases:
            outcome = check_sharding(model, engine).outcomes[precision]
            assert trains(engine, model, precision) == outcome.trains, (engine, precision, outcome)
        outcome = check_sharding(with_float32, "fsdp1").outcomes["norms"]
        assert not outcome.trains
        assert "autocast_adapter_dtype=False" in outcome.notes[0]
        with pytest.raises(ValueError, match="uniform dtype"):
            fsdp1(with_float32)


@pytest.mark.thorough
def test_what_is_said_beforehand_comes_true() -> None:
    forks.run_ranks(come_true)


# ----------------------------------------------------------------------------------------------------
# What FSDP1 alone refuses, and leaves whole.
# ----------------------------------------------------------------------------------------------------


def is_restored_where_fsdp1_refuses(rank: int, precision: str, autocast: bool, model: nn.Module) -> None:
    """FSDP1's own error is the one seen, and the model is as it was."""
    before = Snapshot(model)
    lives = []

    def train() -> None:
        with KbitPreparedModel(model, precision=precision):
            lives.append(peft.get_peft_model(model, zoo.lora_config("llama"), autocast_adapter_dtype=autocast))
            fsdp1(lives[0])

    with pytest.raises(ValueError, match=r"^Must flatten tensors with uniform dtype"):
        train()
    lives[0].unload()
    torchs = (": _fsdp_use_orig_params", ": _is_fsdp_managed_module", ": attributes")  # marks that FSDP1 leaves
    assert before.diff(Snapshot(model), moved=True, ignore=torchs) == []


def is_refused_by_name(rank: int, model: nn.Module, folder: Path) -> None:
    """A model whose parameters FSDP1 took off their modules, after it was prepared."""
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    fsdp1(model, use_orig_params=False)
    manifest, export = prepared.manifest, functools.partial(prepared.export, folder / "flat")
    for call in (prepared.restore, prepared.suspend, manifest, export):
        with pytest.raises(UnsupportedModelError, match=r"use_orig_params=False"):
            call()
    with pytest.raises(ZeroDivisionError), prepared:
        raise ZeroDivisionError


def is_whole_until_a_backward(rank: int, model: nn.Module, folder: Path, expected: dict[str, bytes]) -> None:
    """With SHARD_GRAD_OP, everything works but where a backward is to follow, which is refused by name."""
    before = flags(model)
    prepared = KbitPreparedModel(model, precision="norms").prepare()
    peft_model = adapt(model)
    manifest = prepared.manifest()
    batch = zoo.inputs("llama", model)
    live = fsdp1(peft_model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    step("llama", live)
    for _ in range(2):  # the second time, after a forward without a backward
        with prepared.suspended(), torch.no_grad():
            live(**batch)
    loss = live.train()(**batch).loss
    export, merge = functools.partial(prepared.export, folder / "between"), lambda: [*prepared.merged_weights()]
    for call in (prepared.restore, prepared.suspend, prepared.manifest, export, merge):
        with pytest.raises(UnsupportedModelError, match=r"SHARD_GRAD_OP; call backward\(\)"):
            call()
    loss.backward()
    with prepared.suspended():
        assert all(flags(model)[place] == flag for place, flag in before.items())
    assert without_time(prepared.manifest()) == without_time(manifest)
    prepared.export(folder / "grad-op", max_shard_size=SHARD)
    assert read(folder / "grad-op") == expected
    prepared.restore()
    assert all(flags(model)[place] == flag for place, flag in before.items())


def refuses_a_backward(rank: int, model: nn.Module, is_prepared: bool) -> None:
    """FSDP1 with SHARD_GRAD_OP frees what bitsandbytes' backward needs."""
    if is_prepared:
        KbitPreparedModel(model, precision="norms", gradient_checkpointing=False).prepare()
    live = fsdp1(adapt(model), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    with pytest.raises(AssertionError, match="changing the parameters between forward and backward"):
        step("llama", live)


def refuse_and_leave_whole(rank: int, join: forks.Join, folder: Path) -> None:
    mixed = [("full", False, load("fsdp1")), ("norms", True, load("fsdp1"))]
    flat = zoo.load("llama", None, torch.bfloat16)
    four_bit = [(load("fsdp1"), is_prepared) for is_prepared in (False, True)]
    whole = zoo.load("llama", None, torch.bfloat16)
    expected = saved(whole, folder / f"saved-{rank}")
    with join():
        for precision, autocast, model in mixed:
            is_restored_where_fsdp1_refuses(rank, precision, autocast, model)
        is_refused_by_name(rank, flat, folder)
        for model, is_prepared in four_bit:
            refuses_a_backward(rank, model, is_prepared)
        is_whole_until_a_backward(rank, whole, folder, expected)


@pytest.mark.thorough
def test_what_fsdp1_refuses_leaves_the_model_as_it_was_and_what_it_leaves_whole_is_named(tmp_path: Path) -> None:
    forks.run_ranks(refuse_and_leave_whole, tmp_path)
