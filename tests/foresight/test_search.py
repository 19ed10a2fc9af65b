"""The longest sequence and the largest batch that a budget allows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from torch import nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig

from kbitwrap import ConfigError, StepMemory, StepPredictor
from kbitwrap.foresight.search import largest
from support.thorough import few


@given(
    fixed=st.integers(0, 10_000),
    slope=st.integers(1, 1_000),
    square=st.integers(0, 20),
    step=st.integers(1, 512),
    budget=st.integers(0, 10_000_000),
    start=st.integers(1, 5_000),
    limit=st.integers(1, 100_000),
)
def test_the_largest_number_within_a_budget_is_found_in_few_trials(
    fixed: int, slope: int, square: int, step: int, budget: int, start: int, limit: int
) -> None:
    trials: list[int] = []

    def num_bytes(number: int) -> int:
        trials.append(number)
        return -(-(fixed + slope * number + square * number * number) // step) * step

    found = largest(num_bytes, budget, [start], limit)
    assert found == 0 or num_bytes(found) <= budget
    assert found == limit or num_bytes(found + 1) > budget
    assert len(trials) <= 42


def test_a_line_is_followed_to_its_end_in_five_trials() -> None:
    trials: list[int] = []

    def num_bytes(number: int) -> int:
        trials.append(number)
        return 5_000_000_000 + 1_234_567 * number

    assert largest(num_bytes, 8 * 2**30, [2048], 131_072) == 2907
    assert len(trials) <= 5


class Bigrams(nn.Module):
    """A language model as small as there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embed(input_ids))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_the_largest_batch_and_the_longest_sequence_fit_a_budget_that_one_more_does_not() -> None:
    lora = LoraConfig(target_modules=["head"])
    predict = StepPredictor(Bigrams(), precision="none", gradient_checkpointing=False, lora=lora, kernels="cpu")
    budget = predict(50, 7).peak_bytes
    assert predict.largest_batch(budget, 7) == 50
    assert predict.largest_batch(budget - 1, 7) == 49
    assert predict.longest_sequence(budget, 50) == 7


def test_a_search_refuses_what_makes_no_batch_as_a_prediction_does() -> None:
    lora = LoraConfig(target_modules=["head"])
    predict = StepPredictor(Bigrams(), precision="none", gradient_checkpointing=False, lora=lora, kernels="cpu")
    for number in (0, -1, "2", True, 1 << 21):
        with pytest.raises(ConfigError, match=r"^batch_size"):
            predict.longest_sequence("1GiB", number)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^(batch_size and )?seq_len"):
            predict.largest_batch("1GiB", number)  # type: ignore[arg-type]


def test_inputs_leave_nothing_to_search() -> None:
    shapes = dict.fromkeys(("input_ids", "labels"), ((2, 7), torch.int64))
    lora = LoraConfig(target_modules=["head"])
    predict = StepPredictor(Bigrams(), precision="none", inputs=shapes, lora=lora, gradient_checkpointing=False)
    assert predict.fits("1GiB")
    for search in (predict.longest_sequence, lambda budget: predict.largest_batch(budget, 7)):
        with pytest.raises(ConfigError, match=r"^inputs: they fix the batch and its length"):
            search("1GiB")


def test_the_batch_of_a_trainers_arguments_is_that_of_a_search(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**SHAPES, architectures=["LlamaForCausalLM"])
    args = transformers.TrainingArguments(str(tmp_path), per_device_train_batch_size=3, use_cpu=True)
    predict = StepPredictor(config, args=args, precision="none", kernels="cpu")
    budget = predict(None, 64).peak_bytes
    assert predict.fits(budget, None, 64)
    longest = predict.longest_sequence(budget)
    assert longest == predict.longest_sequence(budget, 3) >= 64
    assert not predict.fits(budget, None, longest + 1)


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "vocab_size": 160,
    "dtype": "bfloat16",
}
WINDOW = 93  # tokens
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Llama, tied and eager": ("LlamaForCausalLM", {"tie_word_embeddings": True, "attn_implementation": "eager"}),
    "Mistral with a window": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "Gemma 2": ("Gemma2ForCausalLM", {"sliding_window": WINDOW}),
    "Gemma 3": ("Gemma3ForCausalLM", {"sliding_window": WINDOW}),
    "Mixtral": ("MixtralForCausalLM", {"sliding_window": None, **EXPERTS}),
    "GPT-2, whose positions end": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 300}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 6, "num_heads": 4}),
}


def predictor(name: str, precision: str, **settings: Any) -> StepPredictor:
    architecture, fields = MODELS[name]
    model = getattr(transformers, architecture)
    shapes = SHAPES if name not in ("T5", "GPT-2, whose positions end") else {"vocab_size": 160, "dtype": "bfloat16"}
    others = {"decoder_start_token_id": 0} if name == "T5" else {}
    config = model.config_class(**shapes, **fields, **others, architectures=[architecture])
    return StepPredictor(config, quantization_config=NF4, precision=precision, **settings)


def most_of(step: StepMemory) -> int:
    """The most that a run reserves, or holds where nothing is reserved."""
    return max((step.reserved_by_phase or {"peak": step.peak_bytes}).values())


WAYS = ("compute", "none", "peft")
CASES = [(name, WAYS[number % 3], ("cuda", "cpu")[number % 2]) for number, name in enumerate(MODELS)]
CASES += [(name, WAYS[number % 3], ("cpu", "cuda")[number % 2]) for number, name in enumerate(MODELS, 1)]


@pytest.mark.parametrize(("name", "precision", "kernels"), few(CASES, []))
def test_what_a_search_finds_fits_in_a_trace_of_its_own_and_one_more_does_not(
    name: str, precision: str, kernels: str
) -> None:
    search = predictor(name, precision, kernels=kernels)
    anew = predictor(name, precision, kernels=kernels)
    budget = most_of(anew(1, 261))  # more tokens than a window has
    found = search.longest_sequence(budget)
    assert anew.fits(budget, 1, found)
    assert not anew.fits(budget, 1, found + 1)
    budget = most_of(anew(9, 40))
    found = search.largest_batch(budget, 40)
    assert anew.fits(budget, found, 40)
    assert not anew.fits(budget, found + 1, 40)


@pytest.mark.thorough
def test_a_search_runs_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = predictor("Mistral with a window", "compute", kernels="cpu")
    anew = predictor("Mistral with a window", "compute", kernels="cpu")
    budget = anew(1, 3001).peak_bytes
    predict(1, 64)
    runs: list[tuple[int, int]] = []
    run = StepPredictor._run

    def counted(self: StepPredictor, batch_size: int, seq_len: int) -> Any:
        runs.append((batch_size, seq_len))
        return run(self, batch_size, seq_len)

    monkeypatch.setattr(StepPredictor, "_run", counted)
    assert predict.longest_sequence(budget) >= 3001
    assert len(runs) <= 4
