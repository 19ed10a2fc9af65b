"""The helpers of the tests: a new process has everything imported and nothing run; a cover of pairs has them all."""

from __future__ import annotations

import itertools
import os
from concurrent.futures.process import BrokenProcessPool

import pytest

import forks
from pairwise import pairwise


def fail() -> None:
    raise ValueError("in there")


def test_a_new_process_has_everything_imported() -> None:
    loaded = forks.run(forks.loaded_modules)
    assert {"bitsandbytes", "kbitwrap.cli", "peft", "torch", "transformers", "trainers", "zoo"} <= loaded
    assert "test_helpers" not in loaded


def test_each_call_has_a_process_of_its_own() -> None:
    assert len({os.getpid(), *(forks.run(os.getpid) for _ in range(2))}) == 3


def test_what_is_raised_there_is_raised_here() -> None:
    with pytest.raises(ValueError, match="in there"):
        forks.run(fail)
    with pytest.raises(BrokenProcessPool):
        forks.run(os.abort)


def test_pairwise_covers_every_pair_with_few_cases() -> None:
    axes = ("abcde", range(4), (True, False), (None, 1.5, "x"))
    cases = pairwise(*axes)
    assert len(cases) == len(set(cases)) < 30  # 20 at least, of 120
    for i, j in itertools.combinations(range(len(axes)), 2):
        assert {(case[i], case[j]) for case in cases} == set(itertools.product(axes[i], axes[j]))
    assert cases == pairwise(*axes)
