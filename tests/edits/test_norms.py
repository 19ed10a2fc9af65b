"""A norm computes in float32 and returns the dtype of the unprepared one, with gradients, copies and compilers."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from kbitwrap import KbitPreparedModel, build_plan
from kbitwrap.edits.journal import Undoing
from kbitwrap.model.tree import ModelTree
from support import forks
from support.norms import NORMS, WIDTH, assert_same_bits, autocasting, install, make, make_inputs, reference
from support.strategies import HALF_DTYPES, RMSNorm
from support.thorough import each_once, few

every_norm = pytest.mark.parametrize("kind", NORMS)


every_dtype = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


# torch says once in a process that an unprepared RMSNorm is slow with a float32 input; the references below run one.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")


# What a model feeds its norms: its own dtype, or a residual stream in float32.
every_input = pytest.mark.parametrize("input_dtype", ["half", torch.float32], ids=str)


every_autocast = pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])


def loss(output: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient is different for every element."""
    flat = output.float().flatten()
    return flat @ torch.cos(torch.arange(flat.numel(), dtype=torch.float32))


def gradients(
    call: Callable[..., torch.Tensor], norm: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor | None]:
    """The gradients of parameters and inputs."""
    leaves = tuple(x.detach().clone().requires_grad_() for x in inputs)
    norm.zero_grad()
    loss(call(*leaves)).backward()
    found = {name: parameter.grad for name, parameter in norm.named_parameters()}
    return found | {f"input {i}": leaf.grad for i, leaf in enumerate(leaves)}


# ----------------------------------------------------------------------------------------------------
# The numbers.
# ----------------------------------------------------------------------------------------------------


@every_norm
@every_dtype
@every_input
@every_autocast
def test_a_norm_computes_in_float32_and_returns_the_unprepared_dtype(
    kind: str, dtype: torch.dtype, input_dtype: Any, autocast: bool
) -> None:
    norm = make(kind, dtype)
    inputs = make_inputs(kind, dtype if input_dtype == "half" else input_dtype)
    with autocasting(autocast):
        expected = reference(norm, inputs)
        install(norm)
        for _ in range(2):
            assert_same_bits(norm(*inputs), expected)
    assert {parameter.dtype for parameter in norm.parameters()} == {dtype}


@pytest.mark.parametrize("kind", ["Llama", "T5", "Mamba 2, gated"])
def test_float32_changes_the_output_of_a_norm(kind: str) -> None:
    # These round before they multiply with the weight. Without a difference the test above would show nothing.
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    before = norm(*inputs)
    install(norm)
    assert not torch.equal(norm(*inputs), before)


@every_norm
def test_autocast_on_and_off_are_told_apart(kind: str) -> None:
    norm = make(kind)
    inputs = make_inputs(kind, torch.bfloat16)
    expected = {}
    for autocast in (False, True):
        with autocasting(autocast):
            expected[autocast] = reference(norm, inputs)
    install(norm)
    for autocast in (False, True, False, True):
        with autocasting(autocast):
            assert_same_bits(norm(*inputs), expected[autocast])


@every_norm
def test_dtypes_of_inputs_are_told_apart(kind: str) -> None:
    norm = make(kind)
    batches = [make_inputs(kind, dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16)]
    expected = [reference(norm, inputs) for inputs in batches]
    install(norm)
    for _ in range(2):
        for inputs, output in zip(batches, expected, strict=True):
            assert_same_bits(norm(*inputs), output)


def test_a_norm_in_float32_warns_of_no_slow_kernel() -> None:
    # A process of its own: torch warns once in each that half weights and float32 inputs find no fast kernel. In
    # float32 they do.
    program = (
        "import warnings, torch; from kbitwrap.edits.norms import Forwards, Float32Forward\n"
        "warnings.simplefilter('error'); norm = torch.nn.RMSNorm(8).bfloat16()\n"
        "Forwards().install(Float32Forward(norm)); norm(torch.ones(2, 8))"
    )
    assert forks.run_program(program).stderr == ""


def test_keywords_are_inputs_too() -> None:
    norm = make("Mamba 2, gated")
    x, gate = make_inputs("Mamba 2, gated", torch.bfloat16)
    expected, ungated = reference(norm, (x, gate)), reference(norm, (x,))
    install(norm)
    assert_same_bits(norm(x, gate=gate), expected)
    assert_same_bits(norm(gate=gate, hidden_states=x), expected)
    assert_same_bits(norm(x, gate=None), ungated)
    assert_same_bits(norm(hidden_states=x), ungated)


