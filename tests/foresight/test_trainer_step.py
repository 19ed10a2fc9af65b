"""A step of transformers' ``Trainer``, predicted from its arguments, is its own to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

from kbitwrap import ConfigError, predict_step
from support import zoo
from support.foreseen import DEPRECATED, Cell, figures, predicted, prepared, spread, tracked
from support.thorough import few

pytestmark = [
    pytest.mark.filterwarnings(DEPRECATED),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

NAMES = ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "opt")
WAYS = ("norms", "none", "full", "compute", "adapted")
SETTINGS: list[dict[str, Any]] = [
    {},
    {"bf16": True, "gradient_checkpointing": True},
    {"gradient_accumulation_steps": 4},
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}, "optim": "adafactor"},
    {"bf16": True, "weight_decay": 0.1, "label_smoothing_factor": 0.1},
    {"optim": "sgd", "max_grad_norm": 0.0},
]
CELLS = spread("trainer", SETTINGS, NAMES, WAYS)


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**options | settings)


@pytest.mark.parametrize("cell", few(CELLS, CELLS[::6]), ids=str)
def test_a_step_of_the_trainer_equals_the_real_one_to_the_byte(cell: Cell, tmp_path: Path) -> None:
    model = zoo.load(cell.name)
    args = arguments(tmp_path, **dict(cell.settings))
    step = predicted(cell, model, args)
    with prepared(cell, model, args) as base:
        peft_model: Any = get_peft_model(model, cell.lora)
        base.adopt(peft_model)
        row = dict.fromkeys(("input_ids", "labels"), [9] * cell.seq_len)
        rows: Any = [row] * 32
        assert figures(step) == figures(tracked(Trainer(peft_model, args, train_dataset=rows)))


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {}, "^seq_len: TrainingArguments says no length: give one$"),
        ({}, {"seq_len": 0}, "^seq_len: expected a positive number, found 0$"),
        ({}, {"seq_len": 8, "optimizer": "sgd"}, "^optimizer: it is args.optim, 'adamw_torch_fused': leave it out$"),
        ({}, {"seq_len": 8, "autocast": "float16"}, "^autocast: it is what args say of bf16 and fp16: leave it out$"),
        ({"optim": "lomo"}, {"seq_len": 8}, "^optimizer: 'lomo' is not predicted: .*"),
        ({"torch_compile": True}, {"seq_len": 8}, "^args.torch_compile: .*"),
    ],
    ids=["no-length", "length-0", "optimizer", "autocast", "lomo", "compiled"],
)
def test_settings_that_say_nothing_or_something_else_are_refused_in_one_line(
    settings: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        predict_step(zoo.load("llama"), args=arguments(tmp_path, **settings), **options)
    assert "\n" not in str(caught.value)


def test_what_is_no_arguments_object_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^args: expected transformers' TrainingArguments .*, found a dict$"):
        predict_step(zoo.load("llama"), args={}, batch_size=1, seq_len=8)


def test_without_arguments_a_batch_has_to_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^batch_size: give the number, or args of a trainer, or inputs with .*"):
        predict_step(zoo.load("llama"))
