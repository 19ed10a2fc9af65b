"""The wrapper: its states, what it refuses, and faults while it prepares."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kbitwrap import (
    ConfigError,
    EditError,
    KbitPreparedModel,
    LifecycleState,
    MemoryBudgetError,
    Precision,
    RestoreError,
    StateError,
    UnsupportedModelError,
    build_plan,
    prepared_of,
)
from kbitwrap.edits.storage import ParameterStorage
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once
from support.training import adapt, is_checkpointing, step

PRECISIONS = list(Precision)


pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]


def test_states_follow_the_life() -> None:
    prepared = KbitPreparedModel(zoo.load("llama"))
    assert prepared.state is LifecycleState.NEW
    assert prepared.prepare() is prepared
    assert prepared.state is LifecycleState.PREPARED
    with prepared.suspended() as model:
        assert model is prepared.model
        assert prepared.state is LifecycleState.SUSPENDED
    assert prepared.state is LifecycleState.PREPARED
    report = prepared.restore()
    assert prepared.state is LifecycleState.RESTORED
    assert prepared.restore() is report
    assert prepared.prepare().state is LifecycleState.PREPARED


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_constructing_and_planning_change_nothing(precision: Precision) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision)
    assert str(prepared.plan)
    assert prepared.model is model
    assert before.diff(Snapshot(model)) == []


def test_an_exception_in_the_body_passes_and_the_model_is_restored() -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    error = ValueError("from the body")
    with pytest.raises(ValueError, match="from the body") as caught, KbitPreparedModel(model, precision="full"):
        raise error
    assert caught.value is error
    assert before.diff(Snapshot(model), moved=True) == []


def test_a_failing_restore_does_not_hide_the_body() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    prepared._preparation.journal.slots[2].undo = None  # type: ignore[method-assign]
    error = ValueError("from the body")
    assert prepared.__exit__(ValueError, error, None) is None  # type: ignore[func-returns-value]
    with pytest.raises(RestoreError, match="not callable"):
        prepared.__exit__(None, None, None)


def test_no_bar_is_made_where_none_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of tqdm starts a thread that stays, even a bar that is not shown."""
    monkeypatch.setattr("kbitwrap.preparation.process.tqdm", None)
    model = zoo.load("llama")
    KbitPreparedModel(model).prepare().restore()
    with pytest.raises(EditError, match="NoneType"):
        KbitPreparedModel(model, progress=True).prepare()


class FaultError(Exception):
    """Raised on purpose."""


def test_an_interrupt_at_every_try_of_one_undo_leaves_that_one_alone_to_another_restore() -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision="full").prepare()
    slots = prepared._preparation.journal.slots
    slot = next(one for one in slots if isinstance(one, ParameterStorage) and one.record.fqn == "model.norm.weight")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    slot.undo = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        prepared.restore()
    assert prepared.state is LifecycleState.PREPARED
    assert slots[-1] is slot
    assert [fqn for fqn, one in model.named_parameters() if one.dtype == torch.float32] == ["model.norm.weight"]
    del slot.undo  # type: ignore[method-assign]
    prepared.restore()
    assert before.diff(Snapshot(model), moved=True) == []


@pytest.mark.parametrize(("precision", "kind"), each_once(PRECISIONS, [FaultError, KeyboardInterrupt, SystemExit]))
def test_a_fault_anywhere_in_prepare_leaves_the_model_as_it_was(
    precision: Precision, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.load("gemma2")
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision=precision, progress=True)
    num_edits = len(prepared.plan.edits) + 1
    for position in range(num_edits):
        for phase in ("before", "after"):
            count = 0

            def faulty(edits: object, position: int = position, phase: str = phase) -> object:
                nonlocal count
                for edit in edits:  # type: ignore[attr-defined]
                    if count == position:

                        def fail(*arguments: object, apply: object = edit.apply) -> None:
                            if phase == "after":
                                apply(*arguments)  # type: ignore[operator]
                            raise kind("a fault")

                        edit = dataclasses.replace(edit, apply=fail)
                    yield edit
                    count += 1

            monkeypatch.setattr("kbitwrap.preparation.process.tqdm", lambda edits, **_: faulty(edits))
            expected = EditError if kind is FaultError else kind
            with pytest.raises(expected) as caught:
                prepared.prepare()
            if kind is FaultError:
                assert isinstance(caught.value.__cause__, FaultError)
            assert prepared.state is LifecycleState.NEW
            assert prepared_of(model) is None
            assert before.diff(Snapshot(model), moved=True) == []


