"""Trains the same LoRA under several arithmetics, and compares the losses with each other and with exact ones.

The loop is plain PyTorch with the defaults of TRL's trainers: bfloat16 autocast, where
the settings do not turn it off, checkpointing, fused AdamW without decay, a linear
schedule, gradients clipped to a norm of 1.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import operator
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from .. import KbitPreparedModel
from ..model.quantization import bitsandbytes_config
from .environment import environment
from .settings import (
    DISTANCES,
    FLOAT64,
    LAST_STEPS,
    PEFT,
    BenchError,
    Figures,
    LossSettings,
)

NUM_BYTES = 256
"""The vocabulary: a token is a byte."""
COMPARED_WITH = {
    "norms": "none",
    "none-float32": "none",
    "norms-float32": "none-float32",
    PEFT: "none-float32",
    FLOAT64: "none",
    "full-float32": "none-float32",
}
"""For each case, the one that it differs from in one respect."""

Runs = dict[str, list[Figures]]
"""The figures of each case, one for each seed."""

# Modules of the standard library whose source is the text that adapters are trained on.
_TRAINING_MODULES = (
    "argparse",
    "dataclasses",
    "difflib",
    "doctest",
    "inspect",
    "pathlib",
    "tarfile",
    "typing",
)
_HELD_OUT_MODULES = ("configparser", "optparse", "zipfile")
_PRETRAINING_RATE = 3e-3
_WARMUP_STEPS = 20
_HEAD_SIZE = 32
_IN_FLOAT32 = "-float32"  # how the name of a case ends whose adapters are in float32


@dataclass(frozen=True)
class Text:
    """Bytes, as tokens.

    Attributes:
        pretraining: ``(num_bytes,)``, int64: English, the help texts of Python.
        training: ``(num_blocks, length + 1)``, int64: source code of the standard
            library.
        held_out: ``(num_held_out, length + 1)``, int64: source code of other modules of
            it.
    """

    pretraining: Tensor
    training: Tensor
    held_out: Tensor


def read_text(settings: LossSettings) -> Text:
    """Read the text that every Python carries.

    Args:
        settings: The length of a block, the number of those held out, and the device.

    Returns:
        The text.

    Raises:
        BenchError: The standard library has no source code here, or too little.
    """
    from pydoc_data.topics import topics

    try:
        training = _blocks(_sources(_TRAINING_MODULES), settings)
        held_out = _blocks(_sources(_HELD_OUT_MODULES), settings)
    except OSError as error:
        raise BenchError(
            f"--loss trains on the source code of the standard library: {error}"
        ) from error
    if len(held_out) < settings.num_held_out or len(training) < settings.batch_size:
        raise BenchError(
            f"--loss: the standard library's source has only {len(training)} and {len(held_out)} blocks"
        )
    english = "\n".join(topics[name] for name in sorted(topics))
    evenly_spread = torch.linspace(0, len(held_out) - 1, settings.num_held_out).long()
    return Text(
        _tokens(english, settings),
        training,
        held_out[evenly_spread],
    )


def _sources(modules: Sequence[str]) -> str:
    return "\n".join(
        inspect.getsource(importlib.import_module(name)) for name in modules
    )


def _blocks(text: str, settings: LossSettings) -> Tensor:
    """Text as ``(num_blocks, length + 1)`` tokens: a block's last one is the first of the next."""
    return _tokens(text, settings).unfold(
        0,
        settings.length + 1,
        settings.length,
    )


def _tokens(text: str, settings: LossSettings) -> Tensor:
    return torch.tensor(list(text.encode()), device=settings.device)


