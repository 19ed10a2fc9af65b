"""Small byte-level models that are trained from nothing, and LoRAs that are trained on them, quantized.

The loop is plain PyTorch with the defaults of TRL's trainers: bfloat16 autocast, where the settings do not turn it off,
checkpointing, fused AdamW without decay, a linear schedule, gradients clipped to a norm of 1.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any, NamedTuple

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM

from kbitwrap import KbitPreparedModel
from kbitwrap.model.quantization import bitsandbytes_config

PEFT = "peft"
FLOAT64 = "float64"
"""The dequantized model, its adapters and their training in float64, where what rounding adds is out of sight."""
IN_FLOAT32 = "-float32"  # how the name of a case ends whose adapters are in float32; without it they are in bfloat16
DISTANCES = ("logits_distance", "gradient_distance")
"""The figures that say how far a case is from float64, in parts of what float64 gives."""
LAST_STEPS = 20  # of a training, of which the mean loss is taken
NUM_BYTES = 256  # a token is a byte
HEAD_SIZE = 32
# Modules of the standard library whose source is the text that adapters are trained on, and others that are held out.
TRAINING_MODULES = ("argparse", "dataclasses", "difflib", "doctest", "inspect", "pathlib", "tarfile", "typing")
HELD_OUT_MODULES = ("configparser", "optparse", "zipfile")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A byte-level model, pretrained from nothing, and how a LoRA on it is trained.

    Attributes:
        repeats: Seeds. Each has a base of its own, and draws of its own for the adapters and the order of the data.
        hidden_size: Width of the model; a multiple of 64.
        num_layers: Decoder layers.
        pretraining_steps: Steps in which the base is trained.
        steps: Steps in which the adapters are trained.
        batch_size: Blocks of text in a batch.
        length: Bytes in a block.
        learning_rate: The adapters', at the first step. It falls linearly to 0.
        rank: The adapters'.
        num_held_out: Blocks of text that no training sees.
        quant: `"nf4"` or `"int8"`.
        autocast: Train the adapters under bfloat16 autocast.
    """

    repeats: int = 3
    hidden_size: int = 128
    num_layers: int = 4
    pretraining_steps: int = 300
    steps: int = 100
    batch_size: int = 8
    length: int = 128
    learning_rate: float = 2e-4
    rank: int = 16
    num_held_out: int = 64
    quant: str = "nf4"
    autocast: bool = True


class Text(NamedTuple):
    """Bytes, as tokens.

    Attributes:
        pretraining: `(num_bytes,)`, int64: English, the help texts of Python.
        training: `(num_blocks, length + 1)`, int64: source code of the standard library.
        held_out: `(num_held_out, length + 1)`, int64: source code of other modules of it.
    """

    pretraining: Tensor
    training: Tensor
    held_out: Tensor


def read_text(settings: Settings) -> Text:
    """Read the text that every Python carries."""
    training, held_out = (_blocks(names, settings.length) for names in (TRAINING_MODULES, HELD_OUT_MODULES))
    evenly_spread = torch.linspace(0, len(held_out) - 1, settings.num_held_out).long()
    english = "\n".join(topics[name] for name in sorted(topics))
    return Text(torch.tensor(list(english.encode())), training, held_out[evenly_spread])


def _blocks(modules: Sequence[str], length: int) -> Tensor:
    """The source of modules as `(num_blocks, length + 1)` tokens: a block's last one is the first of the next."""
    source = "\n".join(inspect.getsource(importlib.import_module(name)) for name in modules)
    return torch.tensor(list(source.encode())).unfold(0, length + 1, length)


def pretrain(text: Text, settings: Settings, seed: int, architecture: str = "llama") -> Any:
    """Train a model from nothing, in float32 under bfloat16 autocast."""
    torch.manual_seed(seed)
    num_heads = settings.hidden_size // HEAD_SIZE
    config = AutoConfig.for_model(
        architecture,
        vocab_size=NUM_BYTES,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=HEAD_SIZE,
        max_position_embeddings=settings.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    num_steps = settings.pretraining_steps
    schedule = LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / num_steps))
    offsets = torch.arange(settings.length + 1)
    for _ in range(num_steps):
        starts = torch.randint(len(text.pretraining) - settings.length, (2 * settings.batch_size, 1))
        _step(model, text.pretraining[starts + offsets], optimizer, schedule, is_autocast=True)
    return model


def _step(model: nn.Module, blocks: Tensor, optimizer: Any, schedule: Any, *, is_autocast: bool) -> float:
    """Take a training step, and return its loss."""
    loss, _ = next_byte_loss(model, blocks, is_autocast=is_autocast)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item()


def next_byte_loss(model: nn.Module, blocks: Tensor, *, is_autocast: bool) -> tuple[Tensor, Tensor]:
    """The mean loss of a byte, in float32 or, where logits are float64, in that; and the logits."""
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), blocks[:, 1:].flatten()), logits


def load(base: Path | str, quant: str) -> Any:
    """A base, quantized, in train mode: in eval mode some CPUs repack its weights, and have no backward then."""
    config = bitsandbytes_config(quant, torch.bfloat16)
    kind: Any = AutoModelForCausalLM
    return kind.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}).train()


def load_exact(base: Path | str, quant: str) -> Any:
    """The quantized base in float64."""
    exact = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, device_map={"": "cpu"})
    return make_exact(exact, load(base, quant))


