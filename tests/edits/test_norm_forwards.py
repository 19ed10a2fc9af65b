"""A norm's forward is given back, whatever hooks, threads and exceptions there are."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accelerate.hooks
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kbitwrap.edits.journal import Undoing
from kbitwrap.edits.norms import Float32Forward, can_rebind_forward, forward_attribute
from kbitwrap.model.tree import ModelTree
from support.norms import NORMS, WIDTH, assert_same_bits, autocasting, install, make, make_inputs, reference
from support.strategies import HALF_DTYPES

every_norm = pytest.mark.parametrize("kind", NORMS)


every_dtype = pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)


# torch says once in a process that an unprepared RMSNorm is slow with a float32 input; the references below run one.
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")


# ----------------------------------------------------------------------------------------------------
# Other people's forwards.
# ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def undone_as_it_was(norm: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Compute in float32 inside; afterwards the module has the attributes and the output from before."""
    before, attributes = norm(*inputs), dict(vars(norm))
    change = install(norm)
    yield
    change.undo(ModelTree(norm), Undoing())
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
    value = change.read(tree)
    change.undo(tree, Undoing())
    assert "forward" not in vars(norm)
    assert_same_bits(norm(*inputs), before)
    change.resume(tree, value)
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
    change.undo(ModelTree(norm), Undoing())
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
    assert forward_attribute(norm) == "_old_forward"
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
    change.undo(ModelTree(norm), Undoing())
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
    change.undo(ModelTree(norm), Undoing())
    assert_same_bits(norm(*inputs), plain)


def test_a_wrapper_that_holds_on_to_it_gets_the_original_after_undoing() -> None:
    # accelerate's autocast keeps the forward that it found in a closure.
    norm, inputs = make("Llama"), make_inputs("Llama", torch.bfloat16)
    before = norm(*inputs)
    change = install(norm)
    inner = norm.forward
    norm.forward = lambda *args: inner(*args)
    change.undo(ModelTree(norm), Undoing())
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
