"""A run on the disk, which the tests of the doctor examine and damage copies of."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from kbitwrap import KbitPreparedModel
from support import trainers, zoo


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run, and what can be made of it: its base, its output, and merged models. It is not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    model = zoo.load("llama")
    model.save_pretrained(folder / "base")
    with KbitPreparedModel(model) as prepared:
        peft_model = trainers.adapt(model)
        trainers.save_run(peft_model, folder / "run")
        prepared.export(folder / "merged", merge_adapters=True, max_shard_size="100KB")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Merge lora module to 4-bit", UserWarning)
        peft_model.merge_and_unload().save_pretrained(folder / "requantized")
    return folder
