"""Predictions against a CUDA device's own allocator and kernels. Skipped where there is none."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
)

from kbitwrap import KbitPreparedModel, StepPredictor, StepTracker, predict_step
from kbitwrap.foresight.unknown import THREADS, WORKSPACE_BYTES

pytestmark = [
    pytest.mark.real_gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*neither a quantization attribute nor a quantized layer:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning"),
]

SHAPES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1 << 17,
    "dtype": "bfloat16",
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPES, architectures=["LlamaForCausalLM"]),
    "gemma2": Gemma2Config(**SHAPES, head_dim=64, architectures=["Gemma2ForCausalLM"]),
    "mixtral": MixtralConfig(**SHAPES, num_local_experts=4, architectures=["MixtralForCausalLM"]),
}
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
LORA = LoraConfig(r=16, lora_dropout=0.1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
BATCH = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in FAMILIES.items():
        made[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(made[name])
    return made


def fields(checkpointing: bool) -> dict[str, Any]:
    on: dict[str, Any] = {"gradient_checkpointing": checkpointing}
    return on | ({"gradient_checkpointing_kwargs": {"use_reentrant": True}} if checkpointing else {})


class Run:
    """A model on the device, and steps of it; what was allocated before is not counted."""

    def __init__(self, folder: Path, way: str, checkpointing: bool) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()
        self.before = torch.cuda.memory_allocated()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, quantization_config=NF4, device_map={"": 0})
        options = fields(checkpointing)
        if way == "peft":
            on = options.pop("gradient_checkpointing")
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=on, **options)
            self.model: Any = get_peft_model(model, LORA)
        else:
            prepared = KbitPreparedModel(model, precision=way, **options).prepare()
            self.model = get_peft_model(model, LORA)
            prepared.adopt(self.model)
        self.model.train()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            self.model(**batch).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def peak_bytes(self, batch: dict[str, torch.Tensor]) -> int:
        self.step(batch)
        torch.cuda.reset_peak_memory_stats()
        self.step(batch)
        return torch.cuda.max_memory_allocated() - self.before


def batch_of(seq_len: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 32000, (BATCH, seq_len), device="cuda")
    return {"input_ids": ids, "labels": ids.clone()}


def workspaces() -> int:
    return THREADS * WORKSPACE_BYTES[torch.cuda.get_device_capability()[0] >= 9]


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("way", ["norms", "peft"])
@pytest.mark.parametrize("seq_len", [1024, 2048])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_allocators_peak_is_within_2_percent_of_the_prediction(
    folders: dict[str, Path], name: str, seq_len: int, way: str, checkpointing: bool
) -> None:
    predicted = predict_step(
        folders[name],
        precision=way,
        batch_size=BATCH,
        seq_len=seq_len,
        lora=LORA,
        quantization_config=NF4,
        **fields(checkpointing),
    )
    measured = Run(folders[name], way, checkpointing).peak_bytes(batch_of(seq_len)) - workspaces()
    assert abs(predicted.peak_bytes - measured) <= 0.02 * measured


@pytest.mark.parametrize("way", ["norms", "peft"])
def test_a_tracker_counts_what_is_predicted_for_the_device(folders: dict[str, Path], way: str) -> None:
    batch, run = batch_of(2048), Run(folders["llama"], way, True)
    run.step(batch)
    torch.cuda.reset_peak_memory_stats()
    with StepTracker(run.model, run.optimizer, batch) as tracker:
        run.step(batch)
    allocated = torch.cuda.max_memory_allocated() - run.before
    predicted = predict_step(
        folders["llama"],
        precision=way,
        batch_size=BATCH,
        seq_len=2048,
        lora=LORA,
        quantization_config=NF4,
        **fields(True),
    )
    assert abs(tracker.peak_bytes - predicted.peak_bytes) <= 0.02 * predicted.peak_bytes
    assert tracker.peak_bytes <= allocated


@pytest.mark.parametrize("way", ["norms", "peft"])
def test_what_is_reserved_for_a_step_is_what_is_predicted(folders: dict[str, Path], way: str) -> None:
    run = Run(folders["llama"], way, True)
    run.peak_bytes(batch_of(2048))
    larger = workspaces() - THREADS * WORKSPACE_BYTES[0]
    predicted = predict_step(
        folders["llama"],
        precision=way,
        batch_size=BATCH,
        seq_len=2048,
        lora=LORA,
        quantization_config=NF4,
        **fields(True),
    )
    assert predicted.reserved_bytes is not None
    measured = torch.cuda.max_memory_reserved() - larger
    assert abs(predicted.reserved_bytes - measured) <= 0.03 * measured


def test_the_longest_sequence_runs_within_its_budget_and_a_longer_one_runs_out(folders: dict[str, Path]) -> None:
    budget = 4 * 2**30
    predict = StepPredictor(folders["llama"], lora=LORA, quantization_config=NF4, **fields(True))
    longest = predict.longest_sequence(budget, BATCH)
    larger = workspaces() - THREADS * WORKSPACE_BYTES[0]
    torch.cuda.set_per_process_memory_fraction((budget + larger) / torch.cuda.get_device_properties(0).total_memory)
    try:
        run = Run(folders["llama"], "norms", True)
        run.step(batch_of(int(longest * 0.95)))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            run.step(batch_of(int(longest * 1.05)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
