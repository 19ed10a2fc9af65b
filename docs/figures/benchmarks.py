"""Measures what docs/benchmarks.md shows, and writes it there; the figures themselves are saved as JSON.

    python docs/figures benchmarks NAME...            measure, save the figures, write the page
    python docs/figures benchmarks --saved NAME...    write what was saved

A name is one of `BENCHMARKS`; each takes minutes, and `mistral-7b` 6 GB of memory. What the page has between
`<!-- benchmark: NAME -->` and `<!-- end -->` is replaced. The status is 1 where a number that is to be PEFT's differs.
Leave the machine alone meanwhile; timings are compared within a run, but a busy machine is unfair to some cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import machine
from benchmark_cases import CHUNKED, HEAD_CHUNK_BYTES, MERGED, PEFT, Settings, measure, measure_export
from drawn import MISTRAL
from sections import DOCS, replace_section, text_table

PAGE = DOCS / "benchmarks.md"
FIGURES = DOCS / "benchmarks"
MIB = 2**20

SMALL = MISTRAL | {  # a real vocabulary, with which a CPU can take a training step
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 3584,
}
TINY = SMALL | {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 896,
}
PREPARED = (PEFT, "full", "compute", "norms", "adapted", "none")
STEPPED = (PEFT, "full", "compute", CHUNKED, "norms", "adapted", "none")
IDENTITY, EXPORT = "identity", "export"
BENCHMARKS = {
    "mistral-7b": Settings(PREPARED, repeats=15),
    "step": Settings(STEPPED, SMALL, (128,)),
    "step-tokens": Settings((PEFT, "full", "compute", CHUNKED), SMALL, (512, 1024), repeats=7),
    "step-small-head": Settings((PEFT, "norms", "none"), SMALL | {"vocab_size": 256}, (128,)),
    IDENTITY: Settings((PEFT, "compute"), TINY, (16,), repeats=0),
    EXPORT: Settings(("full", "compute", "norms", MERGED), MISTRAL | {"num_hidden_layers": 8}, repeats=7),
}

Row = list[str]


# ----------------------------------------------------------------------------------------------------
# Measuring.
# ----------------------------------------------------------------------------------------------------


def run(name: str) -> dict[str, Any]:
    """Measure a benchmark."""
    settings = BENCHMARKS[name]
    with tempfile.TemporaryDirectory() as folder:
        if name == IDENTITY:
            cases = compared(settings, Path(folder))
        else:
            cases = [
                alone(measure_export if name == EXPORT else measure, case, settings, folder) for case in settings.cases
            ]
    return {"environment": machine.environment(), "settings": dataclasses.asdict(settings), "cases": cases}


def alone(measure: Callable[..., dict[str, Any]], case: str, settings: Settings, folder: str) -> dict[str, Any]:
    """Measure a case in a process of its own, so that a peak is that case's alone."""
    print(case, flush=True)
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure, case, settings, Path(folder)).result()


