"""What others register, cast, tie or resize while a model is prepared with "compute"."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize

from kbitwrap import KbitPreparedModel
from kbitwrap.tensors.upcast import UpcastTensor
from support import zoo
from support.snapshot import Snapshot
from support.training import adapt


class TestRegisteredAnew:
    """What others do with a model's weights by assigning them, while stand-ins stand for them."""

    def test_tying_again_changes_nothing(self) -> None:
        model = zoo.load("gemma2").requires_grad_(False)  # a trainable weight would not be followed
        before = Snapshot(model)
        prepared = KbitPreparedModel(model, precision="compute").prepare()
        batch = zoo.inputs("gemma2", model)
        loss = model(**batch).loss
        during = Snapshot(model)
        model.tie_weights()
        assert model.lm_head._parameters["weight"] is model.model.embed_tokens._parameters["weight"]
        assert isinstance(model.lm_head.weight, UpcastTensor)
        assert torch.equal(model(**batch).loss, loss)
        ours = (": attributes", ": __deepcopy__", ": __getstate__", ": _apply")
        assert during.diff(Snapshot(model), ignore=ours) == []
        assert not prepared.verify()
        with prepared.suspended():
            model.tie_weights()
            assert type(model.lm_head.weight) is nn.Parameter
        assert isinstance(model.lm_head.weight, UpcastTensor)
        prepared.restore()
        assert before.diff(Snapshot(model), moved=True) == []

    @pytest.mark.parametrize("precision", ["full", "compute"])
    def test_untied_weights_can_be_tied_while_prepared(self, precision: str) -> None:
        model = zoo.load("llama")
        original = model.model.embed_tokens.weight
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        model.lm_head.weight = model.model.embed_tokens.weight
        # A module that the model does not know, as resizing makes one.
        head = nn.Linear(*original.shape[::-1], bias=False)
        head.weight = model.lm_head.weight
        batch = zoo.inputs("llama", model)
        hidden = model(**batch, output_hidden_states=True).hidden_states[-1]
        expected = F.linear(hidden, original.float())
        assert torch.equal(model(**batch).logits, expected)
        assert torch.equal(head(hidden), expected)
        assert model.lm_head.state_dict(keep_vars=True)["weight"] is original
        prepared.restore()
        for module in (model.lm_head, head):
            assert module.weight is original
            assert not {"weight", "__deepcopy__", "__getstate__", "_apply"} & vars(module).keys()
        assert original.dtype == torch.bfloat16

    def test_assigning_it_to_its_own_place(self) -> None:
        model = zoo.load("llama")
        before = Snapshot(model)
        with KbitPreparedModel(model, precision="compute"):
            model.lm_head.weight = model.lm_head.weight
            assert isinstance(model.lm_head.weight, UpcastTensor)
        assert before.diff(Snapshot(model), moved=True) == []

    def test_a_trainable_weight_in_its_place_is_used_itself(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision="compute"):
            weight = nn.Parameter(torch.zeros_like(model.lm_head._parameters["weight"]))
            model.lm_head.weight = weight
            assert model.lm_head.weight is weight
            assert weight.dtype == torch.bfloat16

    def test_a_parameter_made_from_a_slice_is_stored_in_float32(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision="compute"):
            small = nn.Linear(64, 8, bias=False)
            small.weight = nn.Parameter(model.lm_head.weight[:8], requires_grad=False)
            assert type(small.weight) is nn.Parameter
            assert torch.equal(small.weight, model.lm_head._parameters["weight"][:8].float())

    def test_a_stand_in_kept_after_restore_is_not_a_parameter(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision="compute"):
            kept = model.lm_head.weight
        with pytest.raises(TypeError, match="cannot assign"):
            model.lm_head.weight = kept

    def test_a_stand_in_passes_for_a_parameter(self) -> None:
        model = zoo.load("llama")
        with KbitPreparedModel(model, precision="compute"):
            assert model.get_parameter("lm_head.weight") is model.lm_head.weight
            assert isinstance(model.lm_head.weight, nn.Parameter)
            assert not isinstance(model.lm_head.weight[:2], nn.Parameter)

    @pytest.mark.parametrize("assign", [False, True])
    def test_loading_a_state_dict(self, assign: bool) -> None:
        model, other = zoo.load("llama"), zoo.load("llama")
        other.lm_head.weight.data.mul_(2)
        state = {name: value.clone() for name, value in other.lm_head.state_dict().items()}
        batch = zoo.inputs("llama", model)
        for each in (model, other):
            KbitPreparedModel(each, precision="compute").prepare()
        model.lm_head.load_state_dict(state, assign=assign)
        assert isinstance(model.lm_head.weight, UpcastTensor)
        assert model.lm_head._parameters["weight"].dtype == torch.bfloat16
        assert torch.equal(model(**batch).loss, other(**batch).loss)

    @pytest.mark.parametrize("leave_parametrized", [False, True])
    @pytest.mark.parametrize("has_inverse", [False, True])
    def test_a_parametrization_that_comes_and_goes(self, has_inverse: bool, leave_parametrized: bool) -> None:
        class Negated(nn.Module):
            def forward(self, weight: torch.Tensor) -> torch.Tensor:
                return -weight

        if has_inverse:
            Negated.right_inverse = Negated.forward  # type: ignore[attr-defined]
        losses, weights = [], []
        for precision in ("full", "compute"):
            model = zoo.load("llama")
            batch = zoo.inputs("llama", model)
            with KbitPreparedModel(model, precision=precision) as prepared:
                parametrize.register_parametrization(model.lm_head, "weight", Negated())
                losses.append(model(**batch).loss)
                with prepared.suspended():
                    pass
                losses.append(model(**batch).loss)
                parametrize.remove_parametrizations(model.lm_head, "weight", leave_parametrized=leave_parametrized)
                losses.append(model(**batch).loss)
            assert not {"weight", "__deepcopy__", "__getstate__", "_apply"} & vars(model.lm_head).keys()
            weights.append(model.lm_head.weight)
        assert all(torch.equal(a, b) for a, b in zip(losses[:3], losses[3:], strict=True))
        assert weights[1].dtype == torch.bfloat16
        assert torch.equal(*weights)

    def test_a_parametrization_that_stays_gets_the_half_weight_back(self) -> None:
        model = zoo.load("llama")
        original = model.lm_head.weight
        with KbitPreparedModel(model, precision="compute"):
            parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
            assert isinstance(model.lm_head.parametrizations.weight.original, UpcastTensor)
        assert model.lm_head.parametrizations.weight.original is original
        parametrize.remove_parametrizations(model.lm_head, "weight", leave_parametrized=False)
        assert model.lm_head.weight is original

    def test_parameter_hooks_are_removed_with_the_last_preparation(self) -> None:
        gc.collect()  # what other tests left prepared
        hooks = torch_module._global_parameter_registration_hooks
        model = zoo.load("mixtral")
        KbitPreparedModel(model, precision="compute").prepare().restore()
        assert not hooks
        with KbitPreparedModel(model, precision="compute") as prepared:
            assert hooks
            with prepared.suspended():
                assert not hooks
            assert hooks
        assert not hooks

    def test_a_model_that_is_dropped_takes_no_hook_away_while_another_is_made(self) -> None:
        """Torch steps through its hooks, and a garbage collection may come in any of them."""
        hooks = torch_module._global_parameter_registration_hooks

        def collect(*_: object) -> None:
            gc.collect()

        model = zoo.load("mixtral")
        collecting = torch_module.register_module_parameter_registration_hook(collect)
        try:
            KbitPreparedModel(model, precision="compute").prepare()
            del model
            nn.Linear(2, 2)
        finally:
            collecting.remove()
        assert hooks
        with KbitPreparedModel(zoo.load("llama"), precision="compute"):
            pass
        assert not hooks


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
class TestTheWholeModel:
    """A prepared model in the hands of torch."""

    def prepare(self, name: str) -> tuple[nn.Module, dict[str, torch.Tensor], torch.Tensor]:
        model = zoo.load(name)
        KbitPreparedModel(model, precision="compute", gradient_checkpointing=False).prepare()
        batch = zoo.inputs(name, model)
        return model, batch, model(**batch).loss

    def test_a_copy_computes_the_same_from_float32(self, name: str) -> None:
        model, batch, loss = self.prepare(name)
        twin = copy.deepcopy(model)
        assert not any(isinstance(value, UpcastTensor) for module in twin.modules() for value in vars(module).values())
        assert not {p.dtype for p in twin.parameters()} & {torch.bfloat16, torch.float16}
        is_tied = model.lm_head._parameters["weight"] is model.get_input_embeddings()._parameters["weight"]
        assert (twin.lm_head.weight is twin.get_input_embeddings().weight) == is_tied
        assert torch.equal(twin(**batch).loss, loss)
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
        assert not torch.equal(twin(**batch).loss, loss)
        assert torch.equal(model(**batch).loss, loss)

    def test_a_pickle_computes_the_same_from_half(self, name: str) -> None:
        model, batch, loss = self.prepare(name)
        file = io.BytesIO()
        torch.save(model.lm_head, file)
        file.seek(0)
        model.lm_head = torch.load(file, weights_only=False)
        assert model.lm_head._parameters["weight"].dtype == torch.bfloat16
        assert torch.equal(model(**batch).loss, loss)

    def test_functional_call(self, name: str) -> None:
        model, batch, loss = self.prepare(name)
        parameters = {
            fqn: p.detach().clone() if p.dtype == torch.bfloat16 else p for fqn, p in model.named_parameters()
        }
        assert torch.equal(functional_call(model, parameters, (), dict(batch)).loss, loss)

    def test_state_dict_is_of_what_is_stored(self, name: str) -> None:
        original = {fqn: value.clone() for fqn, value in zoo.load(name).state_dict().items()}
        state = self.prepare(name)[0].state_dict()
        assert state.keys() == original.keys()
        for fqn in ("lm_head.weight", "model.embed_tokens.weight"):
            assert not isinstance(state[fqn], UpcastTensor)
            assert state[fqn].dtype == torch.bfloat16
            assert torch.equal(state[fqn], original[fqn])


