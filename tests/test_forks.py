"""The helper of tests that need a new process: it is another one, with everything imported and nothing run."""

from __future__ import annotations

import os
from concurrent.futures.process import BrokenProcessPool

import pytest

import forks


def fail() -> None:
    raise ValueError("in there")


def test_a_new_process_has_everything_imported() -> None:
    loaded = forks.run(forks.loaded_modules)
    assert {"bitsandbytes", "kbitwrap.cli", "peft", "torch", "transformers", "trainers", "zoo"} <= loaded
    assert "test_forks" not in loaded


def test_each_call_has_a_process_of_its_own() -> None:
    assert len({os.getpid(), *(forks.run(os.getpid) for _ in range(2))}) == 3


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(ValueError, match="in there"):
        forks.run(fail)
    with pytest.raises(BrokenProcessPool):
        forks.run(os.abort)
