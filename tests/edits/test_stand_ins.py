"""A weight that is upcast as it is used: the same bits as one stored in float32, and no float32 copy kept."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import operator
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from kbitwrap import StateError
from kbitwrap.edits.stand_ins import StandIns
from kbitwrap.model.records import Records
from kbitwrap.tensors.upcast import UpcastTensor
from support.memory import profiler

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def pair(module: nn.Module, chunk_bytes: int | None = None) -> tuple[nn.Module, nn.Module]:
    """A frozen half module whose weight is stood in for, and its twin stored in float32."""
    module.requires_grad_(False)
    twin = copy.deepcopy(module).float()
    if getattr(module, "bias", None) is not None:
        module.bias.data = module.bias.data.float()  # stored in float32 under "compute"
    StandIns(Records(), chunk_bytes).install(module, "weight", module._parameters["weight"])
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
    with profiler() as profile:
        run(half, x)
    largest = max(event.self_cpu_memory_usage for event in profile.function_events)
    # Without pieces the weight itself; with them nothing larger than the logits.
    assert largest == (64 * 2000 * 4 if chunk_bytes is None else 2000 * 4)


@DTYPES
@pytest.mark.parametrize("is_inference", [False, True])
def test_under_autocast_there_is_no_float32_copy(dtype: torch.dtype, is_inference: bool) -> None:
    half, _ = pair(nn.Linear(64, 2000, bias=False, dtype=dtype), chunk_bytes=64 * 4 * 10)
    x = torch.randn(1, 64)
    with profiler() as profile, torch.inference_mode(is_inference), torch.autocast("cpu", torch.bfloat16):
        y = half(x)
    assert y.dtype == torch.bfloat16
    # Autocast's own copy in its dtype, the one that it makes of a float32 weight as well.
    assert max(event.self_cpu_memory_usage for event in profile.function_events) == 64 * 2000 * 2


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
        assert not {"weight", "__deepcopy__", "__getstate__", "_apply"} & vars(twin).keys()
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

    def test_its_bytes_are_those_of_float32(self) -> None:
        linear = self.linear()
        full = linear.weight.float()
        assert torch.equal(linear.weight.view(torch.uint8), full.view(torch.uint8))
        assert torch.equal(linear.weight.view(torch.int32), full.view(torch.int32))

    def test_reading_its_memory(self) -> None:
        linear = self.linear()
        full = linear._parameters["weight"].float()
        assert linear.weight.tolist() == full.tolist()
        assert (linear.weight.numpy() == full.numpy()).all()
        assert linear.weight[0].numpy().dtype == full.numpy().dtype
        assert torch.equal(torch.from_dlpack(linear.weight), full)
        assert f"{linear.weight[1, 2]:.4f}" == f"{full[1, 2]:.4f}"
        address = linear.weight.data_ptr()
        assert address % 16 == 0  # as transformers asks before it multiplies experts
        for read in (int, operator.index, lambda address: address % 100, lambda address: address + 4):
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

    def test_its_storage_is_that_of_the_half_weight(self) -> None:
        linear = self.linear()
        weight, half = linear.weight, linear._parameters["weight"]
        assert weight.untyped_storage().data_ptr() == half.untyped_storage().data_ptr()
        assert weight.untyped_storage().nbytes() == weight.nbytes == half.nbytes == 4 * 8 * 2

    def test_it_names_the_device_that_its_module_is_moved_to(self) -> None:
        linear = self.linear()
        model = nn.Sequential(linear, nn.LayerNorm(4))
        model.to("meta")
        assert linear.weight.device.type == linear._parameters["weight"].device.type == "meta"
        assert linear(torch.ones(1, 8, device="meta")).dtype == torch.float32
        model.to_empty(device="cpu")
        assert linear.weight.device.type == "cpu"
        assert linear(torch.ones(1, 8)).dtype == torch.float32

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
