"""On a CPU, a predicted step of TRL's trainers holds, to the byte, what a tracker counts in the trainer's own step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import runs
from foreseen import figures, tracked
from kbitwrap import KbitPreparedModel, predict_step
from support import zoo
from trl import SFTTrainer

# TRL 1.16 sets the field by the name that transformers 5.23 deprecates, and calls a method so.
pytestmark = pytest.mark.filterwarnings(r"ignore:`\w*gradient_checkpointing\w*` is deprecated:FutureWarning")

LENGTH = 16


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": False, "gradient_accumulation_steps": 3}], ids=str)
def test_a_step_of_sft_equals_the_real_one_to_the_byte(settings: dict[str, Any], tmp_path: Path) -> None:
    model = zoo.load("llama")
    args = runs.config_of("sft", tmp_path, max_steps=2, max_length=LENGTH, logging_strategy="no", **settings)
    lora = zoo.lora_config("llama", task_type="CAUSAL_LM")
    predicted = predict_step(model, precision="norms", args=args, lora=lora, kernels="cpu")
    assert (predicted.batch_size, predicted.seq_len) == (2, LENGTH)
    checkpointing = args.gradient_checkpointing
    with KbitPreparedModel(model, precision="norms", gradient_checkpointing=checkpointing) as prepared:
        rows = Dataset.from_dict({"input_ids": [[9] * LENGTH] * 12})
        trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=runs.tokenizer(), peft_config=lora)
        prepared.adopt(trainer.model)
        assert figures(predicted) == figures(tracked(trainer))
        trainer.model.unload()
