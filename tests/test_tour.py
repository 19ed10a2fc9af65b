"""The notebook docs/tour.ipynb runs from top to bottom, and its stored outputs are what it gives."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tour.ipynb"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> dict[str, str]:
    """What a cell printed, and the text of its last value."""
    found: dict[str, str] = {}
    for output in cell["outputs"]:
        parts = {"stdout": output["text"]} if output["output_type"] == "stream" else output["data"]
        for kind, text in parts.items():
            found[kind] = found.get(kind, "") + "".join(text)
    return found


def run(source: str, names: dict[str, Any]) -> dict[str, str]:
    """Run a cell as a notebook does."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None
    found = {"stdout": printed.getvalue()} if printed.getvalue() else {}
    if value is not None:
        found["text/plain"] = repr(value)
    return found


@contextlib.contextmanager
def settings_put_back() -> Iterator[None]:
    verbosity = logging.get_verbosity()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # the notebook shows that of restore(), and its own filters come on top
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


def test_the_tour_runs_and_gives_what_it_shows() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    with settings_put_back():
        for cell in code_cells():
            assert run("".join(cell["source"]), names) == stored(cell)
    assert names["losses"][-1] < names["losses"][0]


def test_the_tour_tells_the_whole_story_and_nothing_of_the_machine_it_ran_on() -> None:
    outputs = [stored(cell) for cell in code_cells()]
    shown = [output["text/plain"].partition("(")[0] for output in outputs if "text/plain" in output]
    assert shown == ["Plan", "StepMemory", "KbitPreparedModel", "StateDiff", "RestoreReport"]
    assert "/tmp/" not in json.dumps(outputs)