def test_a_fault_inside_transformers_enabling_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    whole = type(model).enable_input_require_grads

    def fails_late(self: nn.Module) -> None:
        whole(self)
        raise FaultError("after the hooks were installed")

    monkeypatch.setattr(type(model), "enable_input_require_grads", fails_late)
    with pytest.raises(EditError, match="as it was"):
        KbitPreparedModel(model, precision="full").prepare()
    assert before.diff(Snapshot(model), moved=True) == []


class TestBadInput:
    def test_an_argument_that_is_not_a_module_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match=r"torch\.nn\.Module"):
            KbitPreparedModel("meta-llama/Llama-3-8B")  # type: ignore[arg-type]

    def test_a_model_with_no_parameters_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="no parameters"):
            KbitPreparedModel(nn.ReLU())

    def test_meta(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
        with pytest.raises(UnsupportedModelError, match="meta device") as caught:
            KbitPreparedModel(model)
        assert caught.value.fqn == "1.weight"

    @pytest.mark.parametrize("what", ["model", "part", "parent", "peft"])
    def test_prepared_already(self, what: str) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model).prepare()
        during = Snapshot(model)
        candidate = {
            "model": lambda: model,
            "part": lambda: model.model,
            "parent": lambda: nn.ModuleDict({"inner": model}),
            "peft": lambda: adapt("llama", model),
        }[what]()
        with pytest.raises(StateError, match=r"this \w+, or a part of it, is prepared already") as caught:
            KbitPreparedModel(candidate)
        assert caught.value.state is LifecycleState.PREPARED
        if what != "peft":
            assert during.diff(Snapshot(model)) == []
        assert prepared_of(candidate) is prepared

    def test_a_second_wrapper_made_before(self) -> None:
        model = zoo.load("llama")
        first, second = KbitPreparedModel(model), KbitPreparedModel(model)
        with first:
            with pytest.raises(StateError, match="prepared already"):
                second.prepare()
            with first.suspended(), pytest.raises(StateError, match="prepared already"):
                second.prepare()
        second.prepare()

    def test_preparing_twice(self) -> None:
        with KbitPreparedModel(zoo.load("llama")) as prepared, pytest.raises(StateError, match="restore"):
            prepared.prepare()

    @pytest.mark.parametrize("call", ["restore", "verify"])
    def test_before_prepare(self, call: str) -> None:
        with pytest.raises(StateError, match="prepare") as caught:
            getattr(KbitPreparedModel(zoo.load("llama")), call)()
        assert caught.value.state is LifecycleState.NEW

    def test_suspended_before_prepare_and_twice(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama"))
        with pytest.raises(StateError, match="prepare"), prepared.suspended():
            pass
        prepared.prepare()
        with prepared.suspended():
            with pytest.raises(StateError, match="leave suspended"), prepared.suspended():
                pass
            with pytest.raises(StateError, match="leave suspended"):
                prepared.restore()
        prepared.restore()
        with pytest.raises(StateError, match="restored"), prepared.suspended():
            pass

    def test_unknown_precision_and_field(self) -> None:
        model = zoo.load("llama")
        with pytest.raises(ConfigError, match="'norms'"):
            KbitPreparedModel(model, precision="half")
        with pytest.raises(ConfigError, match="the fields are precision, "):
            KbitPreparedModel(model, precison="full")

    @pytest.mark.parametrize("name", ["ctrl", "convnext"])
    def test_a_model_that_cannot_be_checkpointed(self, name: str) -> None:
        model = zoo.load(name)
        before = Snapshot(model)
        with pytest.raises(UnsupportedModelError, match="gradient_checkpointing=False"):
            KbitPreparedModel(model, precision="full")
        assert before.diff(Snapshot(model)) == []

    def test_a_plan_over_the_budget_names_the_precisions_that_fit(self) -> None:
        model = zoo.load("llama")
        needed = build_plan(model, precision="full").peak_bytes
        with pytest.raises(MemoryBudgetError, match="norms") as caught:
            KbitPreparedModel(model, precision="full", memory_budget=needed - 1)
        assert caught.value.plan.peak_bytes == needed
        assert caught.value.budget_bytes == needed - 1
        assert set(caught.value.fitting) == {"compute", "norms", "adapted", "none"}
        exact = build_plan(model, precision="compute").peak_bytes
        with pytest.raises(MemoryBudgetError) as caught:
            KbitPreparedModel(model, precision="full", memory_budget=exact)
        assert 0 < exact < needed
        assert "compute" in caught.value.fitting
        assert KbitPreparedModel(model, precision="full", memory_budget=needed).plan.peak_bytes == needed

    def test_trained_policies(self) -> None:
        with KbitPreparedModel(zoo.load("llama"), precision="full") as prepared:
            with pytest.raises(ConfigError, match="'keep', 'discard' or 'error'"):
                prepared.restore("round")  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="keep_originals"):
                prepared.restore("discard")


