"""TRL's trainers on a small llama, with a dataset for each, told apart bit for bit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BitsAndBytesConfig, PreTrainedTokenizerFast

from support import pages, zoo
from support.snapshot import Snapshot
from support.trainers import trained_weights
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

NUM_STEPS = 3
TRAINERS = {
    "sft": (SFTTrainer, SFTConfig),
    "dpo": (DPOTrainer, DPOConfig),
    "grpo": (GRPOTrainer, GRPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(zoo.VOCAB_SIZE)}
    made = Tokenizer(models.WordLevel(words, unk_token="w7"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", bos_token="w1", eos_token="w2")


def text(number: int, length: int) -> str:
    """As many words as `length`, the same for a number at each call."""
    return "".join(f" w{zoo.FIRST_ORDINARY_ID + (7 * number + 3 * i) % 40}" for i in range(length))


@functools.cache
def dataset(kind: str) -> Dataset:
    rows = range(2 * NUM_STEPS)
    columns = {
        "sft": {"text": [text(i, 10) for i in rows]},
        "grpo": {"prompt": [text(i, 4) for i in rows]},
        "reward": {"chosen": [text(i + 1, 9) for i in rows], "rejected": [text(i + 2, 9) for i in rows]},
    }
    answers = {"chosen": [text(i + 1, 5) for i in rows], "rejected": [text(i + 2, 6) for i in rows]}
    return Dataset.from_dict(columns.get(kind) or {"prompt": [text(i, 4) for i in rows]} | answers)


def reward(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def load(kind: str) -> transformers.PreTrainedModel:
    if kind != "reward":
        return zoo.load("llama")
    torch.manual_seed(0)  # its head is not in the checkpoint
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        zoo.checkpoint("llama"), num_labels=1, dtype=torch.bfloat16, quantization_config=NF4, device_map={"": "cpu"}
    )


def config_of(kind: str, folder: Path, **settings: Any) -> Any:
    """The trainer's arguments: its own defaults (bf16, checkpointing) but for what makes a run short."""
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    if kind == "grpo":
        options |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    return TRAINERS[kind][1](**options | settings)


def trainer_for(kind: str, source: str, folder: Path, *, model: Any = None, lora: Any = None, **settings: Any) -> Any:
    """One of TRL's trainers that keeps each step's loss.

    Args:
        kind: A key of `TRAINERS`.
        source: `"model"`: it is given the quantized model and a `peft_config`; `"name"`: a folder, a
            `quantization_config` and a `peft_config`; `"peft"`: the model with adapters on it.
        folder: For its output.
        model: The quantized model to give it, else a fresh one.
        lora: Fields of the adapter's config.
        **settings: Fields of its arguments, and further parameters of its own.
    """
    own = ("callbacks", "eval_dataset", "ref_model", "reward_funcs")
    passed = {name: settings.pop(name) for name in own if name in settings}
    if kind == "grpo":
        passed.setdefault("reward_funcs", reward)
    if source == "name":
        settings["model_init_kwargs"] = {"dtype": "bfloat16", "device_map": {"": "cpu"}}
    adapter = zoo.lora_config("llama", task_type="SEQ_CLS" if kind == "reward" else "CAUSAL_LM", **lora or {})
    if source == "name":
        model = str(zoo.checkpoint("llama"))
        passed |= {"quantization_config": NF4, "peft_config": adapter}
    else:
        model = load(kind) if model is None else model
        torch.manual_seed(0)
        if source == "peft":
            model = peft.get_peft_model(model, adapter)
        else:
            passed["peft_config"] = adapter
    cls = TRAINERS[kind][0]
    args = config_of(kind, folder, **settings)
    trainer = cls(model, args=args, train_dataset=dataset(kind), processing_class=tokenizer(), **passed)
    trainer.losses = []
    training_step = trainer.training_step

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss = training_step(*args, **kwargs)
        trainer.losses.append(loss.item())
        return loss

    trainer.training_step = recorded
    return trainer


def block(page: Path, text: str) -> Any:
    """The page's one block of code that holds a text, compiled."""
    return compile(pages.program(page, text), str(page), "exec")


def outcome(trainer: Any) -> tuple[list[float], dict[str, object]]:
    """Losses and trained weights."""
    return trainer.losses, trained_weights(trainer.model)


class BaseSnapshot(Snapshot):
    """A snapshot of the model under a trainer's adapters, without them: training changes those."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.model.get_base_model())
        adapters = ("lora_", "modules_to_save")
        self.items = {
            key: item for key, item in self.items.items() if not any(a in key.split(": ")[0] for a in adapters)
        }


@contextlib.contextmanager
def leaving_nothing(trainer: Any, **kwargs: Any) -> Iterator[None]:
    """Expect the base, and the trainer's callbacks, to be in the end as they were, errors or not."""
    before, callbacks = BaseSnapshot(trainer), list(trainer.callback_handler.callbacks)
    try:
        yield
    finally:
        found = before.diff(BaseSnapshot(trainer), **kwargs)
        assert not found, "\n".join(found)
        assert trainer.callback_handler.callbacks == callbacks
