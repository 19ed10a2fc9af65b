"""The precision "compute" gives the numbers of "full" on every architecture, without its storage."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kbitwrap import KbitPreparedModel, build_plan
from kbitwrap.tensors.upcast import UpcastTensor
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once, every_other, few
from support.training import adapt, step

# ----------------------------------------------------------------------------------------------------
# Precision "compute": the numbers of "full" without its storage.
# ----------------------------------------------------------------------------------------------------

MODES = ("plain", "reentrant", "autocast", "modules_to_save", "tokens")


def results(name: str, quant: str, dtype: torch.dtype, precision: str, mode: str) -> list[object]:
    supports = zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    model = zoo.load(name, quant, dtype)
    with KbitPreparedModel(
        model,
        precision=precision,
        gradient_checkpointing=supports,
        gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"},
    ) as prepared:
        assert prepared.plan.added_bytes == sum(
            ref().numel() * 2 for edit in prepared.plan.edits if edit.action == "store" for ref in edit.refs
        )
        tokens = {"trainable_token_indices": [1, 2, 5]} if mode == "tokens" else {}
        peft_model = adapt(name, model, modules_to_save=mode == "modules_to_save", **tokens)
        steps = []
        for seed in (0, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                steps.append(step(name, peft_model, seed=seed))
    return steps


# A token adapter needs token embeddings; these take images, sound or spectrograms.
WITHOUT_TOKENS = ("vit", "clip", "siglip", "convnext", "whisper", "wav2vec2")


# In half under autocast to bfloat16, DeBERTa fills a mask with a number that bfloat16 cannot hold, prepared or not.
WITHOUT_AUTOCAST = ("deberta_v2",)


def is_possible(name: str, mode: str) -> bool:
    if mode == "reentrant":
        return zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    return name not in {"tokens": WITHOUT_TOKENS, "autocast": WITHOUT_AUTOCAST}.get(mode, ())


def compute_cases() -> list[object]:
    """Every architecture in every mode, by default some in one of them; the core in 8 bits, by default two of it.

    The other architectures are not those of the journeys.
    """
    every = [
        (name, "nf4", torch.bfloat16, mode) for name in zoo.ARCHITECTURES for mode in MODES if is_possible(name, mode)
    ]
    chosen = [
        (name, "nf4", torch.bfloat16, mode) for name, mode in zoo.in_turn(MODES, is_possible, zoo.CORE + zoo.ODD[::2])
    ]
    of_8_bits = [
        (name, "int8", torch.float16, "plain") for name in zoo.CORE if "int8" in zoo.ARCHITECTURES[name].quants
    ]
    return few(every + of_8_bits, chosen[::5] + of_8_bits[:1])


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.parametrize(("name", "quant", "dtype", "mode"), compute_cases())
def test_compute_gives_the_numbers_of_full(name: str, quant: str, dtype: torch.dtype, mode: str) -> None:
    full, compute = (results(name, quant, dtype, precision, mode) for precision in ("full", "compute"))
    for (their_loss, their_gradients), (our_loss, our_gradients) in zip(full, compute, strict=True):
        assert torch.equal(their_loss, our_loss)
        assert their_gradients.keys() == our_gradients.keys()
        assert all(torch.equal(their_gradients[fqn], our_gradients[fqn]) for fqn in their_gradients)


def order_of(model: nn.Module) -> list[str]:
    """The names of the parameters in the order in which they are given."""
    names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    return [names[id(as_stored(parameter))] for parameter in model.parameters()]


def as_stored(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter, or the one that it stands for."""
    return parameter.parameter if isinstance(parameter, UpcastTensor) else parameter