class Noisy(RMSNorm):
    """A norm that draws random numbers, and warns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("noisy", UserWarning, stacklevel=2)
        return super().forward(x) + torch.rand_like(x)


def test_the_run_that_finds_the_dtypes_draws_no_random_number_and_warns_of_nothing() -> None:
    norm, x = Noisy(8).bfloat16(), torch.ones(2, 8, dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        norm(x.float())
        expected = torch.rand(4)
        install(norm)
        torch.manual_seed(0)
        norm(x)
        found = torch.rand(4)
    assert torch.equal(found, expected)
    assert len(caught) == 2


class TwoResults(RMSNorm):
    """A norm that adds, and returns the sum beside the result, as fused norms do."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor, *, make: Any = tuple) -> Any:
        total = x + residual
        return make((super().forward(total), total, None))


class Results(NamedTuple):
    """What a forward returns that names its results."""

    first: torch.Tensor
    second: torch.Tensor
    third: None

    @classmethod
    def of(cls, values: Any) -> Results:
        return cls(*values)


@pytest.mark.parametrize("container", [tuple, list, Results])
def test_each_of_several_results_has_its_own_dtype(container: type) -> None:
    norm = TwoResults(WIDTH).bfloat16()
    x, residual = make_inputs("gated", torch.bfloat16)
    residual = residual.float()
    dtypes = [norm(x, residual)[i].dtype for i in range(2)]
    install(norm)
    output = norm(x, residual, make=getattr(container, "of", container))
    assert type(output) is container
    assert [output[i].dtype for i in range(2)] == dtypes == [torch.float32, torch.float32]
    assert output[2] is None
    assert_same_bits(output[1], x.float() + residual)


class CountingNorm(RMSNorm):
    """A norm that keeps statistics as it runs."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("num_rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_rows += len(x)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:Sequential has neither a quantization attribute:UserWarning")
def test_a_norm_that_keeps_statistics_computes_as_loaded() -> None:
    model, (x,) = nn.Sequential(CountingNorm()).bfloat16(), make_inputs("LayerNorm", torch.bfloat16)
    expected = model(x)
    with KbitPreparedModel(model) as prepared:
        assert any("0 computes as loaded" in warning for warning in prepared.plan.warnings)
        assert_same_bits(model(x), expected)
    assert int(model[0].num_rows) == 2 * len(x)


@pytest.mark.parametrize("keeps_statistics", [True, False])
def test_a_batch_norm_is_not_treated_as_a_norm(keeps_statistics: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(WIDTH, track_running_stats=keeps_statistics)).bfloat16()
    plan = build_plan(model, precision="norms", gradient_checkpointing=False)
    assert not any(edit.action == "compute" for edit in plan.edits)
    assert not any("computes as loaded" in warning for warning in plan.warnings)
    assert plan.by_role.keys() == {"norm"}  # though it is called one


class ScaledNorm(RMSNorm):
    """A norm whose scale is computed by a layer of its own, as adaptive norms do."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale(x)


@pytest.mark.filterwarnings("ignore:Sequential has neither a quantization attribute:UserWarning")
def test_a_norm_given_by_class_may_have_children() -> None:
    model = nn.Sequential(ScaledNorm()).bfloat16()
    (x,) = make_inputs("LayerNorm", torch.bfloat16)
    expected = reference(model[0], (x,))
    with KbitPreparedModel(model, precision="norms", norm_modules=(ScaledNorm,)):
        assert_same_bits(model(x), expected)


# ----------------------------------------------------------------------------------------------------
# Gradients.
# ----------------------------------------------------------------------------------------------------


@every_norm
@every_dtype
@every_autocast
def test_gradients_reach_the_weight_and_the_input(kind: str, dtype: torch.dtype, autocast: bool) -> None:
    norm = make(kind, dtype).requires_grad_(True)
    inputs = make_inputs(kind, dtype)
    with autocasting(autocast):
        expected = gradients(lambda *xs: reference(norm, xs), norm, inputs)
        install(norm)
        found = gradients(norm, norm, inputs)
    assert found.keys() == expected.keys()
    for name in found:
        assert_same_bits(found[name], expected[name])
        assert found[name].any(), name


