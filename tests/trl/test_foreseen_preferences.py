"""On a CPU, a predicted step of TRL's KTO, ORPO and CPO trainers is the trainer's own to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import runs
from kbitwrap import patched
from support import zoo
from support.foreseen import DEPRECATED, Cell, figures, predicted, prepared, spread, tracked
from support.thorough import few
from trl import KTOConfig, KTOTrainer

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

NAMES = ("llama", "qwen3", "gemma2")
WAYS = ("norms", "none", "full")
TRAINERS: dict[str, Any] = {
    "kto": (KTOTrainer, KTOConfig),
    "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "kto": [{}, {"gradient_accumulation_steps": 2}, {"loss_type": "apo_zero_unpaired"}],
    "orpo": [{}, {"gradient_checkpointing": False, "bf16": False}],
    "cpo": [{}, {"loss_type": "simpo"}],
}
CELLS = [cell for kind, settings in SETTINGS.items() for cell in spread(kind, settings, NAMES, WAYS)]
CHOSEN = [CELLS[0], CELLS[6], CELLS[11]]


def rows(cell: Cell) -> Dataset:
    """Rows that have a prompt of half the length, and are cut to the whole of it."""
    half = cell.seq_len // 2
    if cell.kind == "kto":
        columns = {"prompt": runs.text(0, half), "completion": runs.text(1, half - 1), "label": True}
    else:
        # a word of the tokenizer is two tokens, as the trainer makes them
        prompt, chosen, rejected = (runs.text(number, half // 2) for number in range(3))
        columns = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return Dataset.from_list([columns] * 16)


def arguments(cell: Cell, folder: Path) -> Any:
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
    return TRAINERS[cell.kind][1](str(folder), **options | dict(cell.settings))


def real(cell: Cell, model: Any, args: Any) -> Any:
    cls = TRAINERS[cell.kind][0]
    return cls(model, args=args, train_dataset=rows(cell), processing_class=runs.tokenizer(), peft_config=cell.lora)


@pytest.mark.parametrize("cell", few(CELLS, CHOSEN), ids=str)
def test_a_step_of_a_trainer_of_preferences_equals_the_real_one_to_the_byte(cell: Cell, tmp_path: Path) -> None:
    model = zoo.load(cell.name)
    args = arguments(cell, tmp_path)
    step = predicted(cell, model, args)
    if cell.kind == "kto":
        with prepared(cell, model, args) as base:
            trainer = real(cell, model, args)
            base.adopt(trainer.model)
            assert figures(step) == figures(tracked(trainer))
            trainer.model.unload()
        return
    with patched(cell.way):  # these call PEFT's preparation themselves
        assert figures(step) == figures(tracked(real(cell, model, args)))
