"""The drop-in keeps the habits of PEFT's function, and takes everything back."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable
from unittest import mock

import peft
import pytest
import torch
import transformers
from torch import nn

import kbitwrap
from kbitwrap import (
    EditError,
    KbitPreparedModel,
    StateError,
    UnsupportedModelError,
    prepare_model_for_kbit_training,
    prepared_of,
)
from kbitwrap.edits.checkpointing import input_gradient_hooks
from support import zoo
from support.snapshot import Snapshot
from support.training import adapt, is_checkpointing, step

BOTH = pytest.mark.parametrize(
    "prepare", [peft.prepare_model_for_kbit_training, prepare_model_for_kbit_training], ids=["peft", "kbitwrap"]
)

pytestmark = [
    # Said of the unquantized models below; one test asserts it.
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning"),
]


def linears() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    model.is_loaded_in_8bit = True
    return model


class Recorder(nn.Module):
    """A model that records how checkpointing is asked for; stands in for transformers of other versions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.is_loaded_in_4bit = True
        self.calls: list[object] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def enable_input_require_grads(self) -> None:
        self.calls.append("inputs")

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
        self.calls.append(gradient_checkpointing_kwargs)


class OldRecorder(Recorder):
    def gradient_checkpointing_enable(self) -> None:  # type: ignore[override]
        self.calls.append("old")


class BareRecorder(Recorder):
    enable_input_require_grads = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> object:
        if name == "enable_input_require_grads":
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_signature_is_what_trl_reads() -> None:
    function = prepare_model_for_kbit_training
    names = ["model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs", "auto_clear_cache", "precision"]
    parameters = inspect.signature(function).parameters
    assert list(parameters) == names
    assert [p.default for p in parameters.values()] == [inspect.Parameter.empty, True, None, True, "full"]
    assert parameters["precision"].kind is inspect.Parameter.KEYWORD_ONLY
    theirs = inspect.signature(peft.prepare_model_for_kbit_training).parameters
    assert list(theirs) == names[:4]
    # TRL takes local variables for parameters too, so there are none.
    assert set(function.__code__.co_varnames) == set(names)


@BOTH
def test_returns_the_same_object_and_casts(prepare: Callable[..., nn.Module]) -> None:
    model = linears()
    assert prepare(model, use_gradient_checkpointing=False) is model
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.parametrize("precision", [None, "full", "compute"])
def test_an_8_bit_layer_that_keeps_its_weight_in_half_is_cast_too(precision: str | None) -> None:
    """PEFT casts such weights (``llm_int8_has_fp16_weight``), and they are quantized anew in each forward."""
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_has_fp16_weight=True)
    results = []
    for ours in (False, True):
        model = zoo.load("llama", "int8", torch.float16, quantization_config=settings)
        before = Snapshot(model)
        if precision is None or not ours:
            (prepare_model_for_kbit_training if ours else peft.prepare_model_for_kbit_training)(
                model, gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        else:
            KbitPreparedModel(model, precision=precision).prepare()
        dtypes = [p.dtype for fqn, p in model.named_parameters() if "_proj" in fqn]
        assert set(dtypes) == {torch.float32}
        tuned = adapt("llama", model)
        results.append([step("llama", tuned, seed=seed)[0] for seed in range(4)])
        if ours:
            kbitwrap.restore(model)
            tuned.unload()
            assert before.diff(Snapshot(model), moved=True) == []
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))


@BOTH
@pytest.mark.parametrize("clears", [True, False])
def test_empty_cache_is_called_once_or_never(prepare: Callable[..., nn.Module], clears: bool) -> None:
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.empty_cache") as empty_cache,
    ):
        prepare(linears(), use_gradient_checkpointing=False, auto_clear_cache=clears)
        uncast = linears()
        uncast.quantization_method = "gptq"
        prepare(uncast, use_gradient_checkpointing=False, auto_clear_cache=clears)
    assert empty_cache.call_count == int(clears)


@BOTH
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["inputs", {}]),
        ({"use_reentrant": True}, ["inputs", {"use_reentrant": True}]),
        ({"use_reentrant": False}, [{"use_reentrant": False}]),
    ],
)
def test_checkpointing_is_enabled_with_the_given_arguments(
    prepare: Callable[..., nn.Module], given: dict[str, bool] | None, expected: list[object]
) -> None:
    model = Recorder()
    prepare(model, gradient_checkpointing_kwargs=given)
    assert model.calls == expected