def test_an_unquantized_model_is_frozen_and_cast_with_a_warning() -> None:
    model = zoo.load("llama", None)
    before = Snapshot(model)
    prepared = KbitPreparedModel(model, precision="full")
    with pytest.warns(UserWarning, match="not checkpointed"):
        prepared.prepare()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert not is_checkpointing(model)
    prepared.restore()
    assert before.diff(Snapshot(model), moved=True) == []


def test_bitsandbytes_layers_without_an_attribute_are_recognised() -> None:
    model = zoo.load("llama")
    for name in ("is_loaded_in_4bit", "quantization_method"):
        delattr(model, name)
    assert KbitPreparedModel(model).plan.quantization == "bitsandbytes_4bit"
    with KbitPreparedModel(model):
        assert is_checkpointing(model)


@pytest.mark.parametrize(
    ("method", "precision"), each_once(["gptq", "aqlm", "eetq", "hqq", "torchao", "awq", "fp8"], PRECISIONS)
)
def test_methods_that_manage_their_own_precision_are_never_cast(method: str, precision: Precision) -> None:
    model = zoo.load("llama", None)  # stands in for layers whose kernels do not run here; only detection is tested
    model.quantization_method = method
    dtypes = {fqn: p.dtype for fqn, p in model.named_parameters()}
    with KbitPreparedModel(model, precision=precision) as prepared:
        assert prepared.plan.quantization == method
        assert {fqn: p.dtype for fqn, p in model.named_parameters()} == dtypes
        assert not any("forward" in vars(module) for module in model.modules())
        assert is_checkpointing(model)
        assert not any(p.requires_grad for p in model.parameters())


def test_quantized_bytes_in_a_half_storage_are_never_cast() -> None:
    model = zoo.load("llama", None)
    path = zoo.checkpoint("llama")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.bfloat16)
    before = Snapshot(model)
    packed = {fqn: p.data_ptr() for fqn, p in model.named_parameters() if type(p).__name__ == "Params4bit"}
    assert packed
    with KbitPreparedModel(model, precision="full"):
        live = dict(model.named_parameters())
        assert all(live[fqn].dtype == torch.bfloat16 and live[fqn].data_ptr() == packed[fqn] for fqn in packed)
    assert before.diff(Snapshot(model), moved=True) == []


def big_halves() -> nn.Module:
    """Three weights that are cast, two of them large enough for a segment of their own in a caching allocator."""
    return nn.Sequential(nn.Embedding(4096, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4096, bias=False)).bfloat16()


@pytest.mark.filterwarnings("ignore:Sequential has neither:UserWarning")
@pytest.mark.parametrize(
    ("precision", "empties", "calls"),
    [("full", True, ["large", "large", "end"]), ("full", False, []), ("none", True, ["end"])],
)
def test_freed_blocks_are_returned_between_large_casts(
    precision: str, empties: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = big_halves()
    found = []

    def emptied() -> None:
        found.append([p.dtype for p in model.parameters()])

    monkeypatch.setattr("kbitwrap.preparation.preparation.empty_cache", emptied)
    KbitPreparedModel(model, precision=precision, empty_cache=empties).prepare()
    half, full = torch.bfloat16, torch.float32
    if calls == ["large", "large", "end"]:
        # The largest are cast first, and each is returned before the next is cast.
        assert found == [[full, half, half, half], [full, half, half, full], [full] * 4]
    else:
        assert len(found) == len(calls)


@pytest.mark.parametrize("offload", [False, True])
def test_options_of_transformers_checkpointing_pass_through_and_are_put_back(offload: bool) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    kwargs = {"use_reentrant": False, "every_n_layers": 2, "offload": offload}
    with KbitPreparedModel(model, gradient_checkpointing_kwargs=kwargs) as prepared:
        layers = list(model.model.layers)
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
        assert (layers[0]._gradient_checkpointing_func.func is checkpoint) is not offload
        assert prepared.manifest().config.gradient_checkpointing_kwargs == kwargs
        with prepared.suspended():
            assert not any(layer.gradient_checkpointing for layer in layers)
        assert [layer.gradient_checkpointing for layer in layers] == [True, False]
        if not offload:  # which pins memory, and so runs on accelerators only
            peft_model = adapt("llama", model)
            loss, gradients = step("llama", peft_model)
            peft_model.unload()
        assert not prepared.verify()
    assert before.diff(Snapshot(model)) == []
    if not offload:
        with KbitPreparedModel(model, gradient_checkpointing=False):
            expected_loss, expected = step("llama", adapt("llama", model))
        assert torch.equal(loss, expected_loss)
        assert all(torch.equal(gradients[fqn], expected[fqn]) for fqn in expected)