def first_dtypes(model: nn.Module) -> dict[str, list[torch.dtype]]:
    """The dtypes of the first parameters, which a module may take for its own, where something of it is in float32."""
    found = {}
    for fqn, module in model.named_modules():
        if len(module._modules) and any(p.dtype == torch.float32 for p in module.parameters()):
            floating = next(p.dtype for p in module.parameters() if p.is_floating_point())
            found[fqn] = [next(module.parameters()).dtype, floating, getattr(module, "dtype", floating)]
    return found


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.parametrize("name", few(zoo.ARCHITECTURES, zoo.CORE[::2]))
def test_a_module_takes_the_dtype_of_full_for_its_own(name: str) -> None:
    """Models cast masks, images and caches to the dtype of their first parameter."""
    dtypes = []
    for precision in ("full", "compute"):
        model = zoo.load(name)
        before = [id(p) for p in model.parameters()]
        with KbitPreparedModel(model, precision=precision, gradient_checkpointing=False):
            dtypes.append(first_dtypes(model))
            assert [id(as_stored(p)) for p in model.parameters()] == before
            assert [id(p) for _, p in model.named_parameters()] == before
            copied = copy.deepcopy(model)
            assert not {id(p) for p in copied.parameters()} & set(before)
            # What pairs the parameters of two models, such as an average over steps, pairs the same ones.
            assert order_of(copied) == order_of(model) == [fqn for fqn, _ in model.named_parameters()]
        assert [id(p) for p in model.parameters()] == before
    assert "" in dtypes[1]
    assert {fqn: dtypes[0][fqn] for fqn in dtypes[1]} == dtypes[1]


class OfItsOwnDtype(nn.Module):
    """A model that casts to the dtype of its first parameter, found in both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(ids)).to(self.dtype) * torch.ones(4, dtype=next(self.parameters()).dtype)


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.parametrize("backend", few(["eager", "aot_eager"], ["eager"]))
def test_a_compiled_model_takes_that_dtype_too(backend: str) -> None:
    model, ids = OfItsOwnDtype().bfloat16(), torch.arange(8)
    with KbitPreparedModel(model, precision="compute", gradient_checkpointing=False):
        torch._dynamo.reset()
        found, expected = torch.compile(model, backend=backend, fullgraph=True)(ids), model(ids)
        assert found.dtype == expected.dtype == torch.float32
        assert torch.equal(found, expected)


class OfSeveralFrames(nn.Module):
    """A model whose weights are read in all ways, each in a frame of its own that the compiler may use again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.up = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.embed.register_forward_hook(lambda module, args, output: output.requires_grad_(True))

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        rows = self.embed(ids)
        torch._dynamo.graph_break()
        raised = self.up(rows.to(self.up.weight.dtype))
        torch._dynamo.graph_break()
        cast = torch.ones(4, dtype=next(self.parameters()).dtype)
        torch._dynamo.graph_break()
        return [rows, raised, cast, F.linear(raised, self.head.weight), self.head.weight[2:4]]


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize("backend", few(["eager", "aot_eager"], []))
def test_what_another_model_of_the_class_was_compiled_to_is_not_used(backend: str) -> None:
    torch._dynamo.reset()
    ids = torch.arange(8)
    half = OfSeveralFrames().bfloat16().requires_grad_(False)
    run = torch.compile(half, backend=backend)
    assert {one.dtype for one in run(ids)} == {torch.bfloat16}
    model = OfSeveralFrames().bfloat16()
    for compiled in (torch.compile(model, backend=backend), torch.compile(half, backend=backend)):
        with KbitPreparedModel(compiled._orig_mod, precision="compute", gradient_checkpointing=False) as prepared:
            for found, expected in zip(compiled(ids), compiled._orig_mod(ids), strict=True):
                assert found.dtype == torch.float32
                assert torch.equal(found, expected)
            with prepared.suspended():
                assert {one.dtype for one in compiled(ids)} == {torch.bfloat16}
            assert {one.dtype for one in compiled(ids)} == {torch.float32}
    assert {one.dtype for one in run(ids)} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
