"""The model of the caching allocator makes the segments of torch's: of steps on a GPU, of any requests without one."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from kbitwrap.tensors.allocator import Allocator, process_settings
from support.thorough import few

MIB = 1 << 20
SETTINGS = ["", "max_split_size_mb:20", "expandable_segments:True"]
# The SHA-256 of what torch's allocator, of 2.11 to 2.15, answers to the first 150 sequences.
ANSWERS = {
    "": "198b6509f42b5709d5c0b5437622a87c7223134a06739a6967a081816c00a38c",
    "max_split_size_mb:20": "2b58311eb620b875e981c0adffcabc9dfaded51ed59893b13ccf27b5280a4630",
    "max_split_size_mb:64": "3ae2b517aebb8ca13652e3c364a7e2abdfc92754a477f3c671a9fd4b7b77aed8",
    "expandable_segments:True": "2b931bb8d0e744ba9722133410af06c8259ec7fe04b359e05e9fedcc68dac829",
    "garbage_collection_threshold:0.6": "198b6509f42b5709d5c0b5437622a87c7223134a06739a6967a081816c00a38c",
}
TORCH = Path(torch.__file__).parent
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
NEEDS_TORCHS_ALLOCATOR = pytest.mark.skipif(
    torch.version.cuda is None or COMPILER is None, reason="needs torch for CUDA and a C++ compiler"
)


@pytest.fixture(scope="module")
def torchs_allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with torch's allocator, of device/allocator.cpp."""
    triton = importlib.util.find_spec("triton")  # which has CUDA's headers
    assert triton is not None
    assert triton.origin is not None
    assert COMPILER is not None
    program = tmp_path_factory.mktemp("allocator") / "allocator"
    source = Path(__file__).parents[1] / "device" / "allocator.cpp"
    headers = [f"-I{TORCH / 'include'}", f"-I{Path(triton.origin).parent / 'backends/nvidia/include'}"]
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10_cuda", "-lc10", "-ldl"]
    # Its functions take the place of those of CUDA's libraries; others of these are looked for when they are called.
    linking = ["-rdynamic", "-Wl,--allow-shlib-undefined", "-Wl,-z,lazy"]
    command = [COMPILER, "-std=c++20", "-O1", "-w", *headers, str(source), "-o", str(program), *libraries, *linking]
    subprocess.run(command, check=True)
    return program


@NEEDS_TORCHS_ALLOCATOR
@pytest.mark.parametrize("settings", ANSWERS)
@pytest.mark.parametrize("numbers", few([range(150), range(150, 2000)], [range(150)]), ids=str)
def test_whatever_is_asked_for_it_reserves_what_torchs_reserves(
    settings: str, numbers: range, torchs_allocator: Path
) -> None:
    told: list[str] = []
    expected: list[str] = []
    for number in numbers:
        one_sequence(random.Random(number), settings, told, expected)
    done = subprocess.run(
        [torchs_allocator],
        input="\n".join(told),
        env={**os.environ, "PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # it warns where memory runs out
        text=True,
        check=True,
    )
    for line, said, ours in zip(told, done.stdout.splitlines(), expected, strict=True):
        answer = " ".join(sorted(said.split(" "))) if line == "segments" else said
        assert answer == ours, line


@pytest.mark.parametrize("settings", ANSWERS)
def test_it_answers_as_torchs_answered(settings: str) -> None:
    """Without torch's allocator, by what the test above found."""
    expected: list[str] = []
    for number in range(150):
        one_sequence(random.Random(number), settings, [], expected)
    assert sha256("\n".join(expected).encode()).hexdigest() == ANSWERS[settings]


@NEEDS_TORCHS_ALLOCATOR
@pytest.mark.parametrize("older", [None, "", "max_split_size_mb:64", "expandable_segments:True"])
def test_it_takes_its_settings_from_where_torchs_takes_them(
    older: str | None, torchs_allocator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expandable = "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "" if older == expandable else expandable)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if older is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", older)
    answer = subprocess.run(
        [torchs_allocator], input=f"allocate {15 * MIB}", capture_output=True, text=True, check=True
    )
    allocator = Allocator(process_settings()[1])
    allocator.allocate(15 * MIB)
    assert answer.stdout.split() == [str(allocator.allocated_bytes), str(allocator.reserved_bytes)]


def any_size(draw: random.Random) -> int:
    """Up to 64 MiB, as often of few bytes as of many."""
    return 1 + draw.getrandbits(draw.randint(0, 26))


def one_sequence(draw: random.Random, settings: str, told: list[str], expected: list[str]) -> None:
    """Add what a sequence tells torch's allocator, and what it has to answer."""
    limit = draw.choice([1 << 40, 40 * MIB, 100 * MIB, 400 * MIB])
    allocator = Allocator(settings, limit)
    usual = [MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 20 * MIB, 64 * MIB]
    usual += [any_size(draw) for _ in range(8)]
    live: list[tuple[int, int]] = []
    num_requests = 0

    def tell(line: str, is_out_of_memory: bool = False) -> None:
        told.append(line)
        sums = f"{allocator.allocated_bytes} {allocator.reserved_bytes}"
        expected.append("-1 -1" if is_out_of_memory else sums)

    told.append("begin")
    expected.append("0 0")
    tell(f"limit {limit}")
    for _ in range(draw.choice([30, 300])):
        action = draw.random()
        if action < 0.02:
            allocator.empty_cache()
            tell("empty")
        elif live and action < 0.45:
            number, block = live.pop(draw.randrange(len(live)))
            allocator.free(block)
            tell(f"free {number}")
        else:
            size = draw.choice([draw.choice(usual), any_size(draw)])
            try:
                live.append((num_requests, allocator.allocate(size)))
            except MemoryError:
                tell(f"allocate {size}", is_out_of_memory=True)
            else:
                tell(f"allocate {size}")
            num_requests += 1
    told.append("segments")
    expected.append(" ".join(sorted(",".join(map(str, blocks)) for blocks in found(allocator))))


@pytest.mark.real_gpu  # its caching allocator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", SETTINGS)
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