def run_loss(
    settings: LossSettings,
    cases: Sequence[str],
    show: Callable[[str], None],
    folder: Path | None = None,
) -> Figures:
    """Train each case with each seed.

    Args:
        settings: What to train.
        cases: Names out of ``LOSS_CASES``.
        show: Called with a line of progress before each part.
        folder: Where the seeds' pretrained bases are kept, and taken from; ``None``
            keeps none.

    Returns:
        ``{"environment", "settings", "losses"}``, ready for JSON. ``"losses"`` has a
            part for each case.

    Raises:
        BenchError: There is no text to train on.
    """
    text = read_text(settings)
    runs: Runs = {name: [] for name in cases}
    with (
        torch.random.fork_rng(),
        tempfile.TemporaryDirectory(prefix="kbitwrap-bench-") as temporary,
    ):
        bases = folder or Path(temporary)
        for index in range(settings.repeats):
            seed = settings.seed + index
            prefix = f"seed {index + 1} of {settings.repeats}"
            base = bases / f"seed-{seed}"
            if not base.exists():
                show(f"{prefix}: pretraining")
                pretrain(text, settings, seed).bfloat16().save_pretrained(base)
            exact = _adapt(_exact(base, settings), settings)
            for name, own in runs.items():
                show(f"{prefix}: {name}")
                run = Run(name, settings, seed, base, exact)
                own.append(run.train(text))
    return {
        "environment": environment(settings.device),
        "settings": dataclasses.asdict(settings),
        "losses": [_summary(name, runs) for name in runs],
    }


def _summary(name: str, runs: Runs) -> Figures:
    """A case over the seeds, and its differences, seed by seed, from the case that it is compared with."""
    own = runs[name]
    dtype = str(_adapter_dtype(name)).removeprefix("torch.")
    summary: Figures = {"case": name, "adapters": dtype, **over_seeds(own)}
    other = COMPARED_WITH.get(name)
    if other in runs:
        summary["difference"] = {"case": other, **_differences(own, runs[other])}
    return summary


def over_seeds(runs: list[Figures]) -> Figures:
    """The figures of several seeds as one: of a number the spread, of a curve its mean at each step.

    A part is summed up likewise.
    """
    summary: Figures = {}
    for key, first in runs[0].items():
        values: list[Any] = [run[key] for run in runs]
        if isinstance(first, dict):
            summary[key] = over_seeds(values)
        elif isinstance(first, list):
            summary[key] = [fmean(losses) for losses in zip(*values, strict=True)]
        else:
            summary[key] = _spread(values)
    return summary


def _differences(own: list[Figures], others: list[Figures]) -> Figures:
    """The losses of a case less another's, seed by seed; those of the training, step by step."""
    pairs = list(zip(own, others, strict=True))
    differences: Figures = {}
    for key in ("held_out_loss", "end_loss"):
        differences[key] = _spread([run[key] - other[key] for run, other in pairs])
    curves = [
        map(operator.sub, run["train_loss"], other["train_loss"])
        for run, other in pairs
    ]
    steps = [_spread(list(losses)) for losses in zip(*curves, strict=True)]
    means = [step["mean"] for step in steps]
    errors = [step["error"] for step in steps]
    differences["train_loss"] = {"mean": means, "error": errors}
    return differences


def _spread(values: list[float]) -> Figures:
    """Their mean, their standard deviation and the standard error of the mean; one value has neither of the two."""
    deviation = error = None
    if len(values) > 1:
        deviation = stdev(values)
        error = deviation / len(values) ** 0.5
    return {
        "mean": fmean(values),
        "deviation": deviation,
        "error": error,
        "all": values,
    }


def pretrain(
    text: Text, settings: LossSettings, seed: int, architecture: str = "llama"
) -> Any:
    """Train a model from nothing, in float32 under bfloat16 autocast.

    Args:
        text: The text to train on.
        settings: The size of the model, its device, and the steps.
        seed: Seed of the weights and of the order of the text.
        architecture: The type of its config, such as ``"qwen3"``.

    Returns:
        The model, whose tokens are bytes, in train mode.
    """
    torch.manual_seed(seed)
    num_heads = settings.hidden_size // _HEAD_SIZE
    config = AutoConfig.for_model(
        architecture,
        vocab_size=NUM_BYTES,
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=_HEAD_SIZE,
        max_position_embeddings=settings.length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config).train()
    model.to(settings.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PRETRAINING_RATE)

    def rate(step: int) -> float:
        warming = (step + 1) / _WARMUP_STEPS
        falling = 1 - step / settings.pretraining_steps
        return min(warming, falling)

    schedule = LambdaLR(optimizer, rate)
    tokens = text.pretraining
    offsets = torch.arange(settings.length + 1)
    for _ in _bar(settings.pretraining_steps, "pretrain"):
        starts = torch.randint(
            len(tokens) - settings.length, (2 * settings.batch_size, 1)
        )
        positions = (starts + offsets).to(settings.device)
        _step(
            model,
            tokens[positions],
            optimizer,
            schedule,
            True,
        )
    return model


