"""Compares a model that is trained on a quantized base with what an engine serves that is sent its adapter alone.

The engine holds a base of its own: the 16-bit one; the dequantized one, whose weights
are the trainer's; or one that it quantizes itself as the trainer does, from which the
trainer differs in arithmetic alone. A LoRA is trained by the loop of ``loss``, and all
of them get it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from .. import merge_checkpoint
from ..model.quantization import bitsandbytes_config
from .environment import environment
from .loss import Run, Runs, Text, next_byte_loss, over_seeds, pretrain, read_text
from .settings import Figures, LossSettings

_TRAINED = "norms"
"""The case of ``loss`` that a trainer runs: its adapters are in bfloat16, as the engine's."""


def run_rollout(
    settings: LossSettings, cases: Sequence[str], show: Callable[[str], None]
) -> Figures:
    """Train an adapter in each case with each seed, and compare the trainer with each engine.

    Args:
        settings: What to train; the cases replace ``quant``.
        cases: Names out of ``ROLLOUT_CASES``: an architecture and a quantization.
        show: Called with a line of progress before each part.

    Returns:
        ``{"environment", "settings", "rollouts"}``, ready for JSON. ``"rollouts"`` has
            a part for each case. Its ``"original"``, ``"dequantized"`` and
            ``"quantized"`` are figures of an engine with that base: the divergence ``KL(trainer || engine)`` in
            nats a byte, and the mean absolute difference of a byte's log-probability.

    Raises:
        BenchError: There is no text to train on.
    """
    text = read_text(settings)
    runs: Runs = {name: [] for name in cases}
    for index in range(settings.repeats):
        seed = settings.seed + index
        with (
            torch.random.fork_rng(),
            tempfile.TemporaryDirectory(prefix="kbitwrap-bench-") as folder,
        ):
            for name, own in runs.items():
                show(f"seed {index + 1} of {settings.repeats}: {name}")
                own.append(_compare(name, settings, seed, text, Path(folder)))
    return {
        "environment": environment(settings.device),
        "settings": dataclasses.asdict(settings),
        "rollouts": [
            {"case": name, **over_seeds(figures)} for name, figures in runs.items()
        ],
    }


def _compare(
    name: str, settings: LossSettings, seed: int, text: Text, folder: Path
) -> Figures:
    """Train an adapter, and compare the trainer with an engine on each base."""
    architecture, _, quant = name.partition("-")
    settings = dataclasses.replace(settings, quant=quant)
    base = folder / architecture
    if not base.exists():
        model = pretrain(text, settings, seed, architecture)
        model.bfloat16().save_pretrained(base)

    run = Run(_TRAINED, settings, seed, base)
    base_loss = run.held_out_loss(text)
    run.train_steps(text)
    adapter = folder / name
    run.model.save_pretrained(str(adapter))
    trainer = run.model.eval()
    loss, expected = _probabilities(trainer, text, is_autocast=settings.autocast)

    dequantized = folder / f"{name}-base"
    config = bitsandbytes_config(quant, torch.bfloat16)
    merge_checkpoint(
        base,
        None,
        dequantized,
        quantization_config=config,
        device=settings.device,
    )
    figures: Figures = {"base_loss": base_loss, "held_out_loss": loss}
    engines = {
        "original": _engine(base, None, adapter, settings),
        "dequantized": _engine(dequantized, None, adapter, settings),
        "quantized": _engine(base, config, adapter, settings),
    }
    for key, engine in engines.items():
        figures[key] = _distance(engine, text, expected)
    return figures


def _engine(base: Path, config: Any, adapter: Path, settings: LossSettings) -> Any:
    """A base in bfloat16, or quantized, with the adapter beside its layers, as an engine runs it."""
    model = AutoModelForCausalLM.from_pretrained(
        base,
        quantization_config=config,
        dtype=torch.bfloat16,
        device_map={"": settings.device},
    )
    return PeftModel.from_pretrained(model, str(adapter)).eval()


@torch.no_grad()
def _probabilities(
    model: Any, text: Text, *, is_autocast: bool
) -> tuple[float, Tensor]:
    """The loss on the held-out text, and the log-probabilities of all bytes at each place, in float32."""
    loss, logits = next_byte_loss(model, text.held_out, is_autocast=is_autocast)
    return loss.item(), F.log_softmax(logits.float(), dim=-1)


def _distance(engine: Any, text: Text, expected: Tensor) -> Figures:
    """How far an engine is from the trainer's log-probabilities, ``(num_blocks, length, NUM_BYTES)``."""
    _, found = _probabilities(engine, text, is_autocast=False)
    differences = expected - found
    divergences = (expected.exp() * differences).sum(dim=-1)
    of_text = differences.gather(-1, text.held_out[:, 1:, None])
    return {
        "divergence": divergences.mean().item(),
        "logp_difference": of_text.abs().mean().item(),
    }
