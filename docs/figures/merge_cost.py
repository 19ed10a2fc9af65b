"""Compares the CPU time of a merged export in half with that of its parts by themselves.

    python docs/figures merge_cost [--layers 4] [--width 4096] [--threads 1]

The parts are dequantizing, adding, rounding and `save_file`: of the same layers, by functions of bitsandbytes, torch
and safetensors alone, once a few rows at a time, in the cache of a CPU, and once a whole layer at a time, as PEFT
merges. Prints each of five ratios and their median. A layer takes 32 MB of the disk at the default width.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from kbitwrap import KbitPreparedModel
from kbitwrap.cli.console import quiet_libraries
from measuring import clock

ROWS_AT_ONCE = 128
ROUNDS = 5


def make_layer(width: int) -> nn.Module:
    """Make a layer in nf4 with random weights, on the CPU."""
    layer = Linear4bit(width, width, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
    values = (0.02 * torch.randn(width, width)).bfloat16()
    layer.weight = Params4bit(values, requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


@torch.no_grad()
def merge_by_parts(layers: list[Any], rows: int, path: Path) -> None:
    """Dequantize, add and round some rows of each layer at a time, and save all of it."""
    tensors = {}
    for number, layer in enumerate(layers):
        weight = layer.get_base_layer().weight
        state = weight.quant_state
        height, width = state.shape
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        merged = torch.empty(height, width, dtype=torch.bfloat16)
        for start in range(0, height, rows):
            part = copy.copy(state)
            part.shape = torch.Size([rows, width])
            part.absmax = state.absmax[start * width // state.blocksize :][: rows * width // state.blocksize]
            codes = weight.data.view(-1, 1)[start * width // 2 :][: rows * width // 2]
            values = dequantize_4bit(codes, part).float()
            values += layer.scaling["default"] * (b[start : start + rows] @ a)
            merged[start : start + rows] = values
        tensors[f"{number}.weight"] = merged
    save_file(tensors, path)


def main() -> None:
    """Export, merge by parts, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    model = nn.Sequential(*[make_layer(arguments.width) for _ in range(arguments.layers)])
    names = [str(number) for number in range(arguments.layers)]
    adapted: Any = get_peft_model(model, LoraConfig(r=16, target_modules=names, init_lora_weights=False))
    wrapper = KbitPreparedModel(model, gradient_checkpointing=False)
    layers = [adapted.base_model.model[number] for number in range(arguments.layers)]
    ratios: dict[str, list[float]] = {"a few rows": [], "whole layers": []}
    with tempfile.TemporaryDirectory() as place, quiet_libraries():
        folder = Path(place)

        def export() -> None:
            wrapper.export(folder / "merged", merge_adapters=True, model=adapted, overwrite=True)

        export()  # the first also sets things up
        for _ in range(ROUNDS):
            exported = clock(export).cpu_seconds
            for name, rows in (("a few rows", ROWS_AT_ONCE), ("whole layers", arguments.width)):
                by_parts = clock(lambda rows=rows: merge_by_parts(layers, rows, folder / "parts.safetensors"))
                ratios[name].append(exported / by_parts.cpu_seconds)

    for name, found in ratios.items():
        each = ", ".join(f"{ratio:.2f}" for ratio in found)
        print(f"an export takes {statistics.median(found):.2f} times its parts, {name} at a time ({each})")
