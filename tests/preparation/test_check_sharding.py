"""What an engine will do with each precision is said beforehand; test_engines.py holds it against the engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from kbitwrap import ConfigError, Precision, UnsupportedModelError, check_sharding
from support import zoo
from support.snapshot import Snapshot

ENGINES = ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")


def load(storage: torch.dtype) -> transformers.PreTrainedModel:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=storage
    )
    return zoo.load("llama", quantization_config=config)


@pytest.mark.parametrize("engine", ENGINES)
def test_it_answers_for_each_precision_and_changes_nothing(engine: str) -> None:
    model = zoo.load("llama")
    before = Snapshot(model)
    report = check_sharding(model, engine, torch.bfloat16)
    assert before.diff(Snapshot(model)) == []
    assert [*report.outcomes] == [str(precision) for precision in Precision]
    assert json.loads(json.dumps(report.to_dict()))["param_dtype"] == "bfloat16"
    lines = str(report).splitlines()
    assert lines[0] == f"engine {engine!r}, param_dtype bfloat16"
    assert lines[1].split() == ["precision", "trains", "restore,", "suspended", "export,", "manifest"]


def test_packed_weights_that_a_policy_would_cast_are_found() -> None:
    model = load(torch.bfloat16)
    for engine in ("fsdp1", "fsdp2"):
        assert check_sharding(model, engine, "bfloat16").outcomes["norms"].trains
        outcome = check_sharding(model, engine, "float16").outcomes["norms"]
        assert not outcome.trains
        assert "bnb_4bit_quant_storage=float16" in outcome.notes[0]


def test_what_cannot_be_laid_out_flat_is_named() -> None:
    integers = check_sharding(load(torch.uint8), "fsdp1").outcomes["norms"]
    assert not integers.trains
    assert "q_proj.weight is uint8" in integers.notes[0]
    uniform = check_sharding(load(torch.bfloat16), "fsdp1").outcomes
    assert [name for name, outcome in uniform.items() if outcome.trains] == ["norms", "adapted", "none"]
    assert "embed_tokens.weight in float32" in uniform["full"].notes[0]


def test_8_bit_weights_have_to_be_ignored() -> None:
    report = check_sharding(zoo.load("llama", "int8"), "fsdp2")
    assert any("ignored_params" in note for note in report.outcomes["none"].notes)


def test_a_model_that_cannot_be_prepared_is_an_answer() -> None:
    with torch.device("meta"):
        meta = torch.nn.Sequential(torch.nn.LayerNorm(4)).bfloat16()
    assert check_sharding(meta, "ddp").outcomes["full"].restores
    lazy = torch.nn.Sequential(torch.nn.LazyLinear(4))
    outcome = check_sharding(lazy, "ddp").outcomes["full"]
    assert (outcome.trains, outcome.restores, outcome.exports) == (False, False, False)
    assert "not initialized" in outcome.notes[0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.nn.Linear(2, 2), "fsdp"), ConfigError),
        ((torch.nn.Linear(2, 2), None), ConfigError),
        ((torch.nn.Linear(2, 2), "fsdp2", torch.int8), ConfigError),
        ((torch.nn.Linear(2, 2), "fsdp2", "half precision"), ConfigError),
        (("llama", "fsdp2"), UnsupportedModelError),
    ],
)
def test_bad_arguments_are_refused(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        check_sharding(*arguments)