def _adapter_dtype(name: str) -> torch.dtype:
    if name == FLOAT64:
        return torch.float64
    if name == PEFT or name.endswith(_IN_FLOAT32):
        return torch.float32
    return torch.bfloat16


class Run:
    """A LoRA that is trained in one case with one seed.

    Args:
        name: The case.
        settings: What to train.
        seed: Seed of the adapters and of the order of the data: the same in all cases.
        base: The base's checkpoint.
        exact: The quantized base in float64, with adapters; their values are written
            over. ``None`` where no distance from it is asked for.
    """

    def __init__(
        self,
        name: str,
        settings: LossSettings,
        seed: int,
        base: Path,
        exact: Any = None,
    ) -> None:
        self.settings = settings
        self.seed = seed
        self.exact = exact
        if name == FLOAT64:
            self.model: PeftModel = exact
        else:
            self.model = self._prepared(name, base)
        self.is_autocast = settings.autocast and name != FLOAT64
        self._draw_adapters()

    def _draw_adapters(self) -> None:
        """Give the adapters PEFT's initial values, drawn in float32 on the host: the same in each case."""
        generator = torch.Generator().manual_seed(self.seed)
        for fqn, parameter in _trainable(self.model).items():
            values = torch.zeros(parameter.shape)
            if "lora_A" in fqn:
                bound = parameter.shape[1] ** -0.5
                values.uniform_(
                    -bound,
                    bound,
                    generator=generator,
                )
            parameter.data.copy_(values)

    def _prepared(self, name: str, checkpoint: Path) -> PeftModel:
        """The base prepared, with adapters."""
        base: Any = _load(checkpoint, self.settings)
        checkpointing = {"use_reentrant": False}
        if name == PEFT:
            prepared = prepare_model_for_kbit_training(
                base, gradient_checkpointing_kwargs=checkpointing
            )
            return _adapt(prepared, self.settings)
        dtype = str(_adapter_dtype(name)).removeprefix("torch.")
        wrapper = KbitPreparedModel(
            base,
            precision=name.removesuffix(_IN_FLOAT32),
            adapter_dtype=dtype,
            gradient_checkpointing_kwargs=checkpointing,
        ).prepare()
        model = _adapt(base, self.settings)
        wrapper.adopt(model)
        return model

    def train(self, text: Text) -> Figures:
        """Train it.

        Args:
            text: The text to train on, and the one to measure the loss of.

        Returns:
            The losses of each step and of what is held out, and the distances from
                exact arithmetic.
        """
        probe = text.training[: 2 * self.settings.batch_size]
        base_loss = self.held_out_loss(text)
        start = self._distances(probe)
        losses = self.train_steps(text)
        end = self._distances(probe)
        figures: Figures = {
            "base_loss": base_loss,
            "held_out_loss": self.held_out_loss(text),
            "end_loss": fmean(losses[-LAST_STEPS:]),
        }
        for key in DISTANCES:
            figures[key] = {"start": start[key], "end": end[key]}
        return {**figures, "train_loss": losses}

    def train_steps(self, text: Text) -> list[float]:
        """Train it on the text, and return the loss of each step."""
        settings = self.settings
        adapters = _trainable(self.model).values()
        optimizer = torch.optim.AdamW(
            adapters, lr=settings.learning_rate, weight_decay=0, fused=True
        )
        schedule = LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
        batches = self._batches(len(text.training))
        losses = []
        for _ in _bar(settings.steps, "train"):
            blocks = text.training[next(batches).to(settings.device)]
            loss = _step(
                self.model,
                blocks,
                optimizer,
                schedule,
                self.is_autocast,
            )
            losses.append(loss)
        return losses

    def _batches(self, num_blocks: int) -> Iterator[Tensor]:
        """The numbers of the blocks in each batch, without end: all blocks in one order, then in another."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            order = torch.randperm(num_blocks, generator=generator)
            yield from order.split(self.settings.batch_size)

    @torch.no_grad()
    def held_out_loss(self, text: Text) -> float:
        """The loss of what is held out, in the case's own arithmetic, and in train mode: nothing drops out."""
        total = 0.0
        for blocks in text.held_out.split(2 * self.settings.batch_size):
            loss, _ = next_byte_loss(
                self.model,
                blocks,
                is_autocast=self.is_autocast,
            )
            total += loss.item() * len(blocks)
        return total / len(text.held_out)

    def _distances(self, blocks: Tensor) -> dict[str, float]:
        """How far logits and the adapters' gradients are from those of the same model and adapters in float64."""
        ours = _logits_and_gradients(
            self.model,
            blocks,
            is_autocast=self.is_autocast,
        )
        own = _trainable(self.model)
        for name, parameter in _trainable(self.exact).items():
            parameter.data = own[name].detach().double()
        exacts = _logits_and_gradients(self.exact, blocks, is_autocast=False)
        distances = {}
        for key, values, exact in zip(DISTANCES, ours, exacts, strict=True):
            distances[key] = ((values - exact).norm() / exact.norm()).item()
        return distances


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _logits_and_gradients(
    model: nn.Module, blocks: Tensor, *, is_autocast: bool
) -> tuple[Tensor, Tensor]:
    """The logits, and all gradients as one vector, in float64."""
    loss, logits = next_byte_loss(model, blocks, is_autocast=is_autocast)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = [found[name] for name in sorted(found)]
    vector = torch.cat(
        [gradient.double().flatten() for gradient in gradients if gradient is not None]
    )
    model.zero_grad(set_to_none=True)
    return logits.detach().double(), vector


