"""Norms that compute in float32 while they store half: the numbers, the dtypes, and everything around a module."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import accelerate.hooks
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from kbitwrap import KbitPreparedModel, build_plan
from kbitwrap.edits.norms import ComputeChange, Float32Forward, can_rebind_forward, forward_slot
from kbitwrap.model.tree import ModelTree
from support import forks
from support.strategies import HALF_DTYPES, RMSNorm
from support.thorough import each_once

WIDTH = 8


def gated_norm() -> nn.Module:
    """Mamba 2's norm, which has groups in newer versions of transformers."""
    groups = {"group_size": 4} if "group_size" in inspect.signature(MambaRMSNormGated).parameters else {}
    return MambaRMSNormGated(WIDTH, **groups)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "LayerNorm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(2, WIDTH),
    "Llama": lambda: LlamaRMSNorm(WIDTH),
    "T5": lambda: T5LayerNorm(WIDTH),
    "Gemma 2": lambda: Gemma2RMSNorm(WIDTH),
    "Mamba 2, gated": gated_norm,
}
every_norm = pytest.mark.parametrize("kind", NORMS)
every_dtype = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
# torch says once in a process that an unprepared RMSNorm is slow with a float32 input; the references below run one.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")
# What a model feeds its norms: its own dtype, or a residual stream in float32.
every_input = pytest.mark.parametrize("input_dtype", ["half", torch.float32], ids=str)
every_autocast = pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])


def make(kind: str, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0) -> nn.Module:
    """A norm whose parameters are all different, frozen."""
    norm = NORMS[kind]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return norm.to(dtype).requires_grad_(False)


def make_inputs(kind: str, dtype: torch.dtype, *, seed: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    count = 2 if "gated" in kind else 1
    return tuple((torch.randn(2, WIDTH, WIDTH, generator=generator) * 3).to(dtype) for _ in range(count))


def install(norm: nn.Module) -> ComputeChange:
    change = ComputeChange()
    change.install(Float32Forward(norm))
    return change


def autocasting(is_enabled: bool) -> contextlib.AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16) if is_enabled else contextlib.nullcontext()