@every_norm
def test_a_frozen_norm_lets_the_gradient_of_its_input_through(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    install(norm)
    found = gradients(norm, norm, inputs)
    assert all(gradient is not None for name, gradient in found.items() if name.startswith("input"))
    assert all(gradient is None for name, gradient in found.items() if not name.startswith("input"))


@every_norm
def test_nothing_is_recorded_where_nothing_is_trained(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    install(norm)
    assert not norm(*inputs).requires_grad
    norm.requires_grad_(True)
    assert norm(*inputs).requires_grad
    with torch.no_grad():
        assert not norm(*inputs).requires_grad


@every_norm
def test_a_trained_weight_is_used_at_once(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    install(norm)
    norm(*inputs)
    other = make(kind, seed=5)
    norm.load_state_dict(other.state_dict())
    assert_same_bits(norm(*inputs), reference(other, inputs))


@every_norm
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_no_gradient(kind: str, use_reentrant: bool) -> None:
    norm = make(kind).requires_grad_(True)
    inputs = make_inputs(kind, torch.bfloat16)
    install(norm)
    expected = gradients(norm, norm, inputs)
    found = gradients(lambda *xs: checkpoint(norm, *xs, use_reentrant=use_reentrant), norm, inputs)
    for name in expected:
        assert_same_bits(found[name], expected[name])


# ----------------------------------------------------------------------------------------------------
# Copies.
# ----------------------------------------------------------------------------------------------------


def by_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def by_torch_save(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    ("kind", "duplicate", "own_forward"),
    each_once(list(NORMS), [copy.deepcopy, by_pickle, by_torch_save], [False, True]),
)
def test_a_copy_computes_with_its_own_weight(
    kind: str, duplicate: Callable[[nn.Module], nn.Module], own_forward: bool
) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    expected = reference(norm, inputs)
    trained = reference(make(kind, seed=5), inputs)
    if own_forward:
        norm.forward = norm.forward
    install(norm)
    norm(*inputs)
    # The copy is made of a model, and the norm found in it, as `modules_to_save` does.
    twin = duplicate(nn.Sequential(norm))[0]
    assert twin.forward.module is twin
    assert_same_bits(twin(*inputs), expected)
    twin.load_state_dict(make(kind, seed=5).state_dict())
    assert_same_bits(twin(*inputs), trained)
    assert_same_bits(norm(*inputs), expected)


def test_parameters_lent_for_one_call_are_used() -> None:
    norm, inputs = make("Llama"), make_inputs("Llama", torch.bfloat16)
    install(norm)
    for dtype in (torch.bfloat16, torch.float32):  # the dtype of the result depends on theirs
        other = make("Llama", dtype, seed=5)
        assert_same_bits(functional_call(norm, dict(other.named_parameters()), inputs), reference(other, inputs))


# ----------------------------------------------------------------------------------------------------
# Compilation.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    # A compiled graph that raises half-way leaves gradients off: one failure is not to become all that follow.
    torch.set_grad_enabled(True)


COMPILED = list(itertools.product(NORMS, ["half", torch.float32], ["eager", "aot_eager"]))
# Of torch's, one whose kernel refuses float32 with half weights and one whose does not; of others, one of two inputs.
FEW_COMPILED = [
    ("LayerNorm", torch.float32, "aot_eager"),
    ("Llama", "half", "eager"),
]


@pytest.mark.parametrize(("kind", "input_dtype", "backend"), few(COMPILED, FEW_COMPILED))
def test_it_compiles_without_a_break(kind: str, input_dtype: Any, backend: str, fresh_compiler: None) -> None:
    norm = make(kind).requires_grad_(True)
    inputs = make_inputs(kind, torch.bfloat16 if input_dtype == "half" else input_dtype)
    install(norm)
    output, expected = norm(*inputs), gradients(norm, norm, inputs)
    compiled = torch.compile(norm, fullgraph=True, backend=backend)
    assert_same_bits(compiled(*inputs), output)
    found = gradients(compiled, norm, inputs)
    for name in expected:
        assert_same_bits(found[name], expected[name])
    assert torch.is_grad_enabled()


def test_a_norm_that_gets_another_class_later_computes_the_same() -> None:
    norm, inputs = make("Llama"), make_inputs("Llama", torch.bfloat16)
    install(norm)
    expected = norm(*inputs)
    norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})  # as FSDP2 does
    norm._module = None  # a name of others
    assert_same_bits(norm(*inputs), expected)


@pytest.mark.thorough
def test_it_compiles_inside_a_model_under_autocast(fresh_compiler: None) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make("LayerNorm"), nn.Linear(WIDTH, WIDTH)).bfloat16()
    (x,) = make_inputs("LayerNorm", torch.bfloat16)
    install(model[1])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for autocast in (False, True):
        with autocasting(autocast):
            assert_same_bits(compiled(x), model(x))


def test_undoing_reaches_a_compiled_module(fresh_compiler: None) -> None:
    norm, inputs = make("Llama"), make_inputs("Llama", torch.bfloat16)
    before = norm(*inputs)
    change = install(norm)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    prepared = norm(*inputs)
    assert_same_bits(compiled(*inputs), prepared)
    change.undo(ModelTree(norm), Undoing())
    assert_same_bits(compiled(*inputs), before)
