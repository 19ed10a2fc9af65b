"""Writes the tables of docs/memory.md and docs/fit.md that the planner computes from published shapes.

python docs/figures memory_tables
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from transformers import (
    BitsAndBytesConfig,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from kbitwrap import Plan, Precision, StepMemory, build_plan, predict_step
from kbitwrap.foresight.loading import events_of, loading_of
from kbitwrap.foresight.reserved import Prepared, casts_of, plan_of_peft
from kbitwrap.model.pretrained import meta_model
from kbitwrap.model.tree import ModelTree
from sections import DOCS, markdown_table, replace_section

_LLAMA_SHAPED = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "Llama-3-8B": LlamaConfig(vocab_size=128256, **_LLAMA_SHAPED),
    "Mistral-7B-v0.3": MistralConfig(vocab_size=32768, **_LLAMA_SHAPED),
    "Gemma-2-9B": Gemma2Config(
        vocab_size=256000,
        hidden_size=3584,
        intermediate_size=14336,
        num_hidden_layers=42,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=256,
        tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    ),
    "Mixtral-8x7B": MixtralConfig(vocab_size=32000, num_local_experts=8, **_LLAMA_SHAPED),
    "Llama-3-70B": LlamaConfig(
        vocab_size=128256,
        **_LLAMA_SHAPED
        | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    ),
}


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


@functools.cache
def plan(name: str, precision: Precision) -> Plan:
    """Plan for a model of `CONFIGS` in nf4 and bfloat16."""
    return Plan.for_pretrained(CONFIGS[name], NF4, "bfloat16", precision=precision)


def added_table() -> str:
    """What each precision adds, by model."""
    rows = [["model", "parameters as loaded", *(f'`"{precision}"`' for precision in Precision)]]
    for name in CONFIGS:
        loaded = sum(figures["bytes"] for figures in plan(name, Precision.NONE).by_role.values())
        added = [_added(plan(name, precision).added_bytes) for precision in Precision]
        rows.append([name, _mib(loaded), *added])
    return markdown_table(rows, "---:")


def role_table() -> str:
    """What `"full"` adds, by model and role."""
    plans = {name: plan(name, Precision.FULL) for name in CONFIGS}
    roles = [role for found in plans.values() for role, row in found.by_role.items() if row["added_bytes"]]
    columns = list(dict.fromkeys(roles))
    rows = [["model", *columns]]
    for name, found in plans.items():
        rows.append([name, *(_added(found.by_role.get(role, {}).get("added_bytes", 0)) for role in columns)])
    return markdown_table(rows, "---:")


def peak_table() -> str:
    """What `"full"` adds, its peak, and what PEFT's way leaves in the cache and the allocator reserves, by model."""
    rows = [["model", "stays", "peak", "PEFT's way: left in the cache", "reserved before", "and after PEFT's way"]]
    for name in CONFIGS:
        model = meta_model(CONFIGS[name], NF4, "bfloat16")
        full = build_plan(model, precision="full")
        loaded = events_of(loading_of(model), ModelTree(model))
        prepared = Prepared(loaded, [*casts_of(plan_of_peft(full)), None], 0)
        sizes = full.added_bytes, full.peak_bytes, full.cache_bytes, *prepared.reserved_by_phase.values()
        rows.append([name, *map(_mib, sizes)])
    return markdown_table(rows, "---:")


def step(name: str, precision: str) -> StepMemory:
    """A training step of 2048 tokens on CUDA, of a model of `CONFIGS` in nf4 and bfloat16 with LoRA of rank 16."""
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")
    return predict_step(
        CONFIGS[name],
        precision=precision,
        quantization_config=quantization,
        dtype="bfloat16",
        batch_size=1,
        seq_len=2048,
    )


def step_table() -> str:
    """The levels of a training step of 2048 tokens on CUDA, by model and preparation, in GiB."""
    rows = [["model", "precision", "before", "forward", "backward", "optimizer", "peak", "reserved"]]
    for name in ("Mistral-7B-v0.3", "Llama-3-8B"):
        for precision in ("peft", "compute", "norms", "none"):
            found = step(name, precision)
            phases = found.static_bytes, found.forward_bytes, found.backward_bytes, found.optimizer_bytes
            levels = (*phases, found.peak_bytes, found.reserved_bytes or 0)
            rows.append([name, f"`{precision}`", *(f"{level / 2**30:.2f}" for level in levels)])
    return markdown_table(rows, "---:")


MEMORY_PAGE, STEP_PAGE = DOCS / "memory.md", DOCS / "fit.md"
TABLES: dict[str, Callable[[], str]] = {"added": added_table, "roles": role_table, "peak": peak_table}
STEPS = "steps"


def main() -> None:
    """Compute the tables, and write them."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, table in TABLES.items():
        replace_section(MEMORY_PAGE, name, table())
    replace_section(STEP_PAGE, STEPS, step_table())


def _added(num_bytes: int) -> str:
    return f"+{_mib(num_bytes)}" if num_bytes else "0"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
