"""On every architecture: prepare, a LoRA step, restore; the model is as it was, and the numbers are PEFT's."""

from __future__ import annotations

import peft
import pytest
import torch
from peft.utils.other import ModulesToSaveWrapper

import kbitwrap
import zoo
from kbitwrap import KbitPreparedModel, Precision
from snapshot import Snapshot
from training import adapt, step

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUANTS = ("nf4", "int8")
HALF_TRAINABLE = ("ignore:restore.. made:UserWarning",)  # expected: the adapter is on top while restoring

pytestmark = [
    pytest.mark.filterwarnings(*HALF_TRAINABLE),
    # bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
    # Falcon's linear layers stay unquantized, so a preparation says that the model is not checkpointed.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
]


def cases() -> list[object]:
    """The core in every quantization and dtype, the rest in 4-bit bf16."""
    return [
        pytest.param(name, quant, dtype, id=f"{name}-{quant}-{dtype}")
        for name, architecture in zoo.ARCHITECTURES.items()
        for quant in QUANTS
        for dtype in DTYPES
        if quant in architecture.quants and (name in zoo.CORE or (quant, dtype) == ("nf4", "bf16"))
    ]


def fields(name: str) -> dict[str, bool]:
    return {"gradient_checkpointing": zoo.ARCHITECTURES[name].supports_gradient_checkpointing}


@pytest.mark.parametrize("precision", list(Precision), ids=str)
@pytest.mark.parametrize(("name", "quant", "dtype"), cases())
def test_restore_leaves_no_difference(name: str, quant: str, dtype: str, precision: Precision) -> None:
    model = zoo.load(name, quant, DTYPES[dtype])
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision, **fields(name)).prepare()
    peft_model = adapt(name, model)
    prepared.adopt(peft_model)
    loss, gradients = step(name, peft_model)
    assert torch.isfinite(loss)
    assert all(gradient.any() and gradient.isfinite().all() for gradient in gradients.values())
    assert not prepared.verify()
    report = prepared.restore()
    assert report.trained == ()
    assert peft_model.unload() is model
    assert before.diff(Snapshot(model), moved=precision.upcasts_all) == []


@pytest.mark.parametrize("precision", list(Precision), ids=str)
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_a_trained_copy_ends_in_the_original_dtype(name: str, precision: Precision) -> None:
    model = zoo.load(name)
    dtypes = {fqn: p.dtype for fqn, p in model.named_parameters(remove_duplicate=False)}
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision, **fields(name)).prepare()
    peft_model = adapt(name, model, modules_to_save=True)
    step(name, peft_model)
    copies = {id(p): p for fqn, p in peft_model.named_parameters() if "modules_to_save" in fqn}
    expected = torch.float32 if precision.upcasts_all else torch.bfloat16
    assert {p.dtype for p in copies.values()} == {expected}
    trained = {key: p.detach().bfloat16() for key, p in copies.items()}
    report = prepared.restore()
    owners = {fqn for fqn, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)}
    peft_model.unload()
    assert {fqn: p.dtype for fqn, p in model.named_parameters(remove_duplicate=False)} == dtypes
    heads = {fqn: p for fqn, p in model.named_parameters() if id(p) in copies}
    assert heads
    assert all(torch.equal(p, trained[id(p)]) for p in heads.values())
    assert set(report.trained) == (set(heads) if precision.upcasts_all else set())
    assert set(report.replaced) >= set(heads)
    assert not any(module.training for module in model.modules())
    # Nothing else changed: what differs is the copy, by name, where the original was, and whom it was tied to.
    parents = {owner.rpartition(".")[0] for owner in owners}
    rest = [
        line
        for line in before.diff(Snapshot(model), moved=precision.upcasts_all)
        if not line.startswith("shared memory")
        and not any(line.startswith((f"{owner}:", f"{owner}.")) for owner in owners)
        and not any(line.startswith(f"{parent}: _modules") for parent in parents)
    ]
    assert rest == []


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize(("name", "quant", "dtype"), cases())
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
