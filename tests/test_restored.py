"""What verify and restore tell: what was trained, what others did, and which adapters are left alone."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref

import peft
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kbitwrap import (
    KbitPreparedModel,
    RestoreError,
    StateError,
    UnsupportedModelError,
    prepared_of,
)
from support import zoo
from support.plain import Shadowed
from support.snapshot import Snapshot
from support.training import adapt, step

pytestmark = [
    pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning"),
]


class TestTrained:
    """A base parameter that the caller unfroze and trained while it was stored in float32."""

    def prepared(self, **fields: object) -> tuple[KbitPreparedModel, nn.Parameter, torch.Tensor]:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full", **fields).prepare()
        weight = model.model.norm.weight
        original = weight.detach().bfloat16()
        weight.requires_grad_(True)
        with torch.no_grad():
            weight.add_(0.01)
        return prepared, weight, original

    def test_keep_rounds(self) -> None:
        prepared, weight, _ = self.prepared()
        trained = weight.detach().clone()
        report = prepared.restore()
        assert report.trained == ("model.norm.weight",)
        assert torch.equal(weight, trained.bfloat16())

    def test_discard_puts_the_bits_back(self) -> None:
        prepared, weight, original = self.prepared(keep_originals=True)
        assert prepared.restore("discard").trained == ("model.norm.weight",)
        assert torch.equal(weight, original)

    def test_the_error_policy_names_all_trained_parameters_and_restores_the_rest(self) -> None:
        prepared, weight, _ = self.prepared()
        trained = weight.detach().clone()
        with pytest.raises(RestoreError, match=r"model\.norm\.weight") as caught:
            prepared.restore("error")
        assert set(caught.value.failures) == {"model.norm.weight"}
        others = {p.dtype for fqn, p in prepared.model.named_parameters() if fqn != "model.norm.weight"}
        assert torch.float32 not in others
        assert torch.equal(weight, trained)
        assert prepared.restore("keep").trained == ("model.norm.weight",)
        assert torch.equal(weight, trained.bfloat16())

    def test_error_without_training_is_a_plain_restore(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="full").prepare()
        assert prepared.restore("error").trained == ()
        assert before.diff(Snapshot(model), moved=True) == []


class TestOthers:
    """What others add or replace is left alone and reported."""

    def test_a_merge(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        peft_model = adapt("llama", model, modules_to_save=True)
        step("llama", peft_model)
        merged = peft_model.merge_and_unload()
        weight = merged.model.layers[0].self_attn.q_proj.weight
        head = merged.lm_head.weight
        report = prepared.restore()
        assert merged.model.layers[0].self_attn.q_proj.weight is weight
        assert "model.layers.0.self_attn.q_proj.weight" in report.replaced
        assert merged.lm_head.weight is head
        assert head.dtype == torch.bfloat16
        assert "lm_head.weight" in report.replaced
        assert report.trained == ("lm_head.weight",)
        assert torch.float32 not in {p.dtype for p in merged.parameters()}
        with torch.no_grad():
            assert not merged(**zoo.inputs("llama", model)).logits.requires_grad

    def test_hooks_and_adapters(self) -> None:
        model = zoo.load("llama")

        def was_there(module: nn.Module, args: object, output: object) -> None: ...

        model.lm_head.register_forward_hook(was_there)
        prepared = KbitPreparedModel(model).prepare()
        peft_model = adapt("llama", model)

        def watch(module: nn.Module, args: object, output: object) -> None: ...

        handle = model.lm_head.register_forward_hook(watch)
        report = prepared.restore()
        assert handle.id in model.lm_head._forward_hooks
        assert [line for line in report.foreign if "hook" in line] == ["lm_head: forward hook watch"]
        adapters = {fqn for fqn, _ in model.named_parameters() if "lora_" in fqn}
        assert adapters
        assert adapters <= set(report.foreign)
        assert sum("lora_" in fqn for fqn, _ in peft_model.named_parameters()) == len(adapters)

    @pytest.mark.parametrize("precision", ["full", "norms"])
    def test_resized_embeddings(self, precision: str) -> None:
        model, size = zoo.load("llama"), zoo.VOCAB_SIZE + 5
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        model.resize_token_embeddings(size, mean_resizing=False)
        embeddings = model.model.embed_tokens._parameters["weight"], model.lm_head._parameters["weight"]
        with prepared.suspended():
            assert all(weight.requires_grad for weight in embeddings)
        assert not any(weight.requires_grad for weight in embeddings)
        report = prepared.restore()
        assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == [(torch.bfloat16, True)] * 2
        assert (model.vocab_size, model.config.vocab_size, model.lm_head.out_features) == (size, size, size)
        assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(report.replaced)
        assert not report.trained
        assert not report.put_back

    @pytest.mark.parametrize("precision", ["full", "compute", "norms"])
    @pytest.mark.parametrize("by", [5, -5])
    def test_embeddings_that_were_resized_and_resized_back_get_dtypes_and_flags(self, by: int, precision: str) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        for size in (zoo.VOCAB_SIZE + by, zoo.VOCAB_SIZE):
            model.resize_token_embeddings(size, mean_resizing=False)
        embeddings = model.model.embed_tokens._parameters["weight"], model.lm_head._parameters["weight"]
        prepared_as = [(weight.dtype, weight.requires_grad) for weight in embeddings]
        with prepared.suspended():
            assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == [(torch.bfloat16, True)] * 2
        assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == prepared_as
        report = prepared.restore()
        assert [(weight.dtype, weight.requires_grad) for weight in embeddings] == [(torch.bfloat16, True)] * 2
        assert "lm_head.weight" in report.replaced

    def test_nothing_is_said_of_what_others_made_trainable(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model).prepare()
        adapt("llama", model)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepared.restore()
            step("llama", model)

    def test_user_settings_from_before_are_settings_after(self) -> None:
        model = zoo.load("llama")
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": True, "preserve_rng_state": False})
        model.model.layers[0].gradient_checkpointing = False
        model.model.norm.weight.requires_grad_(False)
        model.train()
        before = Snapshot(model)
        for kwargs in ({"use_reentrant": False}, {"use_reentrant": True}):
            with KbitPreparedModel(model, precision="full", gradient_checkpointing_kwargs=kwargs) as prepared:
                assert not prepared.verify()
            assert before.diff(Snapshot(model), moved=True) == []


def test_verify_names_what_differs() -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, gradient_checkpointing_kwargs={"use_reentrant": True}).prepare()
    assert not prepared.verify()
    model.model.norm.weight.requires_grad_(True)
    model.model.layers[1].gradient_checkpointing = False
    model.lm_head.weight.data = model.lm_head.weight.data.float()
    shaped = model.model.layers[1].input_layernorm.weight
    shaped.data = shaped.data.view(1, -1)
    del model.model.layers[0].input_layernorm.forward
    model.disable_input_require_grads()
    model.model._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2)
    diff = prepared.verify()
    assert {fqn: set(rows) for fqn, rows in diff.differences.items()} == {
        "model.norm.weight": {"requires_grad"},
        "lm_head.weight": {"dtype"},
        "model.layers.1.input_layernorm.weight": {"shape"},
        "model.embed_tokens.weight": {"value"},
        "model": {"_gradient_checkpointing_func"},
        "model.layers.1": {"gradient_checkpointing"},
        "model.layers.0.input_layernorm": {"forward"},
        "model.embed_tokens": {"input_gradient_hooks"},
    }
    assert "lm_head.weight: dtype: expected torch.bfloat16, found torch.float32" in str(diff)


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
def test_verify_names_a_tensor_below_one_that_only_looks_like_a_wrapper() -> None:
    model = Shadowed()
    with KbitPreparedModel(model, precision="full") as prepared:
        assert not prepared.verify()
        for fqn, linear in (("inner.weight", model.inner), ("inner.base_layer.weight", model.inner.base_layer)):
            weight = linear.weight
            weight.requires_grad_(True)
            assert {name: set(rows) for name, rows in prepared.verify().differences.items()} == {fqn: {"requires_grad"}}
            weight.requires_grad_(False)
            linear.weight = nn.Parameter(weight.detach() * 2, requires_grad=False)
            assert "parameter" in prepared.verify().differences[fqn]
            linear.weight = weight
            assert not prepared.verify()
        report = prepared.restore()
    assert (report.replaced, report.foreign) == ((), ())
    assert {p.dtype for p in model.parameters()} == {torch.float16}


def test_parameter_objects_stay_the_same() -> None:
    model = zoo.load("gemma2")
    ids = {fqn: id(p) for fqn, p in model.named_parameters(remove_duplicate=False)}

    def live() -> dict[str, int]:
        return {fqn: id(p) for fqn, p in model.named_parameters(remove_duplicate=False)}

    with KbitPreparedModel(model, precision="full") as prepared:
        assert live() == ids
        with prepared.suspended():
            assert live() == ids
        assert live() == ids
    assert live() == ids


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
def test_two_models_may_share_a_module_without_parameters() -> None:
    """OpenAI GPT's activation functions are the library's, one for all models."""
    shared = nn.ReLU()
    first, second = (nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), shared) for _ in range(2))
    with KbitPreparedModel(first, precision="full") as prepared:
        assert prepared_of(second) is None
        with KbitPreparedModel(second, precision="full") as other:
            assert prepared_of(second) is other
            assert prepared_of(first) is prepared_of(first[0]) is prepared
            assert prepared_of(nn.Sequential(first)) is prepared
    assert {p.dtype for model in (first, second) for p in model.parameters()} == {torch.bfloat16}


class TestLifetime:
    def test_the_record_lives_as_long_as_the_model(self) -> None:
        model = zoo.load("llama")
        KbitPreparedModel(model).prepare()
        gc.collect()
        assert prepared_of(model) is not None
        assert prepared_of(model).restore().trained == ()  # type: ignore[union-attr]

    def test_a_prepared_model_can_be_collected(self) -> None:
        model = zoo.load("llama")
        KbitPreparedModel(model, precision="full").prepare()
        reference = weakref.ref(model)
        del model
        gc.collect()
        assert reference() is None

    def test_a_deep_copy_is_another_model(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision="full") as prepared:
            other = copy.deepcopy(model)
            assert prepared_of(other) is None
            assert torch.equal(other(**zoo.inputs("llama", other)).loss, model(**zoo.inputs("llama", model)).loss)
        references = weakref.ref(model), weakref.ref(prepared)
        del model, prepared
        gc.collect()
        assert [reference() for reference in references] == [None, None]

    def test_what_a_merge_replaces_is_freed(self) -> None:
        model = zoo.load("llama")
        prepared = KbitPreparedModel(model, precision="full").prepare()
        weight = weakref.ref(model.model.layers[0].self_attn.q_proj.weight)
        peft_model = adapt("llama", model)
        peft_model.merge_and_unload()
        del peft_model
        gc.collect()
        assert weight() is None
        assert "model.layers.0.self_attn.q_proj.weight" in prepared.restore().replaced


class TestAdapted:
    """Norms in float32 only in blocks that hold an adapter."""

    def norms_in_float32(self, model: nn.Module) -> set[str]:
        return {fqn for fqn, module in model.named_modules() if "forward" in vars(module)}

    @pytest.mark.parametrize("given", ["before", "after"])
    def test_only_the_last_layers(self, given: str) -> None:
        model = zoo.load("gpt_oss")
        num_layers = len(model.model.layers)
        config = peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[num_layers - 1], r=2)
        before = Snapshot(model)
        if given == "before":
            peft_model = peft.get_peft_model(model, config)
            prepared = KbitPreparedModel(peft_model, precision="adapted").prepare()
        else:
            prepared = KbitPreparedModel(model, precision="adapted").prepare()
            assert self.norms_in_float32(model) == set()
            peft_model = peft.get_peft_model(model, config)
            prepared.adopt(peft_model)
            prepared.adopt(peft_model)
        half = {f for f, m in model.named_modules() if "norm" in f and m.weight.dtype == torch.bfloat16}
        last = f"model.layers.{num_layers - 1}."
        assert self.norms_in_float32(model) == {fqn for fqn in half if fqn.startswith(last)}
        assert not prepared.verify()
        prepared.restore()
        peft_model.unload()
        # PEFT froze the base before it was prepared, where the PEFT model was made before.
        assert before.diff(Snapshot(model), ignore=(": requires_grad",) if given == "before" else ()) == []

    @pytest.mark.filterwarnings("ignore:.*neither a quantization attribute")
    def test_layer_10_is_not_inside_layer_1(self) -> None:
        blocks = [nn.ModuleDict({"norm": nn.LayerNorm(4), "q_proj": nn.Linear(4, 4)}) for _ in range(11)]
        model = nn.ModuleDict({"layers": nn.ModuleList(blocks)}).bfloat16()
        prepared = KbitPreparedModel(model, precision="adapted").prepare()
        prepared.adopt(peft.get_peft_model(model, peft.LoraConfig(target_modules=["layers.1.q_proj"])))
        assert self.norms_in_float32(model) == {"layers.1.norm"}

    def test_adapters_outside_of_the_model_are_adopted(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama"), precision="adapted").prepare()
        prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        prepared.adopt(peft.get_peft_model(prepared.model, prompts))
        assert not prepared.verify()

    def test_what_is_not_of_the_model_is_refused(self) -> None:
        prepared = KbitPreparedModel(zoo.load("llama"), precision="adapted").prepare()
        with pytest.raises(UnsupportedModelError, match="another"):
            prepared.adopt(adapt("llama", zoo.load("llama")))
        with pytest.raises(UnsupportedModelError, match="no adapter"):
            prepared.adopt(prepared.model)
        prepared.restore()
        with pytest.raises(StateError):
            prepared.adopt(prepared.model)
