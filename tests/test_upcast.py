"""A weight that is upcast as it is used: the same bits as one stored in float32, and no float32 copy kept."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zoo
from kbitwrap import KbitPreparedModel
from kbitwrap.upcast import Float32Copy, UpcastTensor
from snapshot import Snapshot
from training import adapt, step

pytestmark = pytest.mark.filterwarnings("ignore:restore.. made:UserWarning")

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def pair(module: nn.Module, chunk_bytes: int | None = None) -> tuple[nn.Module, nn.Module]:
    """A frozen half module whose weight is stood in for, and its twin stored in float32."""
    module.requires_grad_(False)
    twin = copy.deepcopy(module).float()
    if getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.float()  # stored in float32 under "compute"
    vars(module)["weight"] = UpcastTensor(module._parameters["weight"], (module, "weight"), chunk_bytes)
    vars(module)["__deepcopy__"] = Float32Copy(module)
    return module, twin


def run(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradient to the input where there is one."""
    x = x.detach().requires_grad_(x.is_floating_point())
    y = function(x)
    if y.requires_grad:
        y.float().square().sum().backward()
    return [y.detach(), *([x.grad] if x.grad is not None else [])]


def assert_same(half: nn.Module, full: nn.Module, x: torch.Tensor, wrap: Callable[..., object] | None = None) -> None:
    results = [run((lambda x, m=m: wrap(m, x)) if wrap else m, x) for m in (half, full)]
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


class TiedRows(nn.Embedding):
    """An embedding whose forward scales, as Gemma's does: in the dtype that its weight says it has."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * torch.tensor(37.7).to(self.weight.dtype)


class Transposed(nn.Linear):
    """A linear layer that multiplies by the transpose, as Falcon's does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


@DTYPES
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64)], ids=str)
@pytest.mark.parametrize("make", [nn.Linear, Transposed])
def test_a_linear_layer(make: type[nn.Linear], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    half, full = pair(make(64, 200, dtype=dtype))
    assert_same(half, full, torch.randn(shape))


@DTYPES
@pytest.mark.parametrize("make", [nn.Embedding, TiedRows])
def test_an_embedding(make: type[nn.Embedding], dtype: torch.dtype) -> None:
    half, full = pair(make(50, 16, padding_idx=3, dtype=dtype))
    assert_same(half, full, torch.randint(0, 50, (2, 9)))


@DTYPES
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast(dtype: torch.dtype, to: torch.dtype) -> None:
    half, full = pair(nn.Linear(64, 200, dtype=dtype))

    def autocast(module: nn.Module, x: torch.Tensor) -> object:
        with torch.autocast("cpu", to):
            return module(x)

    assert_same(half, full, torch.randn(4, 64), autocast)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing(use_reentrant: bool) -> None:
    half, full = pair(nn.Linear(64, 200, dtype=torch.bfloat16))
    assert_same(half, full, torch.randn(4, 64), lambda m, x: checkpoint(m, x, use_reentrant=use_reentrant))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("make", [nn.Linear, nn.Embedding])
def test_compiled_in_one_graph(make: Callable[..., nn.Module], backend: str) -> None:
    half, full = pair(make(64, 200, dtype=torch.bfloat16))
    x = torch.randn(4, 64) if make is nn.Linear else torch.randint(0, 64, (4, 9))
    torch._dynamo.reset()
    assert_same(torch.compile(half, backend=backend, fullgraph=True), full, x)


@DTYPES
def test_experts(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 32, 16, dtype=dtype)
    upcast, full = UpcastTensor(weight), weight.float()
    x = torch.randn(4, 5, 16)
    for function in (
        lambda x, w: torch.bmm(x, w.transpose(1, 2)),
        lambda x, w: torch.einsum("etk,enk->etn", x, w),
        lambda x, w: torch.stack([F.linear(x[i], w[i]) for i in range(4)]),
        lambda x, w: torch.stack([a @ b.t() for a, b in zip(x, w.unbind(), strict=True)]),
        lambda x, w: x @ w[torch.tensor([0, 1, 2, 3])].mT,
    ):
        ours, theirs = (run(lambda x, w=w, f=function: f(x, w), x) for w in (upcast, full))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_in_pieces_every_piece_is_a_whole_number_of_columns() -> None:
    half, full = pair(nn.Linear(64, 200, bias=True, dtype=torch.bfloat16), chunk_bytes=64 * 4 * 48)
    half._parameters["bias"].data.add_(0)  # a bias is sliced with the columns
    ours, theirs = (run(m, torch.randn(3, 64, generator=torch.Generator().manual_seed(0))) for m in (half, full))
    # Another blocking of the same sums: equal up to the rounding of one sum over 64 (or 200) float32 terms.
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=200 * 2**-23, atol=200 * 2**-23 * b.abs().max().item())


