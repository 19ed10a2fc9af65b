"""Draws what each way to prepare does to Mistral-7B: the bytes that it holds meanwhile, and what it leaves behind.

    python docs/figures pictures [--from]

Measures a model of Mistral-7B's shapes with random quantized weights on this CPU, PEFT's function and every precision
in one run, writes the figures to docs/benchmarks/preparing.json, and draws docs/pictures/preparing.svg and
docs/pictures/left.svg. With `--from` the figures of that file are drawn again. Takes 10 GB of memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import style
from drawn import MISTRAL, build_model
from kbitwrap import KbitPreparedModel, Precision
from kbitwrap.cli.console import quiet_libraries
from kbitwrap.cli.demo import base_state, differences
from machine import environment
from measuring import held_bytes
from sections import DOCS

FIGURES = DOCS / "benchmarks" / "preparing.json"
PICTURES = DOCS / "pictures"
PEFT = "peft"
WAYS = (PEFT, *(precision.value for precision in Precision))
COLORS = {
    PEFT: "#d55e00",
    "full": "#e69f00",
    "compute": "#0072b2",
    "norms": "#009e73",
    "adapted": "#cc79a7",
    "none": "#56b4e9",
}
LEFT = {
    "parameters in another dtype": "dtypes",
    "parameters with another requires_grad": "requires_grad",
    "modules with other hooks": "hooks",
    "modules with other flags or forwards": "attributes",
    "parameters that are other objects": "parameters",
    "tensors with other bits": "bytes",
}
WIDTH = 5.0  # inches: the text is as large on a phone as it is here
MIB, MILLISECOND = 1 << 20, 1e-3
START = "kbitwrap: prepare"


def prepare(way: str, model: nn.Module) -> KbitPreparedModel | None:
    """Prepare a model; the wrapper that restores it, if there is one."""
    if way != PEFT:
        return KbitPreparedModel(model, precision=way).prepare()
    with quiet_libraries():
        prepare_model_for_kbit_training(model)
    return None


def timeline(way: str, model: nn.Module) -> tuple[KbitPreparedModel | None, list[tuple[float, int]]]:
    """Prepare; what restores, and the bytes held above the start after each change of them, with the seconds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for parameter in model.parameters():  # the release of what was allocated before is not recorded
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.clone()
        with record_function(START):
            prepared = prepare(way, model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    (whole,) = [event for event in events if event["name"] == START and event["ph"] == "X"]
    changes = [event for event in events if event["name"] == "[memory]" and event["ts"] >= whole["ts"]]
    changes.sort(key=lambda event: event["ts"])
    first = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    points = [(round((e["ts"] - whole["ts"]) * 1e-6, 6), e["args"]["Total Allocated"] - first) for e in changes]
    return prepared, [(0.0, 0), *thinned(points), (round(whole["dur"] * 1e-6, 6), points[-1][1])]


def thinned(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """The points without those that stay within a hundredth of a MiB of the one before."""
    kept = points[:1]
    for point in points[1:]:
        if abs(point[1] - kept[-1][1]) >= MIB / 100:
            kept.append(point)
    return kept


def measure(shape: dict[str, Any]) -> dict[str, Any]:
    """Measure each way: the bytes over time, and what is left after a restore, or, with PEFT, an unload."""
    ways: dict[str, Any] = {}
    for way in WAYS:
        model: Any = build_model(shape).train()
        modules, parameters = dict(model.named_modules()), [*model.parameters()]
        loaded, loaded_bytes = base_state(modules), held_bytes(parameters)
        if way == WAYS[0]:
            prepare(Precision.NONE, model).restore()  # what is set up once is not measured  # type: ignore[union-attr]
        prepared, points = timeline(way, model)
        peft_model: Any = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        if prepared is not None:
            prepared.adopt(peft_model)
        peft_model(input_ids=torch.arange(8).view(1, 8)).logits.sum().backward()
        peft_model.unload()
        if prepared is not None:
            prepared.restore()
        ways[way] = {
            "bytes_over_time": points,
            "left": {**dict.fromkeys(LEFT.values(), 0), **differences(loaded, base_state(modules))},
            "left_bytes": held_bytes(model.parameters()) - loaded_bytes,
        }
        del model, modules, parameters, loaded, prepared, peft_model
        gc.collect()
    return {"environment": environment(), "shape": shape, "ways": ways}


def draw_bytes(ways: dict[str, Any]) -> Figure:
    """The bytes above the start over time: all ways in one panel, and below it those that store nothing, enlarged."""
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    large, small = figure.subplots(2, 1, height_ratios=(3, 2))
    for way, found in ways.items():
        seconds, held = zip(*found["bytes_over_time"], strict=True)
        for axis in (large, small) if max(held) < 8 * MIB else (large,):
            axis.step(
                [one / MILLISECOND for one in seconds],
                [one / MIB for one in held],
                where="post",
                color=COLORS[way],
                label=f"{way}: {max(held) / MIB:.1f} MiB at its peak",
                linewidth=1.6 if way == PEFT else 1.2,
            )
    large.set_title("Preparing Mistral-7B: MiB held above the start", fontsize=10, loc="left")
    small.set_title("Those that store no float32 copy, enlarged", fontsize=10, loc="left")
    small.set_xlabel("milliseconds since the start, under torch's profiler")
    for axis in (large, small):
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.legend(*large.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def draw_left(ways: dict[str, Any]) -> Figure:
    """A table of what differs from the loaded model in the end, in color where anything does.

    Of the precisions it has the most that any of them leaves.
    """
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axis = figure.subplots()
    axis.axis("off")
    precisions = [found for way, found in ways.items() if way != PEFT]
    rows = []
    for aspect in LEFT.values():
        most = max(found["left"][aspect] for found in precisions)
        rows.append([f"{ways[PEFT]['left'][aspect]}", f"{most}"])
    most_bytes = max(found["left_bytes"] for found in precisions)
    rows.append([f"{ways[PEFT]['left_bytes'] / MIB:.1f}", f"{most_bytes / MIB:.1f}"])
    table = axis.table(
        cellText=rows,
        rowLabels=[*LEFT, "MiB that the parameters hold more"],
        colLabels=["PEFT's", "each precision"],
        cellLoc="center",
        rowLoc="left",
        bbox=(0.55, 0, 0.45, 1),  # the labels of the rows are to the left of it
        edges="horizontal",
    )
    for (row, column), cell in table.get_celld().items():
        cell.set_linewidth(0.5)
        if row > 0 and column >= 0:
            is_zero = float(rows[row - 1][column]) == 0
            cell.get_text().set(color="#8c959f" if is_zero else COLORS[PEFT], weight="normal" if is_zero else "bold")
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    figure.suptitle("Left on Mistral-7B in the end", x=0.01, horizontalalignment="left", fontsize=10)
    return figure


def main() -> None:
    """Measure, unless the figures are there, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="is_measured", action="store_true", help="draw the figures of the file again")
    if not parser.parse_args().is_measured:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT leaves it to torch which checkpointing there is
            FIGURES.write_text(json.dumps(measure(MISTRAL), indent=1) + "\n")
    ways = json.loads(FIGURES.read_text())["ways"]
    style.draw(draw_bytes, PICTURES / "preparing.svg", ways)
    style.draw(draw_left, PICTURES / "left.svg", ways)