def make_exact(exact: nn.Module, quantized: nn.Module) -> nn.Module:
    """Give a model in float64 the weights that the layers of the same model hold, which bitsandbytes quantized."""
    for name, module in quantized.named_modules():
        own: Any = exact.get_submodule(name)
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, Linear4bit):
            own.weight.data = dequantize_4bit(weight.data, weight.quant_state).double()
        elif isinstance(module, Linear8bitLt):
            own.weight.data = weight.data.double() * weight.SCB.double().view(-1, 1) / 127
        elif hasattr(module, "variance_epsilon"):  # a norm, whose class casts to float32
            own.forward = functools.partial(
                F.rms_norm, normalized_shape=own.weight.shape, weight=own.weight, eps=own.variance_epsilon
            )
    return exact


def adapt(base: Any, settings: Settings) -> Any:
    """Put a LoRA on a base. Its values are drawn later: PEFT draws other ones for another dtype."""
    config = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config).train()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class Run:
    """A LoRA that is trained in one case with one seed.

    Args:
        name: The case: a precision or PEFT's way, with the dtype of the adapters, or float64.
        settings: What to train.
        seed: Seed of the adapters and of the order of the data: the same in all cases.
        base: The base's checkpoint.
        exact: The quantized base in float64, with adapters, whose values are written over.
    """

    def __init__(self, name: str, settings: Settings, seed: int, base: Path | str, exact: Any = None) -> None:
        self.settings, self.seed, self.exact = settings, seed, exact
        self.model = exact if name == FLOAT64 else self._prepared(name, base)
        self.is_autocast = settings.autocast and name != FLOAT64
        # PEFT's initial values, drawn in float32: the same in each case
        generator = torch.Generator().manual_seed(seed)
        for fqn, parameter in trainable(self.model).items():
            values = torch.zeros(parameter.shape)
            if "lora_A" in fqn:
                bound = parameter.shape[1] ** -0.5
                values.uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(values)

    def _prepared(self, name: str, checkpoint: Path | str) -> Any:
        """The base prepared, with adapters."""
        base = load(checkpoint, self.settings.quant)
        checkpointing = {"use_reentrant": False}
        if name == PEFT:
            base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs=checkpointing)
            return adapt(base, self.settings)
        prepared = KbitPreparedModel(
            base,
            precision=name.removesuffix(IN_FLOAT32),
            adapter_dtype=adapter_dtype(name),
            gradient_checkpointing_kwargs=checkpointing,
        ).prepare()
        model = adapt(base, self.settings)
        prepared.adopt(model)
        return model

    def train(self, text: Text) -> dict[str, Any]:
        """Train it; the losses of each step and of what is held out, and the distances from exact arithmetic."""
        probe = text.training[: 2 * self.settings.batch_size]
        base_loss, start = self.held_out_loss(text), self._distances(probe)
        losses = self.train_steps(text)
        end = self._distances(probe)
        return {
            "base_loss": base_loss,
            "held_out_loss": self.held_out_loss(text),
            "end_loss": fmean(losses[-LAST_STEPS:]),
            **{key: {"start": start[key], "end": end[key]} for key in DISTANCES},
            "train_loss": losses,
        }

    def train_steps(self, text: Text) -> list[float]:
        """Train it on the text, and return the loss of each step."""
        settings = self.settings
        adapters = trainable(self.model).values()
        optimizer = torch.optim.AdamW(adapters, lr=settings.learning_rate, weight_decay=0, fused=True)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
        batches = self._batches(len(text.training))
        return [
            _step(self.model, text.training[next(batches)], optimizer, schedule, is_autocast=self.is_autocast)
            for _ in range(settings.steps)
        ]

    def _batches(self, num_blocks: int) -> Iterator[Tensor]:
        """The numbers of the blocks in each batch, without end: all blocks in one order, then in another."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from torch.randperm(num_blocks, generator=generator).split(self.settings.batch_size)

    @torch.no_grad()
    def held_out_loss(self, text: Text) -> float:
        """The loss of what is held out, in the case's own arithmetic, and in train mode: nothing drops out."""
        total = 0.0
        for blocks in text.held_out.split(2 * self.settings.batch_size):
            loss, _ = next_byte_loss(self.model, blocks, is_autocast=self.is_autocast)
            total += loss.item() * len(blocks)
        return total / len(text.held_out)

    def _distances(self, blocks: Tensor) -> dict[str, float]:
        """How far logits and the adapters' gradients are from those of the same model and adapters in float64."""
        ours = _logits_and_gradients(self.model, blocks, is_autocast=self.is_autocast)
        own = trainable(self.model)
        for name, parameter in trainable(self.exact).items():
            parameter.data = own[name].detach().double()
        exacts = _logits_and_gradients(self.exact, blocks, is_autocast=False)
        pairs = zip(DISTANCES, ours, exacts, strict=True)
        return {key: ((values - exact).norm() / exact.norm()).item() for key, values, exact in pairs}


def adapter_dtype(name: str) -> str:
    """The dtype of a case's adapters."""
    if name == FLOAT64:
        return "float64"
    return "float32" if name == PEFT or name.endswith(IN_FLOAT32) else "bfloat16"


def _logits_and_gradients(model: nn.Module, blocks: Tensor, *, is_autocast: bool) -> tuple[Tensor, Tensor]:
    """The logits, and all gradients as one vector, in float64."""
    loss, logits = next_byte_loss(model, blocks, is_autocast=is_autocast)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    vector = torch.cat([found[name].double().flatten() for name in sorted(found)])
    model.zero_grad(set_to_none=True)
    return logits.detach().double(), vector
