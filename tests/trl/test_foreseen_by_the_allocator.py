"""What torch's allocator gives out in a trainer's step on a CPU is what was predicted, within 1 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset

import runs
from kbitwrap import predict_step
from support import zoo
from support.foreseen import DEPRECATED, allocated
from support.thorough import few

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

LENGTH = 256  # tokens; with half as many, a kernel of a CPU with AVX512 takes over 1 % beside its outputs
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}),
    ("sft", {"gradient_accumulation_steps": 2, "gradient_checkpointing": False}),
    ("sft", {"packing": True}),
    ("dpo", {}),
    ("reward", {}),
]
NAMES = ("llama", "qwen3", "gemma2", "mistral", "gpt2", "phi3")
CELLS = [(kind, name, settings) for name in NAMES for kind, settings in SETTINGS]
CHOSEN = [CELLS[0], CELLS[8]]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 2048, "n_embd": 256}


def saved(name: str, folder: Path) -> str:
    """A model whose tensors are larger than the zoo's."""
    config = transformers.AutoConfig.from_pretrained(zoo.checkpoint(name))
    for key, value in SIZES.items():
        if hasattr(config, key):
            setattr(config, key, value)
    config.max_position_embeddings = 2 * LENGTH
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return str(folder)


def rows(kind: str) -> Dataset:
    """Rows of the length, or cut to it: a word of the tokenizer is two tokens."""
    prompt = runs.text(0, LENGTH // 4)
    columns = {
        "sft": {"input_ids": [9] * LENGTH},
        "dpo": {"prompt": prompt, "chosen": runs.text(1, LENGTH // 2), "rejected": runs.text(2, LENGTH // 2)},
        "reward": {"chosen_ids": [9] * LENGTH, "rejected_ids": [9] * LENGTH},
    }
    return Dataset.from_list([columns[kind]] * 16)


@pytest.mark.parametrize(("kind", "name", "settings"), few(CELLS, CHOSEN), ids=str)
def test_the_allocator_gives_out_what_was_predicted(
    kind: str, name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    source = saved(name, tmp_path / "model")
    auto: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if kind == "reward":
        auto, options = transformers.AutoModelForSequenceClassification, {"num_labels": 1}
    model = auto.from_pretrained(
        source, quantization_config=runs.NF4, dtype=torch.bfloat16, device_map={"": "cpu"}, **options
    )
    trainer = runs.TRAINERS[kind][0](
        model,
        args=runs.config_of(kind, tmp_path, max_length=LENGTH, **settings),
        train_dataset=rows(kind),
        processing_class=runs.tokenizer(),
        peft_config=zoo.lora_config(name, task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM"),
    )
    step = predict_step(trainer, kernels="cpu", precision="unprepared", exact=True)
    found = step.static_bytes + allocated(trainer)
    assert abs(found - step.peak_bytes) <= step.peak_bytes / 100
