"""On every architecture, a whole journey: what is exported and restored is as it was, and the numbers are PEFT's."""

from __future__ import annotations

import itertools
from pathlib import Path

import peft
import pytest
import torch
from peft.utils.other import ModulesToSaveWrapper

import kbitwrap
from kbitwrap import KbitPreparedModel, LifecycleState, Manifest, Precision
from support import zoo
from support.cuda_rules import CudaRules
from support.files import SHARD, read, saved
from support.pairwise import pairwise
from support.snapshot import Snapshot
from support.thorough import few
from support.training import adapt, step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUANTS = ("nf4", "nf4-double", "fp4", "int8")
FLOAT32_STORAGE = (Precision.FULL, Precision.COMPUTE)

pytestmark = [
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Without quantized layers, as Falcon's, a preparation says that the model is not checkpointed.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),  # an unquantized GPT-2's `Conv1D`
]


def cases(names: tuple[str, ...], quants: tuple[str | None, ...], last: tuple[object, ...]) -> list[object]:
    """Every architecture in 4-bit bf16 with every last value; the core in all pairs of all values.

    By default each of some architectures has one last value, another one for the next with the same kind of input; and
    each quantization each dtype, on the next architecture of the core and with the next last value.
    """
    every = [(name, "nf4", "bf16", value) for name in zoo.ARCHITECTURES for value in last]
    chosen: list[tuple[object, ...]] = [(name, "nf4", "bf16", value) for name, value in zoo.in_turn(last, names=names)]
    others = [values for values in itertools.product(quants, DTYPES) if values != ("nf4", "bf16")]
    chosen += [(zoo.CORE[i % len(zoo.CORE)], *values, last[i % len(last)]) for i, values in enumerate(others)]
    return few(dict.fromkeys(every + chosen + pairwise(zoo.CORE, quants, tuple(DTYPES), last)), chosen)


@pytest.mark.parametrize(
    ("name", "quant", "dtype", "precision"), cases(zoo.CORE[1::6], (*QUANTS, None), tuple(Precision))
)
def test_a_journey(
    name: str,
    quant: str | None,
    dtype: str,
    precision: Precision,
    tmp_path: Path,
) -> None:
    """Prepared, trained, exported, suspended and restored, first with a LoRA, then with a trained copy beside it.

    On CUDA it would compute too, and wait for the device no more often than counted here.
    """
    model = zoo.load(name, quant, DTYPES[dtype])
    whole = saved(model, tmp_path / "whole", "5GB")
    before = Snapshot(model)

    prepared = KbitPreparedModel(model, precision=precision, **zoo.fields(name))
    with CudaRules() as preparing:
        prepared.prepare()
    num_casts = sum(edit.action == "store" for edit in prepared.plan.edits)
    assert len(preparing.syncs) <= num_casts
    prepared.export(tmp_path / "prepared")
    assert read(tmp_path / "prepared") == whole
    manifest = prepared.manifest()
    peft_model = adapt(name, model)
    prepared.adopt(peft_model)
    with CudaRules():
        loss, gradients = step(name, peft_model)
    assert torch.isfinite(loss)
    assert all(gradient.any() and gradient.isfinite().all() for gradient in gradients.values())
    with CudaRules():
        assert not prepared.verify()
    during = Snapshot(peft_model)
    with CudaRules() as suspending, prepared.suspended():
        assert prepared.state is LifecycleState.SUSPENDED
    assert prepared.state is LifecycleState.PREPARED
    assert len(suspending.syncs) <= 2 * num_casts  # as test_trained_values.py says
    # Suspending takes instance attributes away and puts them back, at the end.
    assert during.diff(Snapshot(peft_model), moved=True, ignore=(": attributes",)) == []
    report = prepared.restore()
    assert report.trained == ()
    assert peft_model.unload() is model
    restored = Snapshot(model)
    assert before.diff(restored, moved=precision.upcasts_all) == []
    manifest.save(tmp_path / "kbitwrap.json")
    Manifest.load(tmp_path / "kbitwrap.json").check(model)

    # Saved anew: a classifier's first forward has written the kind of its labels to the config.
    sharded = saved(model, tmp_path / "sharded")
    assert len(sharded) > len(whole)
    dtypes = {fqn: p.dtype for fqn, p in model.named_parameters(remove_duplicate=False)}
    prepared = KbitPreparedModel(model, precision=precision, **zoo.fields(name)).prepare()
    peft_model = adapt(name, model, modules_to_save=True)
    if is_adopted(name, precision):
        prepared.adopt(peft_model)
    step(name, peft_model)
    during = Snapshot(peft_model)
    report = prepared.export(tmp_path / "trained", max_shard_size=SHARD)
    assert during.diff(Snapshot(peft_model)) == []
    assert prepared.state is LifecycleState.PREPARED
    assert read(tmp_path / "trained") == sharded
    assert report.files == tuple(sorted(sharded))
    assert bool(report.converted) == (precision in FLOAT32_STORAGE)
    with prepared.suspended():
        prepared.export(tmp_path / "suspended", model=peft_model, max_shard_size=SHARD)
    assert read(tmp_path / "suspended") == sharded
    restores_a_trained_copy(prepared, peft_model, restored, DTYPES[dtype])
    assert {fqn: p.dtype for fqn, p in model.named_parameters(remove_duplicate=False)} == dtypes


