"""The model of the caching allocator makes the segments that torch's makes. Skipped where there is no CUDA device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap.tensors.allocator import Allocator

pytestmark = [
    pytest.mark.real_gpu,  # its caching allocator
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("settings", ["", "max_split_size_mb:64", "expandable_segments:True"])
def test_the_segments_of_two_steps_are_those_of_torch(settings: str, tmp_path: Path) -> None:
    """In a process of its own, whose allocator has given out nothing before."""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    trace, segments, reserved = json.loads(done.stdout.splitlines()[-1])
    allocator = Allocator(settings)
    live: dict[int, int] = {}
    for action, address, size in trace:
        if action == "alloc":
            live[address] = allocator.allocate(size)
        elif action == "free_completed":
            allocator.free(live.pop(address))
        elif action in ("segment_free", "segment_unmap"):  # the first of those of an emptied cache
            allocator.empty_cache()
    assert allocator.reserved_bytes == reserved
    assert sorted(map(tuple, found(allocator))) == sorted(map(tuple, segments))


def found(allocator: Allocator) -> list[list[Any]]:
    """The sizes of the blocks of each segment, below 0 where they are free."""
    made: list[list[Any]] = []
    end = None
    for address in sorted([*allocator.blocks, *allocator.free_blocks]):
        if address != end:
            made.append([])
        size = allocator.blocks.get(address) or allocator.free_blocks[address]
        made[-1].append(size if address in allocator.blocks else -size)
        end = address + size
    return made


def run_steps(folder: str) -> None:
    """Run two steps of a small QLoRA, and print what torch's allocator did."""
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

    torch.cuda.memory._record_memory_history(context=None, max_entries=10_000_000)
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16, dtype="bfloat16"
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=nf4, device_map={"": 0})
    model = get_peft_model(prepare_model_for_kbit_training(model, auto_clear_cache=False), LoraConfig(r=16))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(3, 32000, (2, 1024), device="cuda")
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    snapshot = torch.cuda.memory._snapshot()
    trace = [(event["action"], event["addr"], event["size"]) for event in snapshot["device_traces"][0]]
    segments = []
    for segment in snapshot["segments"]:
        blocks = segment["blocks"]
        segments.append([one["size"] if one["state"] == "active_allocated" else -one["size"] for one in blocks])
    print(json.dumps([trace, segments, torch.cuda.memory_reserved()]))


if __name__ == "__main__":
    run_steps(sys.argv[1])