@pytest.mark.parametrize("chunk_bytes", [None, 64 * 4 * 10])
def test_how_much_is_alive_at_once(chunk_bytes: int | None) -> None:
    half, _ = pair(nn.Linear(64, 2000, bias=False, dtype=torch.bfloat16), chunk_bytes)
    x = torch.randn(1, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(half, x)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    # Without pieces the weight itself; with them nothing larger than the logits.
    assert largest == (64 * 2000 * 4 if chunk_bytes is None else 2000 * 4)


def test_no_float32_copy_lives_between_forward_and_backward() -> None:
    half, full = pair(nn.Linear(64, 300, bias=False, dtype=torch.bfloat16))

    def alive() -> int:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype == torch.float32]
        return sum(t.numel() == 64 * 300 for t in tensors)

    x = torch.randn(2, 64, requires_grad=True)
    before = alive()
    y = half(x)
    saved = y.grad_fn.next_functions[0][0] if y.grad_fn.name() != "MmBackward0" else y.grad_fn
    assert isinstance(saved._saved_mat2, UpcastTensor)
    assert alive() == before
    assert not isinstance(full(x).grad_fn._saved_mat2, UpcastTensor)


class TestAsAnAttribute:
    def linear(self) -> nn.Linear:
        return pair(nn.Linear(8, 4, bias=False, dtype=torch.bfloat16))[0]  # type: ignore[return-value]

    def test_it_says_float32_and_the_parameter_is_half(self) -> None:
        linear = self.linear()
        assert linear.weight.dtype == torch.float32
        assert linear.weight.shape == (4, 8)
        assert [p.dtype for p in linear.parameters()] == [torch.bfloat16]
        assert linear.state_dict()["weight"].dtype == torch.bfloat16
        assert "stored=torch.bfloat16" in repr(linear.weight)

    def test_writing_to_it_writes_to_the_parameter(self) -> None:
        linear = self.linear()
        parameter = linear._parameters["weight"]
        linear.weight.data.fill_(2)
        assert parameter.eq(2).all()
        assert parameter.dtype == torch.float32
        with torch.no_grad():
            linear.weight[1] = 3
            linear.weight.mul_(2)
        assert linear._parameters["weight"][1].eq(6).all()
        linear.weight.data = torch.ones(5, 8)
        assert linear._parameters["weight"].shape == (5, 8)
        assert linear.weight.shape == (5, 8)
        assert linear(torch.ones(1, 8)).tolist() == [[8.0] * 5]

    def test_a_new_parameter_takes_its_place(self) -> None:
        linear = self.linear()
        linear.weight = nn.Parameter(torch.ones(4, 8))
        assert isinstance(linear.weight, nn.Parameter)

    def test_functional_call_swaps_what_is_used(self) -> None:
        linear, x = self.linear(), torch.randn(2, 8)
        other = torch.randn(4, 8).bfloat16()
        assert torch.equal(functional_call(linear, {"weight": other}, (x,)), F.linear(x, other.float()))

    def test_a_copy_stores_float32_and_is_trained(self) -> None:
        linear = self.linear()
        twin = copy.deepcopy(linear)
        assert twin.weight.dtype == torch.float32
        assert isinstance(twin.weight, nn.Parameter)
        assert torch.equal(twin.weight, linear.weight.float())
        assert not {"weight", "__deepcopy__"} & vars(twin).keys()
        twin.requires_grad_(True)
        twin(torch.randn(2, 8)).sum().backward()
        assert twin.weight.grad is not None

    def test_copies_of_tied_modules_are_tied(self) -> None:
        model = nn.ModuleDict({"a": nn.Embedding(4, 8), "b": nn.Linear(8, 4, bias=False)}).bfloat16()
        model["b"].weight = model["a"].weight
        pair(model["a"])
        pair(model["b"])
        twin = copy.deepcopy(model)
        assert twin["a"].weight is twin["b"].weight
        assert twin["a"].weight.dtype == torch.float32

    def test_pickling_keeps_half_and_the_stand_in(self) -> None:
        linear, x = self.linear(), torch.randn(2, 8)
        twin = pickle.loads(pickle.dumps(linear))
        assert [p.dtype for p in twin.parameters()] == [torch.bfloat16]
        assert isinstance(twin.weight, UpcastTensor)
        assert torch.equal(twin(x), linear(x))
        twin.weight.data.zero_()
        assert twin(x).eq(0).all()
        assert linear(x).ne(0).any()

    def test_training_it_is_refused_aloud(self) -> None:
        linear = self.linear()
        linear.requires_grad_(True)
        with pytest.raises(RuntimeError, match="modules_to_save"):
            linear(torch.randn(2, 8))
        with torch.no_grad():
            linear(torch.randn(2, 8))

    def test_making_the_stand_in_trainable_is_refused(self) -> None:
        linear = self.linear()
        with pytest.raises(RuntimeError, match="modules_to_save"):
            linear.weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match="modules_to_save"):
            linear.weight.requires_grad = True
        assert linear.weight.requires_grad is False

    @pytest.mark.parametrize(
        "write",
        [
            lambda w: w.data.add_(0.001),
            lambda w: w.diagonal().fill_(0.1),
            lambda w: w.squeeze().fill_(0.1),
            lambda w: w.data.__setitem__(torch.tensor([0, 2]), torch.full((2, 8), 1 / 3)),
            lambda w: w.data.index_copy_(0, torch.tensor([1]), torch.full((1, 8), 1 / 3)),
            lambda w: w.t()[2:4].mul_(1.001),
            lambda w: torch.add(torch.full((4, 8), 1 / 3), 1, out=w),
            lambda w: torch._foreach_mul_([w], 1.001),
            lambda w: setattr(w, "data", w.data + 0.001),
        ],
    )
    def test_whatever_is_written_is_what_float32_storage_gets(self, write: Callable[[torch.Tensor], object]) -> None:
        linear = self.linear()
        full = linear.weight.detach().float().clone()
        with torch.no_grad():
            write(full)
            write(linear.weight)
        assert linear._parameters["weight"].dtype == torch.float32
        assert torch.equal(linear._parameters["weight"], full)
        assert torch.equal(linear.weight.float(), full)

    def test_in_inference_mode(self) -> None:
        linear, x = self.linear(), torch.randn(2, 8)
        expected = linear(x)
        with torch.inference_mode():
            assert torch.equal(linear(x), expected)
            assert torch.equal(x @ linear.weight.T, expected)
            assert torch.equal(linear.weight[1], linear.weight.detach()[1])


