"""Times merging in each form, and measuring each merge, on a model of Mistral-7B's shapes.

    python docs/figures merge_times [--blocks 8] [--threads 2]

Makes a base of some blocks with random weights and a LoRA of rank 16 on all linear layers in a temporary folder, merges
it in nf4 and measures what was written, as `kbitwrap merge` and `kbitwrap doctor` do. Prints seconds, those of all
cores together, and what they come to for 32 blocks. A block takes 0.9 GB of the disk.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MistralConfig

from kbitwrap import doctor, merge_checkpoint
from kbitwrap.cli.console import quiet_libraries
from kbitwrap.model.quantization import bitsandbytes_config
from measuring import clock
from merge_sizes import MISTRAL

FORMS = ("half", "quantized")
DELTA = 0.02  # deviation of lora_B: the delta is about 2 % of the weights
NF4 = bitsandbytes_config("nf4", torch.bfloat16)


def make_run(blocks: int, folder: Path) -> tuple[Path, Path]:
    """Save a base with random weights in bfloat16, and a LoRA on it."""
    config = MistralConfig(**{**MISTRAL.to_dict(), "num_hidden_layers": blocks})
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model = model.bfloat16().to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder / "base")

    peft_model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=DELTA)
    peft_model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def timed(what: str, blocks: int, call: Callable[[], object]) -> None:
    """Print how long a call takes, on the clock and on all cores together."""
    seconds, cpu = clock(call)
    parts = MISTRAL.num_hidden_layers / blocks
    print(
        f"{what:18} {seconds:7.1f} s, {cpu:7.1f} s of CPU time; for {MISTRAL.num_hidden_layers} blocks "
        f"{parts * seconds:6.0f} s, {parts * cpu:6.0f} s",
        flush=True,
    )


def main() -> None:
    """Make a run, and time what is done with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"Mistral-7B's shapes, {arguments.blocks} blocks, {arguments.threads} threads")
    with tempfile.TemporaryDirectory() as place, quiet_libraries():
        base, adapter = make_run(arguments.blocks, Path(place))
        for form in FORMS:
            merged = Path(place) / form
            timed(
                f"merge, {form}",
                arguments.blocks,
                lambda merged=merged, form=form: merge_checkpoint(
                    base, adapter, merged, merge_as=form, quantization_config=NF4, device="cpu"
                ),
            )
            timed(
                f"doctor, {form}",
                arguments.blocks,
                lambda merged=merged: doctor(merged, base=base, adapter=adapter, quant=NF4),
            )
