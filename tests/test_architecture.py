"""The shape of the package: who may import whom, what is public, and that the examples are true."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import kbitwrap
from kbitwrap import errors
from support import forks
from support.thorough import few

PACKAGE = Path(kbitwrap.__file__).parent
# Each room, a folder or a file, imports only from rooms to its left; "" is the package's own `__init__`.
ROOMS = (
    *("errors", "config", "reports", "tensors", "model", "edits", "preparation", "foresight", "export", "manifest"),
    *("checkpoints", "prepared", "drop_in", "", "integrations", "cli", "__main__"),
)
# Loaded only when asked for: the first three take seconds, and each may be absent where it is not used.
LAZY = ("transformers", "peft", "bitsandbytes", "accelerate", "deepspeed", "safetensors")


@functools.cache
def source(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path: Path) -> str:
    room = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return "" if room == "__init__" else room


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[tuple[str, str]]:
    """Every import of the package in a file, inside functions too, as `(room, name)`; `""` is the package itself."""
    parents = path.relative_to(PACKAGE.parent).parts[:-1]
    found = set()
    for node in ast.walk(source(path)):
        if isinstance(node, ast.ImportFrom):
            base = list(parents[: len(parents) - node.level + 1]) if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module[:1] == [PACKAGE.name]:
                found |= {(module[1] if len(module) > 1 else "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == PACKAGE.name:
                    found.add((parts[1] if len(parts) > 1 else "", ""))
    return found


def modules() -> list[str]:
    names = [PACKAGE.name]
    return names + [info.name for info in pkgutil.walk_packages([str(PACKAGE)], f"{PACKAGE.name}.")]


# ----------------------------------------------------------------------------------------------------
# Rooms.
# ----------------------------------------------------------------------------------------------------


def test_every_file_is_in_a_room() -> None:
    assert {room_of(path) for path in files()} == {*ROOMS}


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room or "kbitwrap")
def test_a_room_imports_only_from_rooms_to_its_left(room: str) -> None:
    allowed = {room, *ROOMS[: ROOMS.index(room)]}
    for path in files():
        if room_of(path) == room:
            found = {other for other, name in imports(path) if (other, name) not in package_names()}
            assert found <= allowed, path


def package_names() -> set[tuple[str, str]]:
    """The imports of `from kbitwrap import cli`: a room, and no name of the package."""
    return {("", room) for room in ROOMS}


def imported_files(path: Path) -> set[Path]:
    """The files of the package that a file imports."""
    parents = path.relative_to(PACKAGE.parent).parts[:-1]
    found = set()
    for node in ast.walk(source(path)):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            module = PACKAGE.parent.joinpath(*parents[: len(parents) - node.level + 1], *node.module.split("."))
            found.add(module.with_suffix(".py"))
    return found


def test_no_two_files_of_a_room_import_each_other_by_any_way() -> None:
    graph = {path: {p for p in imported_files(path) if room_of(p) == room_of(path)} for path in files()}
    while leaves := {path for path, others in graph.items() if not others}:
        graph = {path: others - leaves for path, others in graph.items() if path not in leaves}
    assert graph == {}


@pytest.mark.parametrize("path", sorted(p for p in PACKAGE.rglob("__init__.py") if p.parent != PACKAGE), ids=str)
def test_a_folders_init_is_a_docstring(path: Path) -> None:
    if room_of(path) in ("cli", "integrations"):  # their public names are theirs
        return
    assert [type(node) for node in source(path).body] == [ast.Expr]


def test_the_walk_sees_every_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / PACKAGE.name
    package.mkdir()
    file = package / "room.py"
    file.write_text(
        "from .plan import Plan\nfrom . import roles\nimport kbitwrap.storage\nfrom kbitwrap import Plan\n"
        "from kbitwrap.reports import StateDiff\nimport torch\n"
        "def late():\n    from .prepared import prepared_of\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert imports(file) == {
        ("plan", "Plan"),
        ("", "roles"),
        ("storage", ""),
        ("", "Plan"),
        ("reports", "StateDiff"),
        ("prepared", "prepared_of"),
    }


def imported_roots(path: Path) -> set[str]:
    """The top-level packages that a file imports, whenever it does."""
    found = set()
    for node in ast.walk(source(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", ["errors.py", "config.py", "reports.py", "edits/journal.py"])
def test_errors_settings_reports_and_the_journal_know_nothing_of_torch(path: str) -> None:
    assert imported_roots(PACKAGE / path) <= set(sys.stdlib_module_names)


def test_errors_import_nothing_of_the_package() -> None:
    assert imports(PACKAGE / "errors.py") == set()


def quantization_blind_files() -> list[Path]:
    """The files of the rooms that must hold for any quantization library."""
    return [path for path in files() if room_of(path) not in ("integrations", "cli", "__main__")]


@pytest.mark.parametrize("path", quantization_blind_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_files_on_quantization_alone_name_the_quantization_libraries(path: Path) -> None:
    # what a quantization permits, here and for foresight, and what bitsandbytes' layers compute with
    if path.name in ("quantization.py", "bitsandbytes_layers.py"):
        return
    tree = source(path)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    # As a module to look up; docstrings and messages may speak of them.
    named = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    }
    libraries = ("bitsandbytes", "torchao", "hqq", "optimum", "gptqmodel", "auto_gptq", "awq", "aqlm", "eetq")
    assert not {name for name in named if name.partition(".")[0] in libraries}
    assert not imported_roots(path) & set(libraries)


def test_no_error_is_swallowed() -> None:
    silent = []
    for path in files():
        for node in ast.walk(source(path)):
            if isinstance(node, ast.ExceptHandler):
                is_empty = all(isinstance(child, ast.Pass) for child in node.body)
                if node.type is None or is_empty:
                    silent.append(f"{path.name}:{node.lineno}")
    assert silent == []


def test_no_file_imports_a_private_name_of_another() -> None:
    private = []
    for path in files():
        for node in ast.walk(source(path)):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(PACKAGE.name)):
                private += [f"{path.name}: {alias.name}" for alias in node.names if alias.name.startswith("_")]
    assert [found for found in private if not found.endswith("__")] == []


def test_what_the_project_installs_exists() -> None:
    # By a pattern: Python 3.10 has no tomllib.
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    targets = re.findall(r'^\w+ = "(kbitwrap[\w.]*):(\w+)"$', project, re.MULTILINE)
    assert targets
    for module, name in targets:
        assert callable(getattr(importlib.import_module(module), name))


# ----------------------------------------------------------------------------------------------------
# Importing.
# ----------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


STAGES = [
    "import kbitwrap",
    "import warnings, torch\n"
    "warnings.simplefilter('ignore')\n"
    "model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)).half()\n"
    "for precision in ('full', 'norms', 'none'):\n"
    "    with kbitwrap.KbitPreparedModel(model, precision=precision) as prepared: prepared.verify()",
    "from kbitwrap import *",
]


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """What a new process has loaded: with the package, after preparing a plain model, and with every public name."""
    lines = [f"{stage}\nprint(json.dumps(sorted(sys.modules)))" for stage in STAGES]
    program = "\n".join(["import json, sys", *lines])
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return [set(json.loads(line)) for line in result.stdout.splitlines()]


@pytest.mark.thorough
def test_importing_loads_neither_torch_nor_any_library_of_the_field(loaded: list[set[str]]) -> None:
    package, _, names = loaded
    assert "kbitwrap" in package
    assert package & {"torch", *LAZY} == set()
    assert "torch" in names
    assert names & set(LAZY) == set()


def test_preparing_a_plain_model_loads_none_either_and_only_the_rooms_that_it_needs(loaded: list[set[str]]) -> None:
    _, prepared, _ = loaded
    assert prepared & set(LAZY) == set()
    assert prepared & {"pydantic", "kbitwrap.export", "kbitwrap.foresight", "kbitwrap.manifest"} == set()


def test_importing_warns_of_nothing_and_prints_nothing() -> None:
    program = (
        "import sys, warnings\n"
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'kbitwrap']: del sys.modules[name]\n"
        "warnings.simplefilter('error')\n"
        "import kbitwrap\n"
        "[getattr(kbitwrap, name) for name in kbitwrap.__all__]\n"
    )
    assert forks.run_program(program) == ("", "")


# ----------------------------------------------------------------------------------------------------
# Public names.
# ----------------------------------------------------------------------------------------------------


def test_the_public_names_are_sorted_and_there() -> None:
    assert kbitwrap.__all__ == sorted(kbitwrap.__all__)
    assert len(set(kbitwrap.__all__)) == len(kbitwrap.__all__)
    assert [name for name in kbitwrap.__all__ if not hasattr(kbitwrap, name)] == []


def test_nothing_else_looks_public() -> None:
    assert dir(kbitwrap) == kbitwrap.__all__


def exceptions() -> list[type[BaseException]]:
    return [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    ]


def test_every_error_is_exported_and_of_the_tree() -> None:
    assert len(exceptions()) > 1
    for error in exceptions():
        assert error.__name__ in kbitwrap.__all__
        assert getattr(kbitwrap, error.__name__) is error
        assert issubclass(error, kbitwrap.KbitWrapError)
        # Also what a caller who does not know kbitwrap would catch.
        builtins = [base for base in error.__mro__ if base.__module__ == "builtins"]
        assert error is kbitwrap.KbitWrapError or builtins[0] is not Exception


def test_the_tree_of_errors_is_drawn_as_it_is() -> None:
    drawn = errors.__doc__ or ""
    for error in exceptions():
        # Drawn with the builtin exception that it is; below another error of the tree that goes without saying.
        builtins = [base for base in error.__bases__ if base.__module__ == "builtins"]
        name = f"{error.__name__}({builtins[0].__name__})" if builtins else f"{error.__name__} "
        assert name in drawn
        assert builtins or error.__bases__[0] in exceptions()


def public(module: Any) -> list[tuple[str, Any]]:
    """The classes and functions of a module, and their methods and properties, private ones left out."""
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(value):
            found.append((name, value))
            for key, member in vars(value).items():
                function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                if not key.startswith("_") and inspect.isfunction(function):
                    found.append((f"{name}.{key}", function))
        elif inspect.isfunction(value):
            found.append((name, value))
    return found


@pytest.mark.parametrize("name", modules())
def test_everything_public_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert (module.__doc__ or "").strip()
    bare = []
    for key, value in public(module):
        # A dataclass without a docstring gets its signature for one.
        doc = value.__doc__ or ""
        if not doc.strip() or doc.startswith(f"{value.__name__}("):
            bare.append(key)
    assert bare == []


@pytest.mark.parametrize("name", [n for n in kbitwrap.__all__ if inspect.isfunction(getattr(kbitwrap, n, None))])
def test_every_argument_of_a_public_function_is_described(name: str) -> None:
    function = getattr(kbitwrap, name)
    arguments = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    assert [argument for argument in arguments if f"{argument}:" not in (function.__doc__ or "")] == []


def test_a_prediction_takes_what_the_predictor_takes() -> None:
    predictor, function = (inspect.signature(one).parameters for one in (kbitwrap.StepPredictor, kbitwrap.predict_step))
    assert {**predictor} == {name: function[name] for name in function if name not in ("batch_size", "seq_len")}


# ----------------------------------------------------------------------------------------------------
# Examples.
# ----------------------------------------------------------------------------------------------------


# The example of a prediction takes as long as all others: by default the tests of predictions do for it.
@pytest.mark.parametrize("name", few(modules(), [name for name in modules() if name != "kbitwrap.foresight.predict"]))
def test_the_examples_are_true(name: str) -> None:
    # Examples may set warning filters, as a reader's own session would.
    with warnings.catch_warnings():
        result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    with_examples = {
        test.name.removeprefix(f"{name}.")
        for name in modules()
        for test in finder.find(importlib.import_module(name))
        if test.examples
    }
    assert {"KbitPreparedModel", "build_plan", "prepare_model_for_kbit_training", "PrepareConfig"} <= with_examples
