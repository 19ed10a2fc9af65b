"""A weight that is upcast as it is used: the same bits as one stored in float32, and no float32 copy kept."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import operator
import pickle
from collections.abc import Callable

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from kbitwrap import KbitPreparedModel, StateError, build_plan
from kbitwrap.edits.stand_ins import UpcastChange
from kbitwrap.model.tree import ModelTree
from kbitwrap.tensors.upcast import UpcastTensor
from support import zoo
from support.snapshot import Snapshot
from support.thorough import each_once, few
from support.training import adapt, step

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def pair(module: nn.Module, chunk_bytes: int | None = None) -> tuple[nn.Module, nn.Module]:
    """A frozen half module whose weight is stood in for, and its twin stored in float32."""
    module.requires_grad_(False)
    twin = copy.deepcopy(module).float()
    if getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.float()  # stored in float32 under "compute"
    UpcastChange(ModelTree(module), chunk_bytes).install(module, "weight", module._parameters["weight"])
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
def test_a_linear_layer_computes_as_in_float32(
    make: type[nn.Linear], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    half, full = pair(make(64, 200, dtype=dtype))
    assert_same(half, full, torch.randn(shape))


@DTYPES
@pytest.mark.parametrize("make", [nn.Embedding, TiedRows])
def test_an_embedding_computes_as_in_float32(make: type[nn.Embedding], dtype: torch.dtype) -> None:
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
def test_a_stack_of_experts_computes_as_in_float32(dtype: torch.dtype) -> None:
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


@pytest.mark.parametrize("width", [200, 4 * 48 + 1])  # the last piece is shorter, or a single column
def test_in_pieces_every_piece_is_a_whole_number_of_columns(width: int) -> None:
    half, full = pair(nn.Linear(64, width, bias=True, dtype=torch.bfloat16), chunk_bytes=64 * 4 * 48)
    half._parameters["bias"].data.add_(0)  # a bias is sliced with the columns
    ours, theirs = (run(m, torch.randn(3, 64, generator=torch.Generator().manual_seed(0))) for m in (half, full))
    # Another blocking of the same sums: equal up to the rounding of one sum over 64 (or 200) float32 terms.
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=200 * 2**-23, atol=200 * 2**-23 * b.abs().max().item())


@pytest.mark.parametrize("chunk_bytes", [None, 64 * 4 * 10])
def test_the_float32_copies_alive_at_once_are_bounded(chunk_bytes: int | None) -> None:
    half, _ = pair(nn.Linear(64, 2000, bias=False, dtype=torch.bfloat16), chunk_bytes)
    x = torch.randn(1, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(half, x)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    # Without pieces the weight itself; with them nothing larger than the logits.
    assert largest == (64 * 2000 * 4 if chunk_bytes is None else 2000 * 4)


@DTYPES
@pytest.mark.parametrize("is_inference", [False, True])
def test_under_autocast_there_is_no_float32_copy(dtype: torch.dtype, is_inference: bool) -> None:
    half, _ = pair(nn.Linear(64, 2000, bias=False, dtype=dtype), chunk_bytes=64 * 4 * 10)
    x = torch.randn(1, 64)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with profiler as profile, torch.inference_mode(is_inference), torch.autocast("cpu", torch.bfloat16):
        y = half(x)
    assert y.dtype == torch.bfloat16
    # Autocast's own copy in its dtype, the one that it makes of a float32 weight as well.
    assert max(event.self_cpu_memory_usage for event in profile.events()) == 64 * 2000 * 2


@DTYPES
@pytest.mark.parametrize("make", [nn.Linear, Transposed])
def test_under_autocast_in_inference_mode(make: type[nn.Linear], dtype: torch.dtype) -> None:
    half, full = pair(make(64, 200, dtype=dtype))
    x = torch.randn(2, 3, 64)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = half(x), full(x)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


COMPOSITES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to half": lambda w: w.to(torch.bfloat16),
    "to double": lambda w: w.double(),
    "to the same": lambda w: w.to(torch.float32),
    "type_as": lambda w: w.type_as(torch.ones(1, dtype=torch.float16)),
    "reshape of a view that is none": lambda w: w.t().reshape(-1),
    "reshape": lambda w: w.reshape(8, 4),
    "flatten": lambda w: w.t().flatten(),
    "contiguous": lambda w: w.t().contiguous(),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "chunk": lambda w: w.chunk(2, 1)[1],
    "movedim": lambda w: w.movedim(0, 1),
    "expand_as": lambda w: w[0].expand_as(w),
    "matmul": lambda w: w @ w.T,
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "linear": lambda w: F.linear(torch.ones(2, 3, 8), w),
    "outer index": lambda w: w[torch.tensor([2, 0])].reshape(-1),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COMPOSITES)
def test_operations_that_are_made_of_others(name: str, mode: Callable[[], object]) -> None:
    half, full = pair(nn.Linear(8, 4, bias=False, dtype=torch.bfloat16))
    with mode():  # type: ignore[attr-defined]
        ours, theirs = (COMPOSITES[name](module.weight) for module in (half, full))
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours + 0, theirs + 0)


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

    def test_a_stand_in_is_float32_over_a_half_parameter(self) -> None:
        linear = self.linear()
        assert linear.weight.dtype == torch.float32
        assert linear.weight.shape == (4, 8)
        assert [p.dtype for p in linear.parameters()] == [torch.bfloat16]
        assert linear.state_dict()["weight"].dtype == torch.bfloat16
        assert "stored=torch.bfloat16" in repr(linear.weight)

    def test_writing_the_present_value_changes_nothing(self) -> None:
        """Gemma 3n clamps weights in every forward of its training."""
        linear, _ = pair(nn.Linear(16, 8, dtype=torch.bfloat16))
        parameter = linear._parameters["weight"]
        parameter.data[0, 0] = float("nan")
        version = parameter._version
        assert linear.weight.data.clamp_(-120, 120) is not None
        linear.weight[:2].copy_(parameter[:2])
        linear.weight.data.t().mul_(1)
        assert (parameter.dtype, parameter._version) == (torch.bfloat16, version)
        linear.weight.data[1:].clamp_(-1 / 3, 0.01)
        assert parameter.dtype == torch.float32
        assert float(parameter[1:].max()) == torch.tensor(0.01).item()

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

    def test_a_newly_assigned_parameter_replaces_the_stand_in(self) -> None:
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
        assert not {"weight", "__deepcopy__", "__getstate__"} & vars(twin).keys()
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

    def test_saved_alone_it_is_the_float32_parameter_that_it_says_it_is(self) -> None:
        linear = self.linear()
        file = io.BytesIO()
        torch.save({"weight": linear.weight, "row": linear.weight[1]}, file)
        assert len(file.getvalue()) < 4096
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert isinstance(loaded["weight"], nn.Parameter)
        assert not loaded["weight"].requires_grad
        for value, expected in ((loaded["weight"], linear.weight), (loaded["row"], linear.weight[1])):
            assert not isinstance(value, UpcastTensor)
            assert value.dtype == torch.float32
            assert torch.equal(value, expected.float())

    def test_a_shallow_copy_of_its_module_computes(self) -> None:
        linear, x = self.linear(), torch.randn(2, 8)
        twin = copy.copy(linear)
        assert twin._parameters["weight"] is linear._parameters["weight"]
        assert torch.equal(twin(x), linear(x))

    def test_reading_its_memory(self) -> None:
        linear = self.linear()
        full = linear._parameters["weight"].float()
        assert linear.weight.tolist() == full.tolist()
        assert (linear.weight.numpy() == full.numpy()).all()
        assert linear.weight[0].numpy().dtype == full.numpy().dtype
        assert torch.equal(torch.from_dlpack(linear.weight), full)
        assert f"{linear.weight[1, 2]:.4f}" == f"{full[1, 2]:.4f}"
        address = linear.weight.data_ptr()
        for read in (int, operator.index, lambda address: address % 16, lambda address: address + 4):
            with pytest.raises(RuntimeError, match=r"has no memory of its own .* weight\.clone\(\)"):
                read(address)
        with pytest.raises(TypeError):
            ctypes.c_void_p(address)
        assert linear.weight.clone().data_ptr() != 0

    def test_the_address_of_its_memory_tells_ties(self) -> None:
        linear, other = self.linear(), self.linear()
        assert linear.weight.data_ptr() == linear.weight.data_ptr() == linear._parameters["weight"].data_ptr()
        assert linear.weight.data_ptr() not in (other.weight.data_ptr(), linear.weight.clone().data_ptr())
        assert len({linear.weight.data_ptr(), linear._parameters["weight"].data_ptr()}) == 1

    @pytest.mark.parametrize(
        "train",
        [
            lambda linear: linear.requires_grad_(True),
            lambda linear: linear.weight.requires_grad_(True),
            lambda linear: setattr(linear.weight, "requires_grad", True),
        ],
        ids=["module", "method", "attribute"],
    )
    def test_training_a_stand_in_is_refused_with_the_way_out(self, train: Callable[[nn.Module], object]) -> None:
        linear = self.linear()
        assert linear.weight.requires_grad is False
        train(linear)
        assert linear.weight.requires_grad is linear._parameters["weight"].requires_grad is True
        with pytest.raises(StateError, match="modules_to_save"):
            linear(torch.randn(2, 8))
        with torch.no_grad():
            linear(torch.randn(2, 8))

    def test_a_view_may_be_a_leaf_of_its_own(self) -> None:
        linear = self.linear()
        leaves = [nn.Parameter(weight.T) for weight in (linear.weight, linear._parameters["weight"].detach().float())]
        x = torch.randn(2, 4)
        for leaf in leaves:
            (x @ leaf.T).square().sum().backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad)
        assert leaves[0].requires_grad
        assert not leaves[0].detach().requires_grad
        assert not linear.weight.T.requires_grad
        assert not linear._parameters["weight"].requires_grad

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
    def test_writes_give_what_float32_storage_would_hold(self, write: Callable[[torch.Tensor], object]) -> None:
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
    """Every architecture in every mode, by default in one of them; and the core in 8 bits, by default two of it."""
    every = [
        (name, "nf4", torch.bfloat16, mode) for name in zoo.ARCHITECTURES for mode in MODES if is_possible(name, mode)
    ]
    chosen = [(name, "nf4", torch.bfloat16, mode) for name, mode in zoo.in_turn(MODES, is_possible)]
    of_8_bits = [
        (name, "int8", torch.float16, "plain") for name in zoo.CORE if "int8" in zoo.ARCHITECTURES[name].quants
    ]
    return few(every + of_8_bits, chosen + of_8_bits[:2])


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
@pytest.mark.parametrize("name", few(zoo.ARCHITECTURES, zoo.CORE))
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
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_takes_that_dtype_too(backend: str) -> None:
    model, ids = OfItsOwnDtype().bfloat16(), torch.arange(8)
    with KbitPreparedModel(model, precision="compute", gradient_checkpointing=False):
        torch._dynamo.reset()
        found, expected = torch.compile(model, backend=backend, fullgraph=True)(ids), model(ids)
        assert found.dtype == expected.dtype == torch.float32
        assert torch.equal(found, expected)


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
        assert during.diff(Snapshot(model), ignore=(": attributes", ": __deepcopy__", ": __getstate__")) == []
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
            assert not {"weight", "__deepcopy__", "__getstate__"} & vars(module).keys()
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
            assert not {"weight", "__deepcopy__", "__getstate__"} & vars(model.lm_head).keys()
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
        assert not hooks
        model = zoo.load("mixtral")
        with KbitPreparedModel(model, precision="compute") as prepared:
            assert hooks
            with prepared.suspended():
                assert not hooks
            assert hooks
        assert not hooks
        KbitPreparedModel(model, precision="compute").prepare()
        assert hooks
        del model, prepared
        gc.collect()
        assert not hooks


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


@pytest.mark.parametrize("name", AS_PARAMETERS)
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


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_the_whole_model_is_compiled_in_one_graph() -> None:
    steps = []
    for precision in ("full", "compute"):
        model = zoo.load("gemma2")
        KbitPreparedModel(model, precision=precision, gradient_checkpointing=False).prepare()
        peft_model = adapt("gemma2", model)
        torch._dynamo.reset()
        steps.append(step("gemma2", torch.compile(peft_model, backend="aot_eager", fullgraph=True)))
    (their_loss, theirs), (our_loss, ours) = steps
    assert torch.equal(their_loss, our_loss)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[fqn], ours[fqn]) for fqn in theirs)


@pytest.mark.parametrize("how", [nn.Module.float, nn.Module.bfloat16])
def test_a_head_that_was_cast_is_cast_back(how: Callable[[nn.Module], nn.Module]) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    with KbitPreparedModel(model, precision="compute"):
        loss = model(**zoo.inputs("llama", model)).loss
        how(model.lm_head)
        assert torch.equal(model(**zoo.inputs("llama", model)).loss, loss)
    assert before.diff(Snapshot(model), moved=True) == []


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


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_run_in_inference_mode(name: str) -> None:
    model = zoo.load(name)
    outputs = []
    for precision in ("full", "compute"):
        with KbitPreparedModel(model, precision=precision), torch.inference_mode():
            outputs.append(model(**zoo.inputs(name, model)).logits.clone())
    assert torch.equal(*outputs)


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


@pytest.mark.parametrize("name", AS_PARAMETERS)
def test_verify_ignores_a_lora_on_an_upcast_parameter(name: str) -> None:
    model = zoo.load(name)
    with KbitPreparedModel(model, precision="compute") as prepared:
        peft_model = adapt(name, model, target_parameters=AS_PARAMETERS[name])
        step(name, peft_model)
        assert not prepared.verify()