def test_the_parameters_are_those_that_are_there() -> None:
    model = OfItsOwnDtype().bfloat16()
    with KbitPreparedModel(model, precision="compute", gradient_checkpointing=False):
        assert order_of(model) == ["embed.weight", "norm.weight", "norm.bias"]
        assert next(model.parameters()) is model.embed.weight
        model.norm.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        assert order_of(model) == ["embed.weight", "norm.weight", "norm.bias"]
        assert list(model.parameters(recurse=False)) == []
        assert order_of(pickle.loads(pickle.dumps(model))) == order_of(model)
        model.embed.weight = None
        assert order_of(model) == ["norm.weight", "norm.bias"]


def test_a_copy_to_train_of_such_a_module_is_left_with_nothing() -> None:
    def readers() -> list[str]:
        return [fqn for fqn, module in model.named_modules() if "parameters" in vars(module)]

    model = zoo.load("bert")
    with KbitPreparedModel(model, precision="compute") as prepared:
        before = readers()
        assert "bert.embeddings" in before
        tuned = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=["embeddings"]))
        with_copy = readers()
        assert "bert.embeddings.modules_to_save.default" in with_copy
        assert len(with_copy) == len(before) + 1
        with prepared.suspended():
            assert readers() == []
        assert readers() == with_copy
        _, gradients = step("bert", tuned)
        assert any("modules_to_save" in fqn and gradient.any() for fqn, gradient in gradients.items())
    assert readers() == []


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_prefix_tuning_gives_the_numbers_of_full(name: str) -> None:
    """PEFT casts the prefix to the model's dtype."""
    steps = []
    for precision in ("full", "compute"):
        model = zoo.load(name)
        with KbitPreparedModel(model, precision=precision, gradient_checkpointing=False):
            torch.manual_seed(0)
            tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
            steps.append(step(name, tuned.train()))
    (their_loss, their_gradients), (our_loss, our_gradients) = steps
    assert torch.equal(their_loss, our_loss)
    assert any(gradient.any() for gradient in our_gradients.values())
    assert all(torch.equal(their_gradients[fqn], our_gradients[fqn]) for fqn in their_gradients)


@pytest.mark.parametrize("name", ["llama", "gemma2", "falcon", "mixtral"])
def test_what_compute_stores_in_float32_is_named_with_its_reason(name: str) -> None:
    prepared = KbitPreparedModel(zoo.load(name), precision="compute")
    stored = {fqn: edit.reason for edit in prepared.plan.edits if edit.action == "store" for fqn in edit.fqns}
    upcast = {fqn for edit in prepared.plan.edits if edit.action == "upcast" for fqn in edit.fqns}
    assert all(stored.values())
    half = {fqn for fqn, p in prepared.model.named_parameters() if p.dtype == torch.bfloat16}
    assert stored.keys() | upcast == half
    assert any("embed" in fqn for fqn in upcast)


def test_what_cannot_have_a_stand_in_is_stored_in_float32() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    vars(model[1])["__deepcopy__"] = lambda memo: model[1]
    plan = build_plan(model, precision="compute", gradient_checkpointing=False)
    stored = {fqn: edit.reason for edit in plan.edits if edit.action == "store" for fqn in edit.fqns}
    assert "writes to it" in stored["0.weight"]  # an embedding that renormalizes the rows that it looks up
    assert "does not compute with the parameter itself" in stored["1.weight"]
    assert "2.weight" not in stored


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compute_is_taken_back(name: str) -> None:
    model = zoo.load(name)
    before = Snapshot(model)
    with KbitPreparedModel(model, precision="compute") as prepared:
        assert model.lm_head.weight.dtype == torch.float32
        during = Snapshot(model)
        with prepared.suspended():
            assert model.lm_head.weight.dtype == torch.bfloat16
            assert isinstance(model.lm_head.weight, nn.Parameter)
        assert during.diff(Snapshot(model), moved=True, ignore=(": attributes",)) == []
        assert not prepared.verify()
    assert before.diff(Snapshot(model), moved=True) == []


