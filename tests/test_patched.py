"""PEFT's function is replaced wherever a loaded library holds it, and put back exactly."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import peft.utils.other
import pytest
import torch
from torch import nn

import kbitwrap
from kbitwrap import ConfigError, Precision, patch_peft, patched, prepare_model_for_kbit_training, prepared_of
from support import zoo
from support.snapshot import Snapshot

NAMES = ["model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs", "auto_clear_cache"]
pytestmark = pytest.mark.filterwarnings("ignore:.*neither a quantization attribute:UserWarning")


def is_pefts_own(function: object, own: object = peft.prepare_model_for_kbit_training) -> bool:
    """Whether a function is the one that PEFT defines, which no name in this module holds."""
    return function is own


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    """Whatever a test does, the next one finds PEFT as it was imported."""
    modules = (peft, peft.utils, peft.utils.other)
    assert all(is_pefts_own(vars(module)["prepare_model_for_kbit_training"]) for module in modules)
    own = [
        (vars(module), name, value)
        for module in list(sys.modules.values())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if is_pefts_own(value)
    ]
    yield
    for names, name, value in own:
        names[name] = value


def imported(monkeypatch: pytest.MonkeyPatch, source: str, name: str = "a_library") -> types.ModuleType:
    """A module with this source, imported now; it is forgotten when the test ends."""
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(source, vars(module))
    return module


def precision_of(function: Callable[..., nn.Module]) -> Precision:
    """The precision with which a function prepares a model."""
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)).bfloat16()
    prepared = prepared_of(function(model))
    assert prepared is not None
    return prepared.config.precision


def test_it_stands_wherever_a_loaded_module_holds_pefts_function_under_any_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = imported(
        monkeypatch,
        "from peft import prepare_model_for_kbit_training\n"
        "from peft.utils.other import prepare_model_for_kbit_training as prepare\n"
        "import peft\n",
    )
    before, order = dict(vars(library)), [list(vars(module)) for module in (library, peft, peft.utils.other)]
    with patched(precision="norms"):
        assert library.prepare_model_for_kbit_training is library.prepare
        assert library.prepare is peft.utils.other.prepare_model_for_kbit_training
        for holder in (library, peft, peft.utils):
            assert precision_of(holder.prepare_model_for_kbit_training) is Precision.NORMS
    assert {name: value for name, value in vars(library).items() if value is not before[name]} == {}
    assert [list(vars(module)) for module in (library, peft, peft.utils.other)] == order
    for module in (peft, peft.utils, peft.utils.other):
        assert is_pefts_own(module.prepare_model_for_kbit_training)


def test_a_module_imported_meanwhile_gets_it_and_has_pefts_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched():
        library = imported(monkeypatch, "from peft import prepare_model_for_kbit_training as p")
        assert precision_of(library.p) is Precision.FULL
    assert is_pefts_own(library.p)


def test_a_module_that_is_unloaded_meanwhile_is_put_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    library = imported(monkeypatch, "from peft import prepare_model_for_kbit_training as p")
    with patched():
        del sys.modules["a_library"]
        assert not is_pefts_own(library.p)
    assert is_pefts_own(library.p)


def test_an_exception_in_the_body_undoes_it_and_is_not_hidden() -> None:
    with pytest.raises(KeyboardInterrupt), patched():
        raise KeyboardInterrupt
    assert is_pefts_own(peft.prepare_model_for_kbit_training)


def test_the_inner_of_two_wins_and_gives_way_to_the_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    with patched("compute"):
        outer = imported(monkeypatch, "from peft import prepare_model_for_kbit_training as p", "outer")
        with patched("none"):
            inner = imported(monkeypatch, "from peft import prepare_model_for_kbit_training as p", "inner")
            assert [precision_of(f) for f in (outer.p, inner.p)] == [Precision.NONE, Precision.NONE]
        assert [precision_of(f) for f in (outer.p, inner.p)] == [Precision.COMPUTE, Precision.COMPUTE]
    assert is_pefts_own(outer.p)
    assert is_pefts_own(inner.p)


def test_a_script_patches_for_good_and_the_last_call_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    library = imported(monkeypatch, "from peft import prepare_model_for_kbit_training as p")
    assert patch_peft("compute") is None
    assert precision_of(library.p) is Precision.COMPUTE
    patch_peft(precision="norms")
    with patched("none"):
        assert precision_of(library.p) is Precision.NONE
    assert precision_of(library.p) is precision_of(peft.prepare_model_for_kbit_training) is Precision.NORMS


def test_the_drop_in_that_a_module_imported_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = imported(monkeypatch, "from kbitwrap import prepare_model_for_kbit_training as p")
    with patched("none"):
        assert library.p is prepare_model_for_kbit_training
    assert library.p is prepare_model_for_kbit_training
    assert kbitwrap.prepare_model_for_kbit_training is library.p


def test_what_another_library_put_in_place_of_pefts_function_is_replaced_and_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = imported(monkeypatch, "def fixed(model, **kwargs): return model")
    monkeypatch.setattr(peft, "prepare_model_for_kbit_training", library.fixed)
    with patched("norms"):
        assert precision_of(library.fixed) is precision_of(peft.prepare_model_for_kbit_training) is Precision.NORMS
    assert peft.prepare_model_for_kbit_training is library.fixed


def test_no_lazy_module_is_loaded_and_odd_entries_are_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    class Odd:
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"asked for {name}")

    (tmp_path / "waiting.py").write_text("raise AssertionError('loaded')")
    spec = importlib.util.spec_from_file_location("waiting", tmp_path / "waiting.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    waiting = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(waiting)
    lazy = Lazy("lazy")
    vars(lazy)["kept"] = peft.prepare_model_for_kbit_training
    for name, entry in {"waiting": waiting, "lazy": lazy, "odd": Odd(), "none": None}.items():
        monkeypatch.setitem(sys.modules, name, entry)
    with patched():
        assert not is_pefts_own(vars(lazy)["kept"])
    assert is_pefts_own(vars(lazy)["kept"])
    with pytest.raises(AssertionError, match="loaded"):
        _ = waiting.anything


def test_it_is_a_plain_function_whose_names_trl_can_read() -> None:
    with patched("norms"):
        function = peft.prepare_model_for_kbit_training
    assert type(function) is types.FunctionType
    assert function is not prepare_model_for_kbit_training
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*NAMES, "precision"]
    assert parameters["precision"].default == "norms"
    assert inspect.signature(prepare_model_for_kbit_training).parameters["precision"].default == "full"
    assert function.__code__.co_varnames == (*NAMES, "precision")
    assert inspect.getsource(function) == inspect.getsource(prepare_model_for_kbit_training)
    assert (function.__name__, function.__doc__, function.__module__, function.__annotations__) == (
        prepare_model_for_kbit_training.__name__,
        prepare_model_for_kbit_training.__doc__,
        prepare_model_for_kbit_training.__module__,
        prepare_model_for_kbit_training.__annotations__,
    )


def test_what_a_partial_holds_is_out_of_reach() -> None:
    held = functools.partial(peft.prepare_model_for_kbit_training)
    with patched("norms"):
        assert is_pefts_own(held.func)
        kept = functools.partial(peft.prepare_model_for_kbit_training)
    assert precision_of(kept.func) is Precision.NORMS


def test_an_unknown_precision_is_refused_before_anything_is_replaced() -> None:
    with pytest.raises(ConfigError, match="precision"), patched("double"):
        pass
    with pytest.raises(ConfigError, match="precision"):
        patch_peft("double")
    assert is_pefts_own(peft.prepare_model_for_kbit_training)


def test_a_quantized_model_is_prepared_as_chosen_and_restored() -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    with patched(Precision.COMPUTE):
        assert peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=None) is model
    assert model.lm_head.weight.dtype is torch.float32
    assert model.state_dict()["lm_head.weight"].dtype is torch.bfloat16
    kbitwrap.restore(model)
    assert before.diff(Snapshot(model), moved=True) == []


def test_a_library_that_rewrites_the_source_of_pefts_function_finds_nothing_to_rewrite() -> None:
    # As axolotl does: it replaces these lines, and executes the rest among the names of PEFT's module.
    lines = "param.data = param.data.to(torch.float32)"
    assert lines in inspect.getsource(peft.utils.other.prepare_model_for_kbit_training)
    with patched():
        source = inspect.getsource(peft.utils.other.prepare_model_for_kbit_training)
    assert source.startswith("def prepare_model_for_kbit_training(\n")
    assert lines not in source
