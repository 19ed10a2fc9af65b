"""Runs resumed with other versions of libraries: which compute other logits, and whether the callback says so.

    python docs/figures numerics FOLDER

In each environment, one after the other, this trains on bases that the first one saved, computes their logits with
transformers alone, resumes the runs of all environments before it, and adds a row for each to FOLDER/rows.jsonl. It
prints the sums of all rows, and with --write writes the table of docs/versions.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from kbitwrap import Manifest
from kbitwrap.integrations import KbitTrainerCallback
from kbitwrap.model.quantization import bitsandbytes_config
from sections import DOCS, markdown_table, replace_section

SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=1376, num_key_value_heads=4),
    "gpt2": transformers.GPT2Config(n_embd=512, n_layer=4, n_head=8, vocab_size=4096),
    "falcon": transformers.FalconConfig(**SIZES),
}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
QUANTIZATIONS = {"nf4": "nf4", "8 bits": "int8", "bfloat16": "none"}
BASES = [f"{model} {kind}" for model in CONFIGS for kind in QUANTIZATIONS]
NUM_STEPS = 2
LOGITS, KERNELS = "logits.pt", "kernels.txt"
PAGE = DOCS / "versions.md"
FIGURES = DOCS / "benchmarks" / "numerics.json"
SAID = re.compile(
    r"and computes other logits: (?:since then (.*)|no library's version changed: .*); training continues"
)
CHANGE = re.compile(r"^(\S+) (.+) became (.+)$")


def save_bases(folder: Path) -> None:
    """Save each base, quantized, so that all environments load the same bytes."""
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        for dropout in DROPOUTS:  # so that train mode changes kernels alone
            setattr(config, dropout, 0.0)
        plain = folder / f"{name} bfloat16"
        transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(plain)
        for kind, word in QUANTIZATIONS.items():
            quantization = bitsandbytes_config(word, torch.bfloat16)
            if quantization is not None:
                load(plain, quantization_config=quantization).save_pretrained(folder / f"{name} {kind}")


def load(folder: Path, **kwargs: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)


def logits_of(base: Path) -> torch.Tensor:
    """Compute the logits of the probe by transformers alone, with the kernels of training."""
    with torch.no_grad():
        return load(base).train()(input_ids=torch.arange(16)[None]).logits


def train(base: Path, folder: Path, resumed: Path | None = None) -> list[str]:
    """Train with the callback, and return what was warned of the logits."""
    torch.manual_seed(0)
    model = peft.get_peft_model(load(base), peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(8 * 32).view(8, 32)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=NUM_STEPS + (resumed is not None),
        save_steps=NUM_STEPS,
        save_only_model=True,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [KbitTrainerCallback()]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return [str(one.message) for one in caught if "computes other logits" in str(one.message)]


def compare(folder: Path, place: Path, base: str, other: Path) -> dict[str, Any]:
    """Resume the run of another environment in this one, and compare what was warned with what differs."""
    checkpoint = other / base / f"checkpoint-{NUM_STEPS}"
    was = Manifest.load(checkpoint).versions
    now = Manifest.load(place / base / f"checkpoint-{NUM_STEPS}").versions
    changed = {}
    for library in sorted({*was, *now} - {"python"}):
        pair = [one.get(library, "(not installed)") for one in (was, now)]
        if pair[0] != pair[1]:
            changed[library] = pair

    said = train(folder / "bases" / base, place / f"{base} of {other.name}", checkpoint)
    named = {}
    for message in said:
        changes = SAID.search(message)[1]  # type: ignore[index]
        for change in changes.split(", ") if changes else ():
            library, *pair = CHANGE.match(change).groups()  # type: ignore[union-attr]
            named[library] = pair

    logits = [torch.load(one / base / LOGITS).view(torch.int16) for one in (other, place)]
    differ = not torch.equal(*logits)
    expected = (changed, 1) if differ else ({}, 0)
    return {
        "base": base,
        "from": other.name,
        "to": place.name,
        "changed": changed,
        "kernels": [(one / KERNELS).read_text() for one in (other, place)],
        "differ": differ,
        "is_right": (named, len(said)) == expected,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the pairs of environments between which one thing changed, whichever of them came first."""
    pairs: dict[str, tuple[set[str], set[str]]] = {}
    for row in rows:
        changed = {**row["changed"], "the CPU's kernels": row["kernels"]}
        changes = [f"{name} {' and '.join(sorted(pair))}" for name, pair in changed.items() if pair[0] != pair[1]]
        if len(changes) == 1 and row["is_right"]:
            found = pairs.setdefault(changes[0], (set(), set()))
            found[not row["differ"]].add(row["base"])
    lines = [["what differs", "other logits, and a warning", "the same logits, and no word"]]
    for changes, (differ, same) in sorted(pairs.items()):
        others = "the others" if differ and same else "all" if same else "none"
        lines.append([changes, ", ".join(sorted(differ)) or "none", others])
    return markdown_table(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--name", default=Path(sys.prefix).name, help="the name of this environment, by default its folder's"
    )
    parser.add_argument("--write", action="store_true", help="write the table into the page, and run nothing")
    arguments = parser.parse_args()
    folder = arguments.folder
    path = folder / "rows.jsonl"
    if not arguments.write:
        run(folder, folder / arguments.name, path)

    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = {(row["from"], row["to"]) for row in rows}
    num_differ, num_right = sum(row["differ"] for row in rows), sum(row["is_right"] for row in rows)
    print(table(rows))
    print(f"{len(pairs)} pairs, {len(rows)} resumes, {num_differ} with other logits, {num_right} told rightly")
    if arguments.write:
        lines = ",\n".join(json.dumps(row) for row in rows)
        FIGURES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        replace_section(PAGE, "numerics", table(rows))
    return 0 if num_right == len(rows) else 1


def run(folder: Path, place: Path, path: Path) -> None:
    """Train on each base in this environment, and resume on it the runs of all environments before."""
    if not (folder / "bases").exists():
        save_bases(folder / "bases")
    others = [one for one in sorted(folder.iterdir()) if one.is_dir() and one.name not in ("bases", place.name)]
    place.mkdir(parents=True, exist_ok=True)
    (place / KERNELS).write_text(torch.backends.cpu.get_cpu_capability())
    with path.open("a", encoding="utf-8") as file:
        for base in BASES:
            assert train(folder / "bases" / base, place / base) == []
            torch.save(logits_of(folder / "bases" / base), place / base / LOGITS)
            for other in others:
                print(json.dumps(compare(folder, place, base, other)), file=file)