@pytest.mark.parametrize("how", [nn.Module.float, nn.Module.bfloat16])
def test_a_head_that_was_cast_is_cast_back(how: Callable[[nn.Module], nn.Module]) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    with KbitPreparedModel(model, precision="compute"):
        loss = model(**zoo.inputs("llama", model)).loss
        how(model.lm_head)
        assert torch.equal(model(**zoo.inputs("llama", model)).loss, loss)
    assert before.diff(Snapshot(model), moved=True) == []


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "opt", "tied outside"])
def test_a_part_whose_weight_is_tied_to_a_module_outside_computes_as_under_full(name: str) -> None:
    losses = []
    for precision in ("full", "compute"):
        model = zoo.load("llama" if name == "tied outside" else name)
        if name == "tied outside":
            model.lm_head.weight = model.model.embed_tokens.weight
        before = Snapshot(model)
        with KbitPreparedModel(model.model, precision=precision, gradient_checkpointing=False) as prepared:
            batch = zoo.inputs("llama" if name == "tied outside" else name, model)
            losses.append(model(**batch).loss)
            with prepared.suspended():
                assert before.diff(Snapshot(model), moved=True) == []
            losses.append(model(**batch).loss)
        assert before.diff(Snapshot(model), moved=True) == []
        stored = [fqn for edit in prepared.plan.edits if edit.action == "store" for fqn in edit.fqns]
        assert any("embed_tokens" in fqn for fqn in stored) == (precision == "full")
    assert all(torch.equal(loss, losses[0]) for loss in losses)