def compared(settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """Compute a step by PEFT's way and by ours, with each combination of what may change the arithmetic."""
    found = []
    for is_tied, reentrant, autocast, modules_to_save in itertools.product((False, True), repeat=4):
        options = {"reentrant": reentrant, "autocast": autocast, "modules_to_save": modules_to_save}
        shape = settings.shape | {"tie_word_embeddings": is_tied}
        asked = dataclasses.replace(settings, shape=shape, **options)
        for case in settings.cases:
            figures = measure(case, asked, folder)
        found.append({**figures, "tie_word_embeddings": is_tied, **options})  # of the last, which is ours
        print(f"combination {len(found)} of 16", flush=True)
    return found


# ----------------------------------------------------------------------------------------------------
# Tables.
# ----------------------------------------------------------------------------------------------------


def text(name: str, result: dict[str, Any]) -> str:
    """What the page shows of a benchmark in text: what was run on, and the tables."""
    settings = result["settings"]
    if name == IDENTITY:
        tables = [identity_table(result["cases"])]
    elif name == EXPORT:
        tables = [export_table(result["cases"])]
    elif settings["tokens"]:
        tables = [preparation_table(result["cases"]), step_table(result["cases"], settings["tokens"])]
    else:
        tables = [preparation_table(result["cases"])]
    return "\n\n".join(["\n".join(header(name, result)), *tables])


def header(name: str, result: dict[str, Any]) -> Iterable[str]:
    """The lines before the tables."""
    settings = result["settings"]
    tokens = ", ".join(map(str, settings["tokens"]))
    model = (
        "model     Mistral in nf4 and bfloat16: hidden {hidden_size}, {num_hidden_layers} layers, "
        "{num_attention_heads} heads, {num_key_value_heads} key-value heads, intermediate {intermediate_size}, "
        "vocabulary {vocab_size}"
    ).format_map(settings["shape"])
    step = f"step      {tokens} tokens, LoRA on all linears, quantized layers compute in float32"
    yield from machine.lines(result)
    if name == IDENTITY:
        yield from (model, step)
        return
    yield f"{model}, head not tied"
    medians = "save_file's medians" if name == EXPORT else "PEFT's medians"
    yield f"timings   median (least - most) of {settings['repeats']}; ratios are to {medians} in this run"
    yield "memory    VmHWM, reset before"
    if tokens:
        yield (
            f"{step}, no autocast, non-reentrant checkpointing, modules_to_save none, "
            f"head_chunk_bytes {HEAD_CHUNK_BYTES} under {CHUNKED}"
        )


def preparation_table(cases: list[dict[str, Any]]) -> str:
    """The table of preparing and restoring."""
    head = ["case", "prepare s", "ratio", "restore s", "live MiB added", "peak MiB preparing", "ratio"]
    rows = [
        [
            case["case"],
            spread(case["prepare_seconds"]),
            ratio(case, cases[0], "prepare_seconds"),
            spread(case["restore_seconds"]),
            f"{case['added_bytes'] / MIB:.2f}",
            f"{case['transient_peak_bytes'] / MIB:.1f}",
            ratio(case, cases[0], "transient_peak_bytes"),
        ]
        for case in cases
    ]
    return text_table([head, *rows])


def step_table(cases: list[dict[str, Any]], tokens: list[int]) -> str:
    """The table of training steps: for each number of tokens a row for each case."""
    head = ["tokens", "case", "step peak MiB", "ratio", "system MiB", "step s", "ratio", *NUMBERS]
    rows = []
    for number, num_tokens in enumerate(tokens):
        pefts = cases[0]["steps"][number]
        for case in cases:
            step = case["steps"][number]
            row = [str(num_tokens), case["case"], f"{step['peak_bytes'] / MIB:.1f}", ratio(step, pefts, "peak_bytes")]
            row += [f"{step['system_peak_bytes'] / MIB:.1f}", spread(step["seconds"]), ratio(step, pefts, "seconds")]
            rows.append(row + numbers(step))
    return text_table([head, *rows])


def identity_table(cases: list[dict[str, Any]]) -> str:
    """The table of differences from PEFT's numbers."""
    head = ["case", "head", "checkpointing", "autocast", "modules_to_save", "tokens", "gradients", *NUMBERS]
    rows = []
    for case in cases:
        (step,) = case["steps"]
        options = [
            "tied" if case["tie_word_embeddings"] else "not tied",
            "reentrant" if case["reentrant"] else "non-reentrant",
            "bfloat16" if case["autocast"] else "no",
            "lm_head" if case["modules_to_save"] else "none",
        ]
        rows.append([case["case"], *options, str(step["tokens"]), str(step["num_gradients"]), *numbers(step)])
    return text_table([head, *rows])


def export_table(cases: list[dict[str, Any]]) -> str:
    """The table of exporting."""
    head = ["case", "MiB", "save_file s", "merge s", "export s", "throughput", "by CPU", "peak MiB"]
    rows = [
        [
            case["case"],
            f"{case['export_bytes'] / MIB:.0f}",
            spread(case["save_seconds"]),
            spread(case["merge_seconds"]) if case.get("merge_seconds") else "",
            spread(case["export_seconds"]),
            f"{throughput(case, 'seconds'):.2f}",
            f"{throughput(case, 'cpu_seconds'):.2f}",
            f"{case['export_peak_bytes'] / MIB:.1f}",
            f"{case['largest_bytes'] / MIB:.1f}",
            "identical" if case["is_identical"] else "different",
        ]
        for case in cases
    ]
    return text_table([[*head, "largest tensor MiB", "bytes"], *rows])


NUMBERS = ("loss", "loss difference", "gradient difference")


def numbers(step: dict[str, Any]) -> Row:
    """The last cells of a row of a step."""
    differences = step["loss_difference"], step["largest_gradient_difference"]
    return [f"{step['loss']:.7f}", *("0" if one == 0 else f"{one:.2e}" for one in differences)]


def spread(timing: dict[str, float] | None) -> str:
    """A median, the least and the most."""
    return "{median:.3f} ({least:.3f} - {most:.3f})".format_map(timing) if timing else "-"


def ratio(own: dict[str, Any], pefts: dict[str, Any], key: str) -> str:
    """A figure in parts of PEFT's; of timings their medians."""
    one, other = (part[key]["median"] if isinstance(part[key], dict) else part[key] for part in (own, pefts))
    return f"{one / other:.3f}"


def throughput(case: dict[str, Any], kind: str) -> float:
    """The time that the parts of an export take alone, computing what is merged and writing, by the export's."""
    alone = sum(case[f"{part}_{kind}"]["median"] for part in ("save", "merge") if case.get(f"{part}_{kind}"))
    return float(alone / case[f"export_{kind}"]["median"])


def main() -> int:
    """Measure, or read what was measured, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--saved", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    is_different = False
    for name in arguments.names:
        saved = FIGURES / f"{name}.json"
        if not arguments.saved:
            saved.write_text(json.dumps(run(name), indent=2) + "\n", encoding="utf-8")
        result = json.loads(saved.read_text(encoding="utf-8"))
        replace_section(PAGE, f"benchmark: {name}", f"```text\n{text(name, result)}\n```")
        if name == IDENTITY:
            is_different = any(numbers(step)[1:] != ["0", "0"] for case in result["cases"] for step in case["steps"])
    return int(is_different)
