"""Measures what docs/measure.md shows: three merges of one adapter, by the doctor and by the adapter model's logits.

    nice -n 10 python docs/figures merges             measure, save the figures, draw them, write the page
    python docs/figures merges --saved                draw and write what was saved

A byte-level Llama is trained on Python's help texts, then a LoRA on it in nf4 on the source of its standard library, by
`kbitwrap bench`'s own text and loss. Takes a quarter of an hour of two cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from kbitwrap import KbitPreparedModel, doctor, merge_checkpoint
from kbitwrap.bench import loss as bench
from kbitwrap.bench.plot import STYLE
from kbitwrap.bench.settings import LossSettings, quantization_config
from kbitwrap.cli.console import quiet_libraries
from sections import DOCS, replace_section

PAGE = DOCS / "measure.md"
FIGURES = DOCS / "benchmarks" / "merges.json"
PICTURE = DOCS / "pictures" / "merges.svg"
LLAMA = LossSettings(hidden_size=192, pretraining_steps=600, batch_size=4)
NUM_STEPS, RANK, RATE = 120, 8, 3e-4
OURS, PEFTS, RELOAD = "kbitwrap merge", "merge_and_unload in 4 bits", "reload in bfloat16 and merge"
COLORS = {"kept": "#0072b2", "gain": "#009e73"}


def quantized(folder: Path) -> Any:
    """The base in nf4."""
    config = quantization_config("nf4", torch.bfloat16)
    return LlamaForCausalLM.from_pretrained(folder / "base", quantization_config=config, dtype=torch.bfloat16)


def train(folder: Path, text: bench.Text) -> None:
    """Train a LoRA on the base in 4 bits, and save it with its manifest."""
    torch.manual_seed(0)
    with KbitPreparedModel(quantized(folder)) as prepared:
        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(prepared.model, config).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
        for step in range(NUM_STEPS):
            rows = torch.randint(len(text.training), (LLAMA.batch_size,))
            loss, _ = bench.next_byte_loss(model, text.training[rows], is_autocast=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: {loss.item():.3f}", flush=True)
        model.save_pretrained(folder / "adapter")
        prepared.manifest().save(folder / "adapter" / "kbitwrap.json")


def merge(folder: Path) -> dict[str, Path]:
    """Merge the adapter in each way; the folders."""
    adapter = folder / "adapter"
    merge_checkpoint(folder / "base", adapter, folder / "ours")
    in_4_bits: Any = PeftModel.from_pretrained(quantized(folder), adapter)
    in_4_bits.merge_and_unload().save_pretrained(folder / "peft")
    reloaded: Any = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16), adapter
    )
    reloaded.merge_and_unload().save_pretrained(folder / "reload")
    return {OURS: folder / "ours", RELOAD: folder / "reload", PEFTS: folder / "peft"}


@torch.no_grad()
def logits(model: Any, blocks: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The mean loss of a byte, and the log-probabilities, both of a model in evaluation mode."""
    loss, found = bench.next_byte_loss(model.eval(), blocks, is_autocast=False)
    return loss.item(), F.log_softmax(found.float(), -1)


def measure(folder: Path) -> dict[str, Any]:
    """Train, merge in each way, and measure each merge by its weights and by its logits."""
    text = bench.read_text(LLAMA)
    bench.pretrain(text, LLAMA, 0).bfloat16().save_pretrained(folder / "base")
    train(folder, text)
    base_loss, _ = logits(quantized(folder), text.held_out)
    adapted: Any = PeftModel.from_pretrained(quantized(folder), folder / "adapter")
    trained_loss, expected = logits(adapted, text.held_out)
    merges = {}
    for name, merged in merge(folder).items():
        found = doctor(merged, base=folder / "base", adapter=folder / "adapter").merge
        assert found is not None
        loss, probabilities = logits(LlamaForCausalLM.from_pretrained(merged, dtype="auto"), text.held_out)
        divergence = F.kl_div(probabilities, expected, reduction="none", log_target=True).sum(-1).mean().item()
        merges[name] = {
            "kept": found.kept,
            "error": found.error,
            "onto": found.onto,
            "verdict": str(found),
            "gain": (base_loss - loss) / (base_loss - trained_loss),
            "divergence": divergence,
        }
    return {"base_loss": base_loss, "trained_loss": trained_loss, "merges": merges}


def table(result: dict[str, Any]) -> str:
    """The table of the page, with the sentence that says what was measured."""
    lines = [
        f"The base's loss on held-out text is {result['base_loss']:.4f} a byte in nf4, and the adapter model's "
        f"{result['trained_loss']:.4f}.",
        "",
        "| merged by | of the delta there | error, in parts of the delta | onto | gain in loss kept | KL to the "
        "adapter model, nats a byte |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in result["merges"].items():
        lines.append(
            f"| {name} | {one['kept']:.1%} | {one['error']:.1%} | {one['onto']} | {one['gain']:.1%} | "
            f"{one['divergence']:.2e} |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any]) -> None:
    """Bars of what each merge keeps: of the delta, and of the gain in loss."""
    merges = result["merges"]
    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    axis = figure.subplots()
    for place, (key, label) in enumerate({"kept": "of the adapter's delta", "gain": "of its gain in loss"}.items()):
        heights = [row + 0.2 * (2 * place - 1) for row in range(len(merges))]
        values = [100 * one[key] for one in merges.values()]
        bars = axis.barh(heights, values, height=0.36, color=COLORS[key], label=label)
        axis.bar_label(bars, fmt="%.0f %%", padding=3)
    axis.set_yticks(range(len(merges)), list(merges))
    axis.invert_yaxis()
    axis.set_xlim(min(0, *(100 * one["gain"] for one in merges.values())), 125)
    axis.set_xticks(range(0, 101, 20))
    axis.set_xlabel("kept, %")
    axis.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Measure, or read what was measured, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saved", action="store_true", help="measure nothing")
    if not parser.parse_args().saved:
        with tempfile.TemporaryDirectory() as folder, quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT leaves it to torch which checkpointing there is
            FIGURES.write_text(json.dumps(measure(Path(folder)), indent=1) + "\n", encoding="utf-8")
    result = json.loads(FIGURES.read_text(encoding="utf-8"))
    with rc_context(STYLE):
        draw(result)
    replace_section(PAGE, "merges", table(result))
