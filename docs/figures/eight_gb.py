"""Predicts what trains on a board of 8 GB that host and device share, and measures what the host takes there.

    python docs/figures eight_gb [WORD ...]   predict: docs/benchmarks/eight_gb.json, and the tables of docs/eight_gb.md
    python docs/figures eight_gb --host       measure: docs/benchmarks/host.json

WORD picks models by their names; what was predicted of others is kept. The models are in nf4 with double
quantization and bfloat16, with LoRA of rank 16 on every linear layer. TRL's rows need TRL. What a process takes depends
on the build of torch: kbitwrap/cli/limits.py has that of one for CUDA.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import fits
from kbitwrap import StepPredictor
from kbitwrap.cli.console import quiet_libraries
from kbitwrap.cli.limits import budget_of, budget_of_step
from kbitwrap.cli.trainers import arguments
from kbitwrap.config import parse_bytes
from machine import environment
from measuring import resident
from sections import DOCS, markdown_table, replace_section

FIGURES = DOCS / "benchmarks" / "eight_gb.json"
HOST = DOCS / "benchmarks" / "host.json"
PAGE = DOCS / "eight_gb.md"
AVAILABLE = parse_bytes("6.6GiB")  # of a board of 8 GB without a desktop, dusty-nv/jetson-containers#342
SEQ_LEN = 512
WAYS = ("peft", "compute", "norms", "none")
REPORTED = "mistralai/Mistral-7B-v0.3"
NAMES = (REPORTED, "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B")
# The text part of google/gemma-3-4b-it.
GEMMA = {
    "name": "google/gemma-3-4b-it",
    "config": {
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "sliding_window": 1024,
    },
}
IMPORTED = "torch", "transformers", "bitsandbytes", "peft"


def models() -> list[dict[str, Any]]:
    """The models, in the order of the tables."""
    described = {model["name"]: model for model in fits.models()}
    return [*(described[name] for name in NAMES), GEMMA]


def predict(model: dict[str, Any], trainer: str, way: str) -> dict[str, Any]:
    """A step of 512 tokens, and the longest sequence that fits."""
    predict = StepPredictor(
        fits.config_of(model),
        precision=way,
        args=arguments("sft") if trainer == fits.SFT else None,
        lora=peft.LoraConfig(r=16, target_modules="all-linear"),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        dtype="bfloat16",
    )
    step = predict(1, SEQ_LEN)
    budget = budget_of(None, AVAILABLE, is_unified=True)
    assert budget is not None
    assert step.reserved_by_phase is not None
    limit = budget_of_step(step, budget, is_unified=True)
    return {
        "model": model["name"],
        "trainer": trainer,
        "way": way,
        "reserved": step.reserved_by_phase,
        "in_all_bytes": step.reserved_by_phase["step"] + AVAILABLE - budget,
        "fits": predict.fits(limit, 1, SEQ_LEN),
        "longest_sequence": predict.longest_sequence(limit, 1),
    }


def table_of_steps(rows: list[dict[str, Any]]) -> str:
    """What a step of the reporter's model takes, as Markdown."""
    lines = [["precision", "trained by", "loaded", "prepared", "in a step", "with context and process", "fits"]]
    for row in rows:
        if row["model"] == REPORTED:
            sizes = (*row["reserved"].values(), row["in_all_bytes"])
            shown = (f"{size / 2**30:.2f}" for size in sizes)
            lines.append([f"`{row['way']}`", fits.SHOWN[row["trainer"]], *shown, "yes" if row["fits"] else "no"])
    return markdown_table(lines, "---:")


def table_of_lengths(rows: list[dict[str, Any]]) -> str:
    """The longest sequences, as Markdown, of models of which something fits."""
    lines = [["model", "trained by", *(f"`{way}`" for way in WAYS)]]
    longest = {(row["model"], row["trainer"], row["way"]): row["longest_sequence"] for row in rows}
    for name, trainer in dict.fromkeys(key[:2] for key in longest):
        found = [longest[name, trainer, way] for way in WAYS]
        short = name.rpartition("/")[2]
        if any(found):
            lines.append([short, fits.SHOWN[trainer], *(f"{one:,}" if one else "-" for one in found)])
    return markdown_table(lines, "---:")


def host() -> dict[str, Any]:
    """What a process holds once the libraries are imported, and what loading a model maps beside it."""
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import {', '.join(IMPORTED)}\nfrom transformers import LlamaForCausalLM, Trainer\n"
        "from measuring import resident\nprint(resident(), resident('RssAnon'))"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    all_bytes, anonymous = map(int, printed.split())
    return {
        "environment": environment(),
        "process": {"imported": IMPORTED, "resident_bytes": all_bytes, "anonymous_bytes": anonymous},
        "loading": loading(),
        "larger_than_memory": open_file_of(2 * environment()["machine"]["memory_bytes"]),
    }


def loading() -> dict[str, int]:
    """The most that loading maps of its files, and the most memory of its own that it takes beside the model."""
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=12, dtype="bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="400MB")
        files = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        before = {name: resident(name) for name in ("RssFile", "RssAnon")}
        most = dict(before)
        is_loaded = threading.Event()

        def watch() -> None:
            while not is_loaded.wait(0.002):
                for name in most:
                    most[name] = max(most[name], resident(name))

        watcher = threading.Thread(target=watch)
        watcher.start()
        # the dtype is another, so that each tensor is copied, as it is onto a device
        model = LlamaForCausalLM.from_pretrained(folder, dtype="float32")
        is_loaded.set()
        watcher.join()
        own = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "file_bytes": files,
        "mapped_bytes": most["RssFile"] - before["RssFile"],
        "beside_the_model_bytes": most["RssAnon"] - before["RssAnon"] - own,
    }


def open_file_of(size: int) -> str:
    """What safetensors says of a file of so many bytes, all of which are holes."""
    from safetensors import safe_open

    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
        file.flush()
        try:
            with safe_open(file.name, "pt"):
                return "opened"
        except (RuntimeError, OSError) as error:
            return str(error).replace(file.name, "FILE")


def main() -> None:
    """Measure, or predict and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--host", action="store_true", help="measure what the host takes")
    asked = parser.parse_args()
    with warnings.catch_warnings(), quiet_libraries():
        warnings.simplefilter("ignore")
        if asked.host:
            HOST.write_text(json.dumps(host(), indent=1) + "\n")
            return
        before = json.loads(FIGURES.read_text())["rows"] if FIGURES.exists() else []
        rows = []
        for model in models():
            if not all(word in model["name"] for word in asked.words):
                rows += [row for row in before if row["model"] == model["name"]]
                continue
            for trainer in fits.TRAINERS:
                for way in WAYS:
                    rows.append(predict(model, trainer, way))
                    print(*rows[-1].values(), flush=True)
    FIGURES.write_text(json.dumps({"available_bytes": AVAILABLE, "rows": rows}, indent=1) + "\n")
    replace_section(PAGE, "steps", table_of_steps(rows))
    replace_section(PAGE, "lengths", table_of_lengths(rows))