def _adapt(base: Any, settings: LossSettings) -> PeftModel:
    """Put a LoRA on a base. Its values are drawn later: PEFT draws other ones for another dtype."""
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return cast(PeftModel, get_peft_model(base, config)).train()


def _load(base: Path, settings: LossSettings) -> nn.Module:
    """The base, quantized, in train mode: in eval mode some CPUs repack its weights, and have no backward then."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        base,
        quantization_config=bitsandbytes_config(settings.quant, torch.bfloat16),
        dtype=torch.bfloat16,
        device_map={"": settings.device},
    )
    return model.train()


def _exact(base: Path, settings: LossSettings) -> nn.Module:
    """The quantized base in float64."""
    exact: nn.Module = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, device_map={"": settings.device}
    )
    return make_exact(exact, _load(base, settings))


def make_exact(exact: nn.Module, quantized: nn.Module) -> nn.Module:
    """Give a model in float64 the weights that a quantized one's layers hold.

    Args:
        exact: The model in float64; it is changed.
        quantized: The same model, quantized by bitsandbytes, before it has run.

    Returns:
        ``exact``, all of which computes in float64.
    """
    for name, module in quantized.named_modules():
        own: Any = exact.get_submodule(name)
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, Linear4bit):
            values = dequantize_4bit(weight.data, weight.quant_state)
            own.weight.data = values.double()
        elif isinstance(module, Linear8bitLt):
            scales = weight.SCB.double().view(-1, 1)
            own.weight.data = weight.data.double() * scales / 127
        elif hasattr(
            module, "variance_epsilon"
        ):  # a norm, whose class casts to float32
            own.forward = functools.partial(
                F.rms_norm,
                normalized_shape=own.weight.shape,
                weight=own.weight,
                eps=own.variance_epsilon,
            )
    return exact


def _step(
    model: nn.Module,
    blocks: Tensor,
    optimizer: Any,
    schedule: Any,
    is_autocast: bool,
) -> float:
    """Take a training step.

    Args:
        model: The model.
        blocks: The batch: ``(num_blocks, length + 1)``, int64.
        optimizer: The optimizer of what is trained.
        schedule: The schedule of its learning rate.
        is_autocast: Whether the step is one under bfloat16 autocast.

    Returns:
        The loss.
    """
    loss, _ = next_byte_loss(model, blocks, is_autocast=is_autocast)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return loss.item()


def next_byte_loss(
    model: nn.Module, blocks: Tensor, *, is_autocast: bool
) -> tuple[Tensor, Tensor]:
    """The mean loss of a byte, in float32 or, where logits are float64, in that; and the logits."""
    with torch.autocast(blocks.device.type, torch.bfloat16, enabled=is_autocast):
        logits = model(input_ids=blocks[:, :-1], use_cache=False).logits
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), blocks[:, 1:].flatten()), logits


def _bar(num_steps: int, what: str) -> Any:
    return tqdm(
        range(num_steps),
        desc=what,
        unit="step",
        leave=False,
        disable=None,
    )