@BOTH
def test_kwargs_unknown_to_transformers_are_dropped_with_a_warning(prepare: Callable[..., nn.Module]) -> None:
    with pytest.warns(FutureWarning, match="gradient_checkpointing_kwargs is not supported"):
        prepare(model := OldRecorder(), gradient_checkpointing_kwargs={"use_reentrant": True})
    assert model.calls == ["inputs", "old"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(model := OldRecorder())
    assert model.calls == ["inputs", "old"]


@BOTH
def test_a_model_without_enable_input_require_grads_is_hooked(prepare: Callable[..., nn.Module]) -> None:
    model = BareRecorder()
    prepare(model)
    assert model.embedding(torch.tensor([1])).requires_grad
    model = BareRecorder()
    prepare(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert not model.embedding(torch.tensor([1])).requires_grad


def test_the_fallback_hook_is_taken_back() -> None:
    model = BareRecorder()
    before = Snapshot(model)
    prepare_model_for_kbit_training(model)
    assert len(input_gradient_hooks(model.embedding)) == 1
    kbitwrap.restore(model)
    assert before.diff(Snapshot(model), moved=True, ignore=(": calls",)) == []


@pytest.mark.parametrize("method", ["gptq", "aqlm", "eetq", "torchao", "hqq"])
@BOTH
def test_methods_that_manage_their_own_precision(prepare: Callable[..., nn.Module], method: str) -> None:
    model = Recorder().half()
    model.is_loaded_in_4bit = False
    model.quantization_method = method
    prepare(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model.calls == ["inputs", {}]


def test_a_float32_copy_stays_where_nothing_was_cast() -> None:
    model = Recorder()
    model.linear = nn.Linear(4, 4)
    model.half().is_loaded_in_4bit = False
    model.quantization_method = "gptq"
    prepare_model_for_kbit_training(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["linear"], modules_to_save=["embedding"]))
    trained = adapted.base_model.model.embedding.modules_to_save["default"].float()
    assert kbitwrap.restore(model).trained == ()
    assert trained.weight.dtype == torch.float32


@BOTH
def test_the_hqq_attribute_counts(prepare: Callable[..., nn.Module]) -> None:
    model = Recorder().half()
    model.is_loaded_in_4bit = False
    model.hqq_quantized = True
    prepare(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model.calls == ["inputs", {}]


@BOTH
def test_an_unquantized_model_is_frozen_and_cast_and_not_checkpointed(prepare: Callable[..., nn.Module]) -> None:
    model = prepare(zoo.load("llama", None))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in model.parameters())
    assert not is_checkpointing(model)


@pytest.mark.filterwarnings("default:.*neither a quantization attribute:UserWarning")
def test_an_unquantized_model_warns_at_the_callers_line() -> None:
    with pytest.warns(UserWarning, match="not checkpointed") as caught:
        prepare_model_for_kbit_training(nn.Linear(4, 4))
    assert caught[0].filename == __file__


@BOTH
def test_train_mode_ties_objects_and_use_cache_stay(prepare: Callable[..., nn.Module]) -> None:
    model = zoo.load("gemma2")
    model.train()
    ids = [id(p) for p in model.parameters()]
    prepare(model)
    assert [id(p) for p in model.parameters()] == ids
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(module.training for module in model.modules())
    assert model.config.use_cache is True


@BOTH
def test_adapters_of_a_peft_model_are_frozen_too(prepare: Callable[..., nn.Module]) -> None:
    peft_model = adapt("llama", zoo.load("llama"))
    assert any(p.requires_grad for p in peft_model.parameters())
    assert prepare(peft_model) is peft_model
    assert not any(p.requires_grad for p in peft_model.parameters())


def test_no_hook_is_orphaned() -> None:
    model = zoo.load("bart")
    prepare_model_for_kbit_training(model)
    prepare_model_for_kbit_training(model)
    hooked = [module for module in model.modules() if input_gradient_hooks(module)]
    assert hooked
    assert all(len(input_gradient_hooks(module)) == 1 for module in hooked)
    model.disable_input_require_grads()
    assert not any(input_gradient_hooks(module) for module in model.modules())


def test_pefts_function_leaves_an_orphaned_hook() -> None:
    """What the difference above is measured against."""
    model = zoo.load("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        peft.prepare_model_for_kbit_training(model)
    model.disable_input_require_grads()
    assert any(input_gradient_hooks(module) for module in model.modules())


@pytest.mark.parametrize("precision", ["full", "norms", "none"])
@pytest.mark.parametrize("enabled_before", [False, True])
def test_restore_returns_to_before_the_first_of_several_calls(precision: str, enabled_before: bool) -> None:
    model = zoo.load("llama")
    if enabled_before:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    before = Snapshot(model)
    prepare_model_for_kbit_training(model, precision=precision)
    prepare_model_for_kbit_training(model, True, {"use_reentrant": False})
    peft_model = adapt("llama", model)
    flags = {fqn: p.requires_grad for fqn, p in peft_model.named_parameters()}
    step("llama", peft_model)
    prepare_model_for_kbit_training(peft_model)
    assert not any(p.requires_grad for p in peft_model.parameters())
    wrapper = prepared_of(peft_model)
    assert wrapper is not None
    assert wrapper is prepared_of(model)
    assert not wrapper.verify()
    kbitwrap.restore(peft_model)
    assert {fqn for fqn, p in peft_model.named_parameters() if "lora_" in fqn and p.requires_grad} == {
        fqn for fqn, flag in flags.items() if "lora_" in fqn and flag
    }
    peft_model.unload()
    assert before.diff(Snapshot(model), moved=True) == []
    with pytest.raises(StateError, match="not prepared"):
        kbitwrap.restore(model)


@pytest.mark.parametrize("precision", ["full", "norms"])
def test_a_weight_that_was_replaced_between_two_calls_is_cast_and_gets_its_dtype_back(precision: str) -> None:
    model = prepare_model_for_kbit_training(zoo.load("llama"), precision=precision)
    weight = nn.Parameter(torch.full(model.lm_head.weight.shape, 0.3, dtype=torch.bfloat16))
    model.lm_head.weight = weight
    prepare_model_for_kbit_training(model)
    assert (weight.dtype, weight.requires_grad) == (torch.float32, False)
    assert kbitwrap.restore(model).replaced == ("lm_head.weight",)
    assert model.lm_head.weight is weight
    assert (weight.dtype, weight.requires_grad) == (torch.bfloat16, True)


def test_originals_that_were_kept_are_put_back_after_a_second_call_that_keeps_none() -> None:
    model = zoo.load("llama")
    norm = model.model.norm.weight
    original = norm.detach().clone()
    KbitPreparedModel(model, precision="full", keep_originals=True).prepare()
    kbitwrap.prepare_model_for_kbit_training(model)
    with torch.no_grad():
        norm.add_(0.3)
    kbitwrap.restore(model, "discard")
    assert torch.equal(norm, original)


def test_originals_that_a_second_call_did_not_keep_are_not_asked_for() -> None:
    model = zoo.load("llama")
    KbitPreparedModel(model, precision="norms", keep_originals=True).prepare()
    kbitwrap.prepare_model_for_kbit_training(model)
    with pytest.raises(kbitwrap.ConfigError, match="keep_originals"):
        kbitwrap.restore(model, "discard")
    kbitwrap.restore(model)


@pytest.mark.thorough
def test_a_model_is_looked_up_while_other_threads_prepare_others() -> None:
    model = nn.Linear(2, 2)
    stop = threading.Event()
    failures = []

    def look_up() -> None:
        while not stop.is_set():
            try:
                kbitwrap.prepared_of(model)
            except RuntimeError as error:
                failures.append(error)

    thread = threading.Thread(target=look_up)
    thread.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        others = [KbitPreparedModel(nn.LayerNorm(2).bfloat16(), precision="none").prepare() for _ in range(100)]
    stop.set()
    thread.join()
    assert failures == []
    assert len(others) == 100


def test_it_never_calls_pefts_function() -> None:
    with (
        mock.patch("peft.prepare_model_for_kbit_training") as outer,
        mock.patch("peft.utils.other.prepare_model_for_kbit_training") as inner,
    ):
        prepare_model_for_kbit_training(zoo.load("llama"))
    assert not outer.called
    assert not inner.called


def test_no_deprecation_warning() -> None:
    model = zoo.load("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The gate lets this warning of transformers through for PEFT's sake; here it is an error again.
        prepare_model_for_kbit_training(model)


def test_what_cannot_be_checkpointed_is_refused_before_anything_changes() -> None:
    model = zoo.load("ctrl")
    before = Snapshot(model)
    with pytest.raises(UnsupportedModelError, match="checkpointing"):
        prepare_model_for_kbit_training(model)
    assert before.diff(Snapshot(model)) == []
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def test_a_fault_in_the_second_call_keeps_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.load("llama")
    prepare_model_for_kbit_training(model)
    during = Snapshot(model)
    new = "activation_checkpointing_enable"
    name = new if hasattr(model, new) else "gradient_checkpointing_enable"  # before transformers 5.23
    monkeypatch.setattr(type(model), name, mock.Mock(side_effect=RuntimeError("no")))
    with pytest.raises(EditError, match="no"):
        prepare_model_for_kbit_training(model)
    monkeypatch.undo()
    assert during.diff(Snapshot(model), moved=True, ignore=(": attributes",)) == []
    kbitwrap.restore(model)


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")
@pytest.mark.parametrize("precision", ["full", "compute", "norms", "none"])
@pytest.mark.parametrize("freeze", [True, False])
def test_a_value_that_changed_before_the_second_call_is_named_by_the_restore(precision: str, freeze: bool) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 4)).bfloat16()
    prepared = kbitwrap.KbitPreparedModel(model, precision=precision, freeze=freeze, gradient_checkpointing=False)
    prepared.prepare()
    model[1].weight.data.mul_(1.5)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    report = prepared.restore()
    assert [*report.trained, *report.replaced] == ["1.weight"]
    assert model[1].weight.tolist() == [1.5] * 4


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")
def test_a_value_that_changed_before_the_second_call_is_named_where_its_memory_is_viewed_too() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4)).bfloat16()
    model[1].view = model[1].weight.data  # which has the memory kept
    prepared = kbitwrap.KbitPreparedModel(model, precision="none", gradient_checkpointing=False).prepare()
    model[1].weight.data.mul_(1.5)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert prepared.restore().replaced == ("1.weight",)
