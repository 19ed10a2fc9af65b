"""Compares a model that is trained on a quantized base with what an engine serves that is sent its adapter alone.

    python docs/figures rollouts            train, compare, save the figures, write docs/benchmarks.md
    python docs/figures rollouts --saved    write what was saved

The engine holds a base of its own: the 16-bit one; the dequantized one, whose weights are the trainer's; or one that it
quantizes itself as the trainer does, from which the trainer differs in arithmetic alone. Takes minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import machine
from kbitwrap import merge_checkpoint
from kbitwrap.cli.console import quiet_libraries
from kbitwrap.model.quantization import bitsandbytes_config
from llamas import Run, Settings, Text, next_byte_loss, pretrain, read_text
from sections import DOCS, replace_section, text_table

PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "benchmarks" / "rollout.json"
ARCHITECTURES = ("llama", "qwen3", "gemma")
QUANTS = ("nf4", "int8")
HEADER = """\
models    over bytes in bfloat16, hidden {hidden_size}, {num_layers} layers, \
pretrained for {pretraining_steps} steps on pydoc's topics
training  LoRA of rank {rank} on all linears of the quantized model, bfloat16 autocast, \
learning rate {learning_rate:g} falling to 0, {steps} steps of {batch_size} blocks of \
{length} bytes of the standard library's source
engine    the adapter beside the layers of a base in bfloat16, the original one or the \
dequantized one, or of one that the engine quantizes
seeds     {repeats}, each with bases and adapters of its own
KL        of the trainer's distribution and the engine's, in nats a byte of \
{num_held_out} blocks that are held out; log p off is the mean difference of the \
log-probability of the text's own byte"""
ENGINES = ("original", "dequantized", "quantized")


def compare(settings: Settings) -> dict[str, Any]:
    """Train an adapter on each architecture in each quantization, and compare the trainer with an engine on each base.

    Returns:
        The machine, the settings, and the figures of each, ready for JSON: the losses, and of an engine the divergence
        `KL(trainer || engine)` in nats a byte, and the mean absolute difference of a byte's log-probability.
    """
    text, rollouts = read_text(settings), []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), quiet_libraries():
        for architecture in ARCHITECTURES:
            base = Path(folder) / architecture
            pretrain(text, settings, 0, architecture).bfloat16().save_pretrained(base)
            for quant in QUANTS:
                found = compare_engines(base, dataclasses.replace(settings, quant=quant), text)
                rollouts.append({"case": f"{architecture}-{quant}", **found})
                print(rollouts[-1], flush=True)
    return {"environment": machine.environment(), "settings": dataclasses.asdict(settings), "rollouts": rollouts}


def compare_engines(base: Path, settings: Settings, text: Text) -> dict[str, Any]:
    """Train an adapter, and compare the trainer with an engine on each base."""
    run = Run("norms", settings, 0, base)
    base_loss = run.held_out_loss(text)
    run.train_steps(text)
    adapter = base.with_name(f"{base.name}-{settings.quant}")
    run.model.save_pretrained(adapter)
    loss, expected = probabilities(run.model.eval(), text, is_autocast=True)

    dequantized = base.with_name(f"{adapter.name}-base")
    config = bitsandbytes_config(settings.quant, torch.bfloat16)
    merge_checkpoint(base, None, dequantized, quantization_config=config, device="cpu")
    bases = zip(ENGINES, ((base, None), (dequantized, None), (base, config)), strict=True)
    engines = {name: distance(engine(*own, adapter), text, expected) for name, own in bases}
    return {"base_loss": base_loss, "held_out_loss": loss, **engines}


def engine(base: Path, config: Any, adapter: Path) -> Any:
    """A base in bfloat16, or quantized, with the adapter beside its layers, as an engine runs it."""
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    return PeftModel.from_pretrained(model, str(adapter)).eval()


@torch.no_grad()
def probabilities(model: Any, text: Text, *, is_autocast: bool) -> tuple[float, Tensor]:
    """The loss on the held-out text, and the log-probabilities of all bytes at each place, in float32."""
    loss, logits = next_byte_loss(model, text.held_out, is_autocast=is_autocast)
    return loss.item(), F.log_softmax(logits.float(), dim=-1)


def distance(served: Any, text: Text, expected: Tensor) -> dict[str, float]:
    """How far an engine is from the trainer's log-probabilities, `(num_blocks, length, NUM_BYTES)`."""
    _, found = probabilities(served, text, is_autocast=False)
    differences = expected - found
    divergences = (expected.exp() * differences).sum(dim=-1)
    of_text = differences.gather(-1, text.held_out[:, 1:, None])
    return {"divergence": divergences.mean().item(), "logp_difference": of_text.abs().mean().item()}


def text_of(result: dict[str, Any]) -> str:
    """What was trained, and the table of trainers beside engines."""
    head = ["case", "loss before", "trained", "KL, original base", "dequantized", "quantized"]
    rows = [[*head, "log p off, original", "dequantized", "quantized"]]
    for case in result["rollouts"]:
        distances = [case[name][key] for key in ("divergence", "logp_difference") for name in ENGINES]
        losses = [f"{case[key]:.4f}" for key in ("base_loss", "held_out_loss")]
        rows.append([case["case"], *losses, *(f"{one:.2e}" for one in distances)])
    said = HEADER.format(**result["settings"])
    return "\n".join([*machine.lines(result), said, "", text_table(rows)])


def main() -> None:
    """Compare, or read what was saved, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", action="store_true", help="train nothing")
    if not parser.parse_args().saved:
        FIGURES.write_text(json.dumps(compare(Settings(repeats=1)), indent=2) + "\n", encoding="utf-8")
    result = json.loads(FIGURES.read_text(encoding="utf-8"))
    replace_section(PAGE, "benchmark: rollout", f"```text\n{text_of(result)}\n```")