# Fused experts, a head and a tied head, each adapted as a parameter: PEFT parametrizes it for the length of a forward.
AS_PARAMETERS = {
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "gpt_oss": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "llama": ["lm_head.weight"],
    "gemma2": ["lm_head.weight"],
}


@pytest.mark.parametrize(("name", "mode"), each_once(list(AS_PARAMETERS), ["plain", "reentrant", "autocast"]))
def test_lora_on_a_parameter_gives_the_numbers_of_full(name: str, mode: str) -> None:
    steps = []
    for precision in ("full", "compute"):
        model = zoo.load(name)
        before = Snapshot(model)
        kwargs = {"use_reentrant": mode == "reentrant"}
        prepared = KbitPreparedModel(model, precision=precision, gradient_checkpointing_kwargs=kwargs).prepare()
        peft_model = adapt(name, model, target_parameters=AS_PARAMETERS[name])
        for seed in (0, 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                steps.append(step(name, peft_model, seed=seed))
        prepared.restore()
        peft_model.unload()
        # PEFT registers the parameter behind the others of its module.
        assert before.diff(Snapshot(model), moved=True, ignore=(": parameters",)) == []
    for (their_loss, their_gradients), (our_loss, our_gradients) in zip(steps[:2], steps[2:], strict=True):
        assert torch.equal(their_loss, our_loss)
        assert their_gradients.keys() == our_gradients.keys()
        assert all(torch.equal(their_gradients[fqn], our_gradients[fqn]) for fqn in their_gradients)
        assert any("lora" in fqn and gradient.any() for fqn, gradient in our_gradients.items())


@pytest.mark.parametrize("name", every_other(AS_PARAMETERS))
def test_lora_on_a_parameter_is_merged_as_in_full(name: str) -> None:
    losses, bases = [], []
    for precision in ("full", "compute"):
        model = zoo.load(name)
        prepared = KbitPreparedModel(model, precision=precision).prepare()
        peft_model = adapt(name, model, target_modules=[], target_parameters=AS_PARAMETERS[name])
        step(name, peft_model)
        peft_model.merge_adapter()
        losses.append(model(**zoo.inputs(name, model)).loss)
        peft_model.unmerge_adapter()
        prepared.restore()
        bases.append(peft_model.unload().state_dict())
    assert torch.equal(*losses)
    assert all(torch.equal(bases[0][fqn], bases[1][fqn]) for fqn in bases[0])


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
@pytest.mark.thorough
def test_the_whole_model_is_compiled_in_one_graph() -> None:
    steps = []
    for precision in ("full", "compute"):
        model = zoo.load("gemma2", num_hidden_layers=1)
        KbitPreparedModel(model, precision=precision, gradient_checkpointing=False).prepare()
        peft_model: Any = adapt("gemma2", model)
        if precision == "compute":
            torch._dynamo.reset()
            peft_model = torch.compile(peft_model, backend="eager", fullgraph=True)
        loss, gradients = step("gemma2", peft_model)
        steps.append((loss, {fqn.removeprefix("_orig_mod."): gradient for fqn, gradient in gradients.items()}))
    (their_loss, theirs), (our_loss, ours) = steps
    assert torch.equal(their_loss, our_loss)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[fqn], ours[fqn]) for fqn in theirs)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_run_in_inference_mode(name: str) -> None:
    model = zoo.load(name)
    outputs = []
    for precision in ("full", "compute"):
        with KbitPreparedModel(model, precision=precision), torch.inference_mode():
            outputs.append(model(**zoo.inputs(name, model)).logits.clone())
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", AS_PARAMETERS)
def test_verify_ignores_a_lora_on_an_upcast_parameter(name: str) -> None:
    model = zoo.load(name)
    with KbitPreparedModel(model, precision="compute") as prepared:
        peft_model = adapt(name, model, target_parameters=AS_PARAMETERS[name])
        step(name, peft_model)
        assert not prepared.verify()
