"""Small models that learned a text, adapters that were trained on them, and what plain transformers says of merges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kbitwrap import KbitPreparedModel
from kbitwrap.model.quantization import bitsandbytes_config

SETTINGS: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "pretraining_steps": 100,
    "length": 64,
    "batch_size": 4,
    "num_held_out": 32,
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, with a chat template."""
    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    of_bytes = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = PreTrainedTokenizerFast(tokenizer_object=of_bytes)
    found.chat_template = "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
    return found


@dataclass
class TextRun:
    """A base that learned English, and a LoRA that was trained on it, quantized, to predict source code."""

    folder: Path
    quant: str
    text: Any

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @functools.cached_property
    def texts(self) -> list[str]:
        """What no training saw."""
        return [bytes(row.tolist()).decode("latin-1") for row in self.text.held_out]

    @functools.cached_property
    def rows(self) -> list[torch.Tensor]:
        return [torch.tensor(tokenizer()(text)["input_ids"]) for text in self.texts]

    def load(self, quant: str | None = None, folder: Path | None = None) -> Any:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
        if quant is not None:
            options["quantization_config"] = bitsandbytes_config(quant, torch.bfloat16)
        return AutoModelForCausalLM.from_pretrained(folder or self.base, **options)

    def reload(self) -> Any:
        """PEFT's merge onto the base's own weights."""
        return PeftModel.from_pretrained(self.load(), str(self.adapter)).merge_and_unload()

    def adapter_model(self) -> Any:
        return PeftModel.from_pretrained(self.load(self.quant), str(self.adapter))

    def evaluate(self, model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of each text, and its log-probabilities; in train mode, as it was trained: nothing drops out."""
        losses, found = [], []
        for row in self.rows:
            with torch.no_grad():
                logits = model.train()(input_ids=row[None]).logits[0, :-1].double()
            losses.append(F.cross_entropy(logits, row[1:]))
            found.append(logits.log_softmax(-1))
        return torch.stack(losses), found


def divergences(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = zip(found, expected, strict=True)
    return torch.stack([F.kl_div(one, other, reduction="batchmean", log_target=True) for one, other in pairs])


def make_run(
    figures: Callable[[str], Any], folder: Path, architecture: str, quant: str, rate: float, seed: int = 0, **lora: Any
) -> TextRun:
    """Train a base, if there is none, and an adapter; the larger the rate, the larger its delta."""
    llamas = figures("llamas")
    settings = llamas.Settings(**SETTINGS)
    text = llamas.read_text(settings)
    run = TextRun(folder, quant, text)
    if not run.base.exists():
        llamas.pretrain(text, settings, seed, architecture).bfloat16().save_pretrained(run.base)
        tokenizer().save_pretrained(run.base)
    torch.manual_seed(seed)
    with KbitPreparedModel(run.load(quant), gradient_checkpointing=False) as prepared:
        targets: Any = ["q_proj", "v_proj"] if architecture == "mixtral" else "all-linear"
        options = {"target_modules": targets, "target_parameters": EXPERTS if architecture == "mixtral" else None}
        config = LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **{**options, **lora})
        model = get_peft_model(prepared.model, config).train()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate)
        for rows in text.training.split(4)[seed * 60 : seed * 60 + 60]:
            llamas.next_byte_loss(model, rows, is_autocast=True)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(run.adapter)
        prepared.manifest().save(run.adapter / "kbitwrap.json")
    return run