def unprepared_dtype(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.dtype:
    """The dtype that an unprepared norm returns; the input's, where its kernel refuses the mix of dtypes."""
    try:
        return norm(*inputs).dtype
    except RuntimeError:
        return inputs[0].dtype


def reference(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What an unprepared norm gives with float32 parameters and inputs, in the dtype that it gives with its own."""
    parameters = {name: parameter.float() for name, parameter in norm.named_parameters()}
    output = functional_call(norm, parameters, tuple(x.float() for x in inputs))
    return output.to(unprepared_dtype(norm, inputs))


def assert_same_bits(found: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.dtype == expected.dtype
    assert torch.equal(found.detach().view(torch.uint8), expected.detach().view(torch.uint8))


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
        "import warnings, torch; from kbitwrap.edits.norms import ComputeChange, Float32Forward\n"
        "warnings.simplefilter('error'); norm = torch.nn.RMSNorm(8).bfloat16()\n"
        "ComputeChange().install(Float32Forward(norm)); norm(torch.ones(2, 8))"
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


@pytest.mark.parametrize(
    ("kind", "input_dtype", "backend"), each_once(list(NORMS), ["half", torch.float32], ["eager", "aot_eager"])
)
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
    change.undo(ModelTree(norm))
    assert_same_bits(compiled(*inputs), before)


# ----------------------------------------------------------------------------------------------------
# Other people's forwards.
# ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def undone_as_it_was(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Compute in float32 inside; afterwards the module has the attributes and the output from before."""
    before, attributes = norm(*inputs), dict(vars(norm))
    change = install(norm)
    yield
    change.undo(ModelTree(norm))
    assert vars(norm) == attributes
    assert_same_bits(norm(*inputs), before)


@every_norm
def test_undoing_leaves_the_module_as_it_was(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    with undone_as_it_was(norm, inputs):
        norm(*inputs)


@every_norm
def test_suspending_is_undoing_for_a_while(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    before = norm(*inputs)
    change = install(norm)
    forward, prepared = norm.forward, norm(*inputs)
    tree = ModelTree(norm)
    way_back = change.now(tree)
    change.undo(tree)
    assert "forward" not in vars(norm)
    assert_same_bits(norm(*inputs), before)
    way_back.undo(tree)
    assert norm.forward is forward
    assert_same_bits(norm(*inputs), prepared)


def half_of_it(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A method that replaces a norm's forward on one instance, as kernel libraries do."""
    assert x.dtype == self.weight.dtype
    return F.layer_norm(x, (WIDTH,), self.weight, None) / 2


@every_dtype
def test_a_method_that_replaced_the_forward_is_what_runs(dtype: torch.dtype) -> None:
    norm, inputs = make("LayerNorm", dtype), make_inputs("LayerNorm", dtype)
    norm.forward = method = types.MethodType(half_of_it, norm)
    expected = (F.layer_norm(inputs[0].float(), (WIDTH,), norm.weight.float(), None) / 2).to(dtype)
    assert can_rebind_forward(norm)
    change = install(norm)
    assert_same_bits(norm(*inputs), expected)
    change.undo(ModelTree(norm))
    assert vars(norm)["forward"] is method


def test_a_forward_that_is_no_method_of_the_module_cannot_be_rebound() -> None:
    norm, other = make("LayerNorm"), make("LayerNorm")
    assert can_rebind_forward(norm)
    for forward in (lambda x: x, functools.partial(half_of_it, norm), types.MethodType(half_of_it, other)):
        norm.forward = forward
        assert not can_rebind_forward(norm)


class Doubling(accelerate.hooks.ModelHook):
    """A hook that changes what goes in and what comes out."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tuple(2 * x for x in args), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 2 * output


def doubled(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return 2 * reference(norm, tuple(2 * x for x in inputs))


@every_norm
def test_accelerates_hook_from_before_stays_around_it(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    expected = doubled(norm, inputs)
    accelerate.hooks.add_hook_to_module(norm, Doubling())
    assert forward_slot(norm) == "_old_forward"
    assert can_rebind_forward(norm)
    with undone_as_it_was(norm, inputs):
        assert_same_bits(norm(*inputs), expected)


@every_norm
def test_accelerates_hook_from_after_stays_around_it(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    plain, expected = norm(*inputs), doubled(norm, inputs)
    half = 2 * norm(*(2 * x for x in inputs))
    change = install(norm)
    accelerate.hooks.add_hook_to_module(norm, Doubling())
    assert_same_bits(norm(*inputs), expected)
    change.undo(ModelTree(norm))
    assert_same_bits(norm(*inputs), half)
    accelerate.hooks.remove_hook_from_module(norm)
    assert_same_bits(norm(*inputs), plain)
    assert not any(isinstance(value, Float32Forward) for value in vars(norm).values())


@every_norm
def test_accelerates_hook_can_go_while_prepared(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    plain, expected = norm(*inputs), reference(norm, inputs)
    accelerate.hooks.add_hook_to_module(norm, Doubling())
    change = install(norm)
    accelerate.hooks.remove_hook_from_module(norm)
    assert_same_bits(norm(*inputs), expected)
    change.undo(ModelTree(norm))
    assert_same_bits(norm(*inputs), plain)


def test_a_wrapper_that_holds_on_to_it_gets_the_original_after_undoing() -> None:
    # accelerate's autocast keeps the forward that it found in a closure.
    norm, inputs = make("Llama"), make_inputs("Llama", torch.bfloat16)
    before = norm(*inputs)
    change = install(norm)
    inner = norm.forward
    norm.forward = lambda *args: inner(*args)
    change.undo(ModelTree(norm))
    assert_same_bits(norm(*inputs), before)


def test_hooks_of_torch_see_the_dtypes_of_the_unprepared_module() -> None:
    norm, inputs = make("Llama"), make_inputs("Llama", torch.bfloat16)
    seen = []
    norm.register_forward_pre_hook(lambda module, args: seen.append((module, args[0].dtype)))
    norm.register_forward_hook(lambda module, args, output: seen.append((module, output.dtype)))
    install(norm)
    norm(*inputs)
    # Once each: finding the dtype out calls no hook.
    assert seen == [(norm, torch.bfloat16)] * 2


# ----------------------------------------------------------------------------------------------------
# Faults and threads.
# ----------------------------------------------------------------------------------------------------


@every_norm
def test_an_exception_leaves_the_module_intact(kind: str) -> None:
    norm, inputs = make(kind), make_inputs(kind, torch.bfloat16)
    install(norm)
    expected, attributes = norm(*inputs), dict(vars(norm))
    weight, values = norm.weight, norm.weight.clone()
    bad = tuple(torch.zeros(2, 3, 5).bfloat16() for _ in inputs)
    with pytest.raises(RuntimeError):
        norm(*bad)
    assert vars(norm) == attributes
    assert norm.weight is weight
    assert_same_bits(norm.weight, values)
    assert_same_bits(norm(*inputs), expected)


def test_an_exception_of_the_forward_is_what_the_caller_sees() -> None:
    norm = make("LayerNorm")
    error = ValueError("no such input")

    def fail(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise error

    norm.forward = types.MethodType(fail, norm)
    install(norm)
    with pytest.raises(ValueError, match="no such input") as caught:
        norm(*make_inputs("LayerNorm", torch.bfloat16))
    assert caught.value is error


@every_norm
def test_threads_do_not_disturb_one_another(kind: str) -> None:
    norm = make(kind)
    cases = []
    for seed in range(4):
        for dtype in (torch.bfloat16, torch.float32):
            for autocast in (False, True):
                inputs = make_inputs(kind, dtype, seed=seed)
                with autocasting(autocast):
                    cases.append((inputs, autocast, reference(norm, inputs)))
    install(norm)

    def run(case: tuple[Any, bool, torch.Tensor]) -> bool:
        inputs, autocast, expected = case
        with autocasting(autocast):
            output = norm(*inputs)
        return output.dtype == expected.dtype and torch.equal(output, expected)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, cases * 4)) == [True] * len(cases) * 4