def is_adopted(name: str, precision: Precision) -> bool:
    """Half of the cases, half of each architecture's and of each precision's."""
    return (list(zoo.ARCHITECTURES).index(name) + list(Precision).index(precision)) % 2 == 0


def restores_a_trained_copy(
    prepared: KbitPreparedModel, peft_model: peft.PeftModel, before: Snapshot, dtype: torch.dtype
) -> None:
    """The copy ends in the original dtype, is reported, and is all that is another than before."""
    model, upcasts_all = prepared.model, prepared.config.precision.upcasts_all
    copies = {id(p): p for fqn, p in peft_model.named_parameters() if "modules_to_save" in fqn}
    assert {p.dtype for p in copies.values()} == {torch.float32 if upcasts_all else dtype}
    trained = {key: p.detach().to(dtype) for key, p in copies.items()}
    report = prepared.restore()
    owners = {fqn for fqn, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    peft_model.unload()
    heads = {fqn: p for fqn, p in model.named_parameters() if id(p) in copies}
    assert heads
    assert all(p.dtype == dtype and torch.equal(p, trained[id(p)]) for p in heads.values())
    assert set(report.trained) == (set(heads) if upcasts_all else set())
    assert set(report.replaced) >= set(heads)
    assert not any(module.training for module in model.modules())
    # Nothing else changed: what differs is the copy, by name, where the original was, and whom it was tied to.
    parents = {owner.rpartition(".")[0] for owner in owners}
    rest = [
        line
        for line in before.diff(Snapshot(model), moved=upcasts_all)
        if not line.startswith("shared memory")
        and not any(line.startswith((f"{owner}:", f"{owner}.")) for owner in owners)
        and not any(line.startswith(f"{parent}: _modules") for parent in parents)
    ]
    assert rest == []


@pytest.mark.parametrize(("name", "quant", "dtype", "reentrant"), cases(zoo.CORE[::4], QUANTS, (True, False)))
def test_drop_in_gives_pefts_numbers(name: str, quant: str, dtype: str, reentrant: bool) -> None:
    results = []
    for prepare in (peft.prepare_model_for_kbit_training, kbitwrap.prepare_model_for_kbit_training):
        model = zoo.load(name, quant, DTYPES[dtype])
        model = prepare(
            model,
            use_gradient_checkpointing=zoo.ARCHITECTURES[name].supports_gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        state = {fqn: (p.dtype, p.requires_grad, p.data_ptr() == 0) for fqn, p in model.named_parameters()}
        peft_model = adapt(name, model)
        losses_and_gradients = [step(name, peft_model, seed=seed) for seed in (0, 1)]
        results.append((state, losses_and_gradients))
    kbitwrap.restore(model)
    (theirs, their_steps), (ours, our_steps) = results
    assert theirs == ours
    for (their_loss, their_gradients), (our_loss, our_gradients) in zip(their_steps, our_steps, strict=True):
        assert torch.equal(their_loss, our_loss)
        assert their_gradients.keys() == our_gradients.keys()
        assert all(torch.equal(their_gradients[fqn], our_gradients[fqn]) for fqn in their_gradients)
