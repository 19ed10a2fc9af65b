"""A suspended model: the original state for a while, at odd moments too."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import peft
import pytest
import torch
from torch import nn

import kbitwrap
from kbitwrap import (
    EditError,
    KbitPreparedModel,
    LifecycleState,
    Precision,
    RestoreError,
    StateError,
    UnsupportedModelError,
    build_plan,
    prepared_of,
)
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once, few
from support.training import adapt, step

PRECISIONS = list(Precision)


# Suspending takes instance attributes away and puts them back, at the end; each is still compared by itself.
REORDERED = (": attributes",)


pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]


@pytest.mark.parametrize(("precision", "name"), each_once(PRECISIONS, ["llama", "opt", "bart", "gemma2"]))
def test_suspended_is_the_original_state_and_ends_as_before(name: str, precision: Precision) -> None:
    model = zoo.load(name, "int8" if name == "opt" else "nf4", torch.float16)
    original = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt(name, model)
    step(name, peft_model)
    names = {fqn for fqn, _ in model.named_modules() if "lora" not in fqn}
    during = Snapshot(model)
    with prepared.suspended():
        inside = {fqn: (p.dtype, p.requires_grad) for fqn, p in model.named_parameters() if "lora" not in fqn}
        assert not any(module.training for module in model.modules())
        assert not any("_kbitwrap" in key for module in model.modules() for key in vars(module))
        assert not any("forward" in vars(module) for fqn, module in model.named_modules() if fqn in names)
    assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []
    assert not prepared.verify()
    prepared.restore()
    restored = {fqn: (p.dtype, p.requires_grad) for fqn, p in model.named_parameters() if "lora" not in fqn}
    assert inside == restored
    peft_model.unload()
    assert original.diff(Snapshot(model), moved=precision.upcasts_all) == []


@pytest.mark.parametrize(
    ("precision", "dropout"), few(itertools.product(PRECISIONS, [0.0, 0.2]), [("full", 0.2), ("norms", 0.0)])
)
def test_training_with_a_suspended_generate_is_training_without(precision: Precision, dropout: float) -> None:
    losses: dict[bool, list[torch.Tensor]] = {}
    for suspends in (False, True):
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt("llama", model, modules_to_save=True, lora_dropout=dropout)
        trainable = [p for p in peft_model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.01)
        losses[suspends] = []
        torch.manual_seed(1)
        for seed in range(4):
            peft_model.train()
            loss = peft_model(**zoo.inputs("llama", model, seed=seed)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[suspends].append(loss.detach())
            if suspends:
                with prepared.suspended():
                    assert {p.dtype for p in trainable if p.dim() == 2 and p.shape[0] > 90} <= {torch.bfloat16}
                    prompt = zoo.inputs("llama", model)["input_ids"][:1, :4]
                    peft_model.generate(input_ids=prompt, max_new_tokens=4, do_sample=True, pad_token_id=0)
        prepared.restore()
    assert all(torch.equal(a, b) for a, b in zip(losses[False], losses[True], strict=True))
    assert losses[True][-1] < losses[True][0]


def test_suspended_resumes_after_an_exception() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    during = Snapshot(model)
    with pytest.raises(ValueError, match="inside"), prepared.suspended():
        raise ValueError("inside")
    assert prepared.state is LifecycleState.PREPARED
    assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []


class FaultError(Exception):
    """Raised on purpose."""


class TestOddMoments:
    """Found by trying to break it."""

    @pytest.mark.parametrize("precision", PRECISIONS, ids=str)
    def test_inside_inference_mode(self, precision: Precision) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        with torch.inference_mode():
            prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt("llama", model, modules_to_save=True)
        step("llama", peft_model)
        with torch.inference_mode(), prepared.suspended():
            peft_model(**zoo.inputs("llama", model))
        step("llama", peft_model)
        with torch.inference_mode():
            prepared.restore()
        assert not any(p.is_inference() for p in peft_model.parameters())
        head = model.lm_head.original_module
        peft_model.unload()
        model.lm_head = head
        assert before.diff(Snapshot(model), moved=True) == []

    @pytest.mark.parametrize("where", ["empty_cache", "ModelState"])
    @pytest.mark.parametrize("kind", [FaultError, KeyboardInterrupt])
    def test_a_fault_after_the_last_edit(
        self, where: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)

        def fail(*_: object) -> None:
            raise kind("late")

        monkeypatch.setattr(f"kbitwrap.preparation.preparation.{where}", fail)
        with pytest.raises(EditError if kind is FaultError else kind):
            KbitPreparedModel(model, precision="full").prepare()
        assert before.diff(Snapshot(model), moved=True) == []
        assert prepared_of(model) is None

    def test_leaving_the_block_while_suspended(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        state = torch.get_rng_state()

        def stream() -> object:
            with prepared.suspended():
                yield 1
                yield 2

        with KbitPreparedModel(model, precision="full") as prepared:
            generator = stream()
            next(generator)  # type: ignore[call-overload]
        assert prepared.state is LifecycleState.RESTORED
        torch.manual_seed(7)
        drawn = torch.get_rng_state()
        del generator
        gc.collect()
        assert prepared.state is LifecycleState.RESTORED
        assert torch.equal(torch.get_rng_state(), drawn)
        torch.set_rng_state(state)
        assert before.diff(Snapshot(model), moved=True) == []

    def test_an_interrupt_while_resuming_resumes_the_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        during = Snapshot(model)
        slot = prepared._preparation.journal.slots[4]
        resume, is_interrupting = slot.resume, [True]

        def interrupted(tree: object, value: object) -> None:
            if is_interrupting:
                raise KeyboardInterrupt
            resume(tree, value)

        monkeypatch.setattr(slot, "resume", interrupted)
        with pytest.raises(KeyboardInterrupt), prepared.suspended():
            pass
        assert prepared.state is LifecycleState.SUSPENDED
        assert prepared._suspension.slots[-1].slot is slot  # the first to be undone again
        assert {norm.weight.dtype for norm in (model.model.norm, model.model.layers[0].input_layernorm)} == {
            torch.float32
        }
        is_interrupting.clear()
        assert prepared.resume()
        assert prepared.state is LifecycleState.PREPARED
        assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_a_comparison_that_fails_while_suspending_suspends_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        during = Snapshot(model)

        def fail(*_: object, **__: object) -> None:
            raise FaultError("out of memory")

        monkeypatch.setattr("kbitwrap.edits.storage.differ", fail)
        for suspend in (prepared.suspend, lambda: prepared.suspended().__enter__()):
            with pytest.raises(FaultError, match="out of memory"):
                suspend()
            assert prepared.state is LifecycleState.PREPARED
            assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_a_failed_resume_can_be_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        during = Snapshot(model)
        to = torch.Tensor.to

        def fail(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args == (torch.float32,) and self.shape == model.lm_head.weight.shape:
                raise torch.OutOfMemoryError("no room")
            return to(self, *args, **kwargs)

        prepared.suspend()
        monkeypatch.setattr(torch.Tensor, "to", fail)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="no room"):
                prepared.resume()
            assert prepared.state is LifecycleState.SUSPENDED
        monkeypatch.undo()
        assert prepared.resume()
        assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []

    def test_a_suspended_model_holds_its_wrapper(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        KbitPreparedModel(model, precision="full").prepare().suspend()
        gc.collect()
        prepared = prepared_of(model)
        assert prepared is not None
        assert prepared.resume()
        prepared.restore()
        assert before.diff(Snapshot(model), moved=True) == []

    def test_suspending_without_a_block(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="full")
        assert not prepared.resume()
        with pytest.raises(StateError, match="prepare"):
            prepared.suspend()
        with prepared:
            during = Snapshot(model)
            torch.manual_seed(3)
            state = torch.get_rng_state()
            prepared.suspend()
            assert prepared.state is LifecycleState.SUSPENDED
            held = (": _kbitwrap_prepared",)  # nothing else may hold the wrapper
            assert before.diff(Snapshot(model), moved=True, ignore=(*REORDERED, *held)) == []
            with pytest.raises(StateError, match=r"resume\(\) it, or leave suspended"):
                prepared.suspend()
            torch.rand(3)
            assert prepared.resume()
            assert not prepared.resume()
            assert torch.equal(torch.get_rng_state(), state)
            assert during.diff(Snapshot(model), moved=True, ignore=REORDERED) == []
            with prepared.suspended():
                assert prepared.state is LifecycleState.SUSPENDED
                assert prepared.resume()  # the end of the block then changes nothing
                assert prepared.state is LifecycleState.PREPARED
                torch.rand(3)
                drawn = torch.get_rng_state()
            assert torch.equal(torch.get_rng_state(), drawn)
            prepared.suspend()
        assert prepared.state is LifecycleState.RESTORED
        assert before.diff(Snapshot(model), moved=True) == []

    def test_adapters_from_before_are_never_touched(self) -> None:
        model = zoo.load("llama")
        peft_model = adapt("llama", model, modules_to_save=True)
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float() + 1e-4
        copies = {fqn: p.detach().clone() for fqn, p in peft_model.named_parameters() if p.requires_grad}
        prepared = KbitPreparedModel(peft_model, precision="full").prepare()
        with prepared.suspended():
            live = dict(peft_model.named_parameters())
            assert all(torch.equal(live[fqn], value) for fqn, value in copies.items())
        report = prepared.restore()
        assert (report.trained, report.replaced, report.foreign) == ((), (), ())
        live = dict(peft_model.named_parameters())
        assert all(live[fqn].dtype == value.dtype and torch.equal(live[fqn], value) for fqn, value in copies.items())

    def test_an_error_about_training_keeps_the_record(self) -> None:
        model = zoo.load("llama")
        kbitwrap.prepare_model_for_kbit_training(model)
        with torch.no_grad():
            model.lm_head.weight.add_(0.001)
            model.model.norm.weight.add_(0.001)
        with pytest.raises(RestoreError, match=r"lm_head\.weight was trained") as caught:
            kbitwrap.restore(model, "error")
        assert set(caught.value.failures) == {"lm_head.weight", "model.norm.weight"}
        gc.collect()
        with prepared_of(model).suspended():  # what was asked of the restore is not asked of a suspension
            assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.lm_head.weight.dtype == torch.float32
        assert set(kbitwrap.restore(model, "keep").trained) == set(caught.value.failures)
        assert model.lm_head.weight.dtype == torch.bfloat16

    def test_none_is_reentrant_as_in_torch(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, gradient_checkpointing_kwargs={"use_reentrant": None}):
            assert model.get_input_embeddings()(torch.tensor([1])).requires_grad

    def test_norms_then_full_by_the_drop_in_leaves_no_float32_copy(self) -> None:
        model = zoo.load("llama")
        kbitwrap.prepare_model_for_kbit_training(model, precision="norms")
        kbitwrap.prepare_model_for_kbit_training(model, precision="full")
        peft_model = adapt("llama", model, modules_to_save=True)
        merged = peft_model.merge_and_unload()
        assert kbitwrap.restore(merged).trained == ("lm_head.weight",)
        assert merged.lm_head.weight.dtype == torch.bfloat16

    # PEFT's word on every norm class that is not torch's.
    @pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
    def test_ln_tuning_copies_end_in_half(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        config = peft.LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM")
        peft_model = peft.get_peft_model(model, config)
        with prepared.suspended():
            assert torch.float32 not in {p.dtype for p in peft_model.parameters()}
            peft_model(**zoo.inputs("llama", model))
        prepared.restore()
        assert torch.float32 not in {p.dtype for p in peft_model.merge_and_unload().parameters()}

    def test_a_hook_that_its_owner_removed_stays_removed(self) -> None:
        model = zoo.load("llama")
        kwargs = {"use_reentrant": True}
        prepared = KbitPreparedModel(model, gradient_checkpointing_kwargs=kwargs).prepare()
        embeddings = model.model.embed_tokens
        (own,) = embeddings._forward_hooks
        handle = embeddings.register_forward_hook(lambda *_: None)
        with prepared.suspended():
            handle.remove()
            added = embeddings.register_forward_hook(lambda *_: None)
        assert list(embeddings._forward_hooks) == [own, added.id]  # in the order in which they were registered
        assert not prepared.verify()

    def test_verify_ignores_a_lora_on_parameters(self) -> None:
        model = zoo.load("mixtral")
        prepared = KbitPreparedModel(model).prepare()
        config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], r=2)
        peft_model = peft.get_peft_model(model, config)
        peft_model(**zoo.inputs("mixtral", model))
        assert not prepared.verify()

    def test_originals_kept_on_the_cpu_count(self) -> None:
        model = nn.Sequential(nn.Embedding(100, 64)).bfloat16()
        plan = build_plan(model, precision="full", keep_originals=True)
        assert (plan.added_bytes, plan.peak_bytes, plan.record_bytes) == (100 * 64 * 4, 100 * 64 * 4, 0)

    def test_two_slices_of_one_memory_are_two(self) -> None:
        memory = torch.zeros(10, dtype=torch.bfloat16)
        model = nn.ParameterList([nn.Parameter(memory[:4]), nn.Parameter(memory[4:])])
        plan = build_plan(model, precision="full")
        assert plan.by_role["other"]["bytes"] == 20
        assert plan.added_bytes == 20

    def test_a_model_without_checkpointable_layers_is_refused_by_the_constructor(self) -> None:
        model = zoo.load("llama")
        for module in model.modules():
            vars(module).pop("gradient_checkpointing", None)
        bare = nn.Linear(4, 4)
        bare.supports_gradient_checkpointing = True  # type: ignore[assignment]
        bare.gradient_checkpointing_enable = lambda: None  # type: ignore[assignment]
        bare.is_loaded_in_4bit = True  # type: ignore[assignment]
        with pytest.raises(UnsupportedModelError, match="does not support activation checkpointing"):
            KbitPreparedModel(bare)
        with pytest.raises(UnsupportedModelError, match="get_input_embeddings"):
            KbitPreparedModel(nn.Linear(4, 4), input_require_grads=True)

    def test_a_wrapper_that_is_prepared_can_be_entered(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama")).prepare()
        with prepared:
            assert prepared.state is LifecycleState.PREPARED
        assert prepared.state is LifecycleState.RESTORED
