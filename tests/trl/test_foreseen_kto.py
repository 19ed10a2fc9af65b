"""On a CPU, a predicted step of TRL's KTO trainer is the trainer's own to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import runs
from support import zoo
from support.foreseen import DEPRECATED, Cell, figures, predicted, prepared, spread, tracked
from support.thorough import few
from trl import KTOConfig, KTOTrainer

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

NAMES = ("llama", "qwen3", "gemma2")
WAYS = ("norms", "none", "full")
SETTINGS: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 2}, {"loss_type": "apo_zero_unpaired"}]
CELLS = spread("kto", SETTINGS, NAMES, WAYS)


def arguments(cell: Cell, folder: Path) -> KTOConfig:
    options: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "max_length": cell.seq_len,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return KTOConfig(str(folder), **options | dict(cell.settings))


def real(cell: Cell, model: Any, args: Any) -> Any:
    half = cell.seq_len // 2
    row = {"prompt": runs.text(0, half), "completion": runs.text(1, half - 1), "label": True}
    rows = Dataset.from_list([row] * 16)
    return KTOTrainer(model, args=args, train_dataset=rows, processing_class=runs.tokenizer(), peft_config=cell.lora)


@pytest.mark.parametrize("cell", few(CELLS, CELLS[:1]), ids=str)
def test_a_step_of_a_trainer_of_preferences_equals_the_real_one_to_the_byte(cell: Cell, tmp_path: Path) -> None:
    model = zoo.load(cell.name)
    args = arguments(cell, tmp_path)
    step = predicted(cell, model, args)
    with prepared(cell, model, args) as base:
        trainer = real(cell, model, args)
        base.adopt(trainer.model)
        assert figures(step) == figures(tracked(trainer))
        trainer.model.unload()