@pytest.mark.filterwarnings("ignore:.*multivariate normal distribution")
def test_tied_embeddings_resized_to_the_mean_are_those_of_full() -> None:
    losses = []
    for precision in ("full", "compute"):
        model = zoo.load("gemma2")
        with KbitPreparedModel(model, precision=precision):
            torch.manual_seed(0)
            model.resize_token_embeddings(model.config.vocab_size + 64)
            losses.append(model(**zoo.inputs("gemma2", model)).loss)
            assert model.lm_head.weight.shape == model.get_input_embeddings().weight.shape
            assert model.lm_head._parameters["weight"] is model.get_input_embeddings()._parameters["weight"]
        assert model.lm_head.weight is model.get_input_embeddings().weight
        assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(*losses)


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_embeddings_can_be_resized_while_prepared(precision: str) -> None:
    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    size = model.config.vocab_size + 64
    torch.manual_seed(0)
    model.resize_token_embeddings(size, mean_resizing=False)
    assert model.get_input_embeddings().weight.shape[0] == size
    assert torch.isfinite(model(**zoo.inputs("llama", model)).loss)
    prepared.restore()
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.bfloat16}
    assert model.lm_head.weight.shape[0] == size


@pytest.mark.parametrize("precision", ["full", "compute"])
def test_merging_into_the_head_and_back_leaves_the_base(precision: str) -> None:
    model = zoo.load("llama")
    original = model.lm_head.weight.detach().clone()
    prepared = KbitPreparedModel(model, precision=precision).prepare()
    peft_model = adapt("llama", model, target_modules=["lm_head"])
    peft_model.merge_adapter()
    peft_model.unmerge_adapter()
    prepared.restore()
    assert torch.equal(peft_model.unload().lm_head.weight, original)


def test_a_head_that_was_cast_to_another_half_dtype_is_cast_back_and_named() -> None:
    model = zoo.load("llama")
    original = model.lm_head.weight
    loaded, expected = original.detach().clone(), original.half().bfloat16()
    with KbitPreparedModel(model, precision="compute") as prepared:
        model.lm_head.half()
        with prepared.suspended():
            assert model.lm_head.weight.dtype == torch.bfloat16
        assert original.dtype == torch.float16
        report = prepared.restore()
    assert not torch.equal(loaded, expected)  # float16 has no room for the smallest values
    assert (report.trained, report.replaced) == ((), ("lm_head.weight",))
    assert model.lm_head.weight is original
    assert torch.equal(original, expected)