# ----------------------------------------------------------------------------------------------------
# Precision "compute": the numbers of "full" without its storage.
# ----------------------------------------------------------------------------------------------------

MODES = ("plain", "reentrant", "autocast", "modules_to_save", "tokens")


def results(name: str, quant: str, dtype: torch.dtype, precision: str, mode: str) -> list[object]:
    supports = zoo.ARCHITECTURES[name].supports_gradient_checkpointing
    model = zoo.load(name, quant, dtype)
    prepared = KbitPreparedModel(
        model,
        precision=precision,
        gradient_checkpointing=supports,
        gradient_checkpointing_kwargs={"use_reentrant": mode == "reentrant"},
    ).prepare()
    assert prepared.plan.added_bytes == sum(
        p.numel() * 2 for edit in prepared.plan.edits if edit.action == "store" for p in edit._live()
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


def compute_cases() -> list[object]:
    return [
        pytest.param(name, quant, dtype, mode, id=f"{name}-{quant}-{str(dtype)[6:]}-{mode}")
        for name, architecture in zoo.ARCHITECTURES.items()
        for quant, dtype in (("nf4", torch.bfloat16), ("int8", torch.float16))
        for mode in MODES
        if quant in architecture.quants and (quant == "nf4" or (name in zoo.CORE and mode == "plain"))
        if mode != "reentrant" or architecture.supports_gradient_checkpointing
        if mode != "tokens" or name not in WITHOUT_TOKENS
        if mode != "autocast" or name not in WITHOUT_AUTOCAST
    ]


@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning")
@pytest.mark.parametrize(("name", "quant", "dtype", "mode"), compute_cases())
def test_compute_gives_the_numbers_of_full(name: str, quant: str, dtype: torch.dtype, mode: str) -> None:
    full, compute = (results(name, quant, dtype, precision, mode) for precision in ("full", "compute"))
    for (their_loss, their_gradients), (our_loss, our_gradients) in zip(full, compute, strict=True):
        assert torch.equal(their_loss, our_loss)
        assert their_gradients.keys() == our_gradients.keys()
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


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_run_in_inference_mode(name: str) -> None:
    model = zoo.load(name)
    outputs = []
    for precision in ("full", "compute"):
        with KbitPreparedModel(model, precision=precision), torch.inference_mode():
            outputs.append(model(**zoo.inputs(name, model)).logits.clone())
    assert torch.equal(*outputs)
