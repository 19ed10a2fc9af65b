"""Settings that every test shares."""

import gc
import importlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and the command line honours it

import pytest

from support.shared import checkpoints

checkpoints()  # before other processes are started, so that they share it


def pytest_configure(config: pytest.Config) -> None:
    """Import what the tests need, unless they run in other processes: it takes seconds."""
    is_run_elsewhere = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if is_run_elsewhere:
        signal.signal(signal.SIGINT, _exit)
    else:
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # what processes of a test print is captured as its own
        importlib.import_module("support.forks").start()
        capture.suspend_global_capture()


def _exit(*_: object) -> None:
    """Say in one line that the run was interrupted: where it was is a line of pytest's own."""
    pytest.exit("interrupted")


@pytest.fixture(scope="module")
def figures() -> Iterator[Callable[[str], Any]]:
    """The modules of docs/figures, by name; they find each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "docs" / "figures")
        yield importlib.import_module


@pytest.fixture
def repacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit layers that are made from here on repack their weights when they run in eval mode."""
    importlib.import_module("support.settings").repack(monkeypatch)


@pytest.fixture
def not_repacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """4-bit layers that are made from here on compute in eval mode as in training, to the bit, on every CPU."""
    importlib.import_module("support.settings").repack(monkeypatch, False)


@pytest.fixture(scope="module", autouse=True)
def _no_search_for_garbage_in_libraries() -> None:
    """Exclude what is loaded from garbage collection: trainers and meters collect often, and it takes 0.3 s."""
    gc.collect()
    gc.freeze()
