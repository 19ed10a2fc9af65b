"""On a CPU, a predicted step of TRL's trainers holds, to the byte, what a tracker counts in the trainer's own step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

import runs
from support import zoo
from support.foreseen import DEPRECATED, Cell, figures, predicted, prepared, spread, tracked
from support.thorough import few

pytestmark = [
    pytest.mark.filterwarnings(DEPRECATED),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]

NAMES = ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "mistral", "phi3", "gemma3")
WAYS = ("norms", "none", "full", "compute", "adapted")
COMPLETION = 4  # tokens
_REENTRANT = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
_OFF: dict[str, Any] = {"gradient_checkpointing": False}
_FOUR: dict[str, Any] = {"gradient_accumulation_steps": 4}

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {},
        _OFF,
        _FOUR,
        _OFF | _FOUR,
        {"packing": True},
        {"packing": True} | _FOUR,
        {"bf16": False, "optim": "sgd"},
        {"loss_type": "dft", "max_grad_norm": 0.0},
        _REENTRANT | {"optim": "adamw_torch"},
        {"optim": "adafactor", "neftune_noise_alpha": 5.0},
    ],
    "dpo": [{}, _OFF, _FOUR, {"loss_type": ["sigmoid", "sft"]}, {"use_weighting": True}, {"bf16": False}],
    "grpo": [{}, _OFF, _FOUR, {"beta": 0.0}, {"steps_per_generation": 2}, {"loss_type": "cispo", "bf16": False}],
    "reward": [{}, _OFF, _FOUR, {"center_rewards_coefficient": 0.1}, {"bf16": False}],
}
CELLS = [cell for kind, settings in SETTINGS.items() for cell in spread(kind, settings, NAMES, WAYS)]
CHOSEN = [cell for number, cell in enumerate(CELLS) if number % 5 == 0]


def load(cell: Cell) -> Any:
    if cell.kind != "reward":
        return zoo.load(cell.name)
    torch.manual_seed(0)  # its head is not in the checkpoint
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        zoo.checkpoint(cell.name),
        num_labels=1,
        dtype=torch.bfloat16,
        quantization_config=runs.NF4,
        device_map={"": "cpu"},
    )


def rows(cell: Cell) -> Dataset:
    """Rows whose sequences are as long as the cell's, with the token that ends them."""

    def text(length: int) -> str:
        return " w9" * length

    half = cell.seq_len // 2
    if dict(cell.settings).get("packing"):
        columns: dict[str, Any] = {"input_ids": [9] * half}
    else:
        columns = {
            "sft": {"input_ids": [9] * cell.seq_len},
            "dpo": {"prompt": text(half), "chosen": text(half - 1), "rejected": text(half - 1)},
            "grpo": {"prompt": text(cell.seq_len - COMPLETION)},
            "reward": {"chosen": text(cell.seq_len - 1), "rejected": text(cell.seq_len - 1)},
        }[cell.kind]
    return Dataset.from_list([columns] * 32)


def arguments(cell: Cell, folder: Path) -> Any:
    options = {"max_steps": 3, "logging_strategy": "no"} | dict(cell.settings)
    if cell.kind in ("sft", "dpo", "reward"):
        options["max_length"] = cell.seq_len
    return runs.config_of(cell.kind, folder, **options)


def real(cell: Cell, model: Any, args: Any) -> Any:
    """The trainer; completions are those that it would generate at most."""
    own: dict[str, Any] = {"reward_funcs": runs.reward} if cell.kind == "grpo" else {}
    cls = runs.TRAINERS[cell.kind][0]
    trainer = cls(
        model,
        args=args,
        train_dataset=rows(cell),
        processing_class=runs.tokenizer(),
        peft_config=cell.lora,
        **own,
    )
    trainer._generate_single_turn = lambda prompt_ids, *_, **__: ([[9] * COMPLETION for _ in prompt_ids], None)
    return trainer


@pytest.mark.parametrize("cell", few(CELLS, CHOSEN), ids=str)
def test_a_step_of_a_trainer_equals_the_real_one_to_the_byte(cell: Cell, tmp_path: Path) -> None:
    model = load(cell)
    args = arguments(cell, tmp_path)
    step = predicted(cell, model, args)
    with prepared(cell, model, args) as base:
        trainer = real(cell, model, args)
        base.adopt(trainer.model)
        # where completions are made for two steps, each second step makes some, and holds the most
        at = dict(cell.settings).get("steps_per_generation", 1)
        assert figures(step) == figures(tracked(trainer, at))
        trainer.model.unload()


DEEP = [
    Cell("sft"),
    Cell("sft", settings=(("packing", True), *_FOUR.items())),
    Cell("dpo"),
    Cell("grpo"),
    Cell("reward"),
]


@pytest.mark.parametrize("cell", few(DEEP, DEEP[1:4]), ids=str)
def test_a_few_blocks_tell_the_step_of_a_deep_model(cell: Cell, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(zoo.checkpoint(cell.name), num_hidden_layers=9)
    args = arguments(cell, tmp_path)
    exact = predicted(cell, config, args, quantization_config=runs.NF4, dtype="bfloat16")
    few_blocks = predicted(cell, config, args, quantization_config=runs.NF4, dtype="bfloat16", exact=False)
    assert (exact.traced_blocks, few_blocks.traced_blocks) == (9, 4)
    assert figures(few_blocks) == figures(exact)


def test_there_are_sixty_cells_of_six_architectures() -> None:
    assert len(CELLS) >= 54  # and those of transformers' own trainer
    assert len({cell.name for cell in CELLS}) >= 6
