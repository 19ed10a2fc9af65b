"""What CUDA's caching allocator reserves: the reporter's case, and one truth with what tensors hold."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig, Gemma2Config, LlamaConfig, MistralConfig, MixtralConfig, T5Config

from kbitwrap import ConfigError, Plan, StepPredictor, predict_step
from kbitwrap.foresight import loading, reserved
from kbitwrap.tensors.allocator import Allocator, rounded_up
from support.thorough import few

MIB = 1 << 20
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
# FSDP2 shards it on torch 2.11, too.
PACKED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_storage="bfloat16")
SHAPES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "dtype": "bfloat16",
}
T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 8,
    "num_heads": 4,
    "vocab_size": 160,
    "decoder_start_token_id": 0,
    "dtype": "bfloat16",
}
SHALLOW = LlamaConfig(**SHAPES, architectures=["LlamaForCausalLM"])
DEEP = SHAPES | {"num_hidden_layers": 12}  # of which a few blocks are run
DEEP_MODELS: dict[str, Any] = {
    "llama": LlamaConfig(**DEEP, architectures=["LlamaForCausalLM"]),
    "gemma2": Gemma2Config(**DEEP, head_dim=16, sliding_window=32, architectures=["Gemma2ForCausalLM"]),
    "mixtral": MixtralConfig(**DEEP, num_local_experts=4, architectures=["MixtralForCausalLM"]),
    "t5": T5Config(**T5, architectures=["T5ForConditionalGeneration"]),
}
MISTRAL = MistralConfig(
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    sliding_window=None,
    architectures=["MistralForCausalLM"],
    dtype="bfloat16",
)


@pytest.mark.thorough
def test_the_gibibyte_that_was_reported_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/peft#3265: PEFT 0.18, which left the cache alone, and transformers 4.56, on a Jetson of 8 GB."""
    quantize = loading.quantize_weight

    def quantize_a_copy(parameter: Any, weight: torch.Tensor) -> Any:
        return quantize(parameter, weight.clone())  # transformers 4 held the weight, too

    monkeypatch.setattr(loading, "quantize_weight", quantize_a_copy)
    step = predict_step(
        MISTRAL, precision="peft", empty_cache=False, quantization_config=NF4, batch_size=1, seq_len=64, optimizer=None
    )
    loaded = predict_step(
        MISTRAL, precision="unprepared", quantization_config=NF4, batch_size=1, seq_len=64, optimizer=None
    )
    found = step.reserved_by_phase
    assert found is not None
    assert found["loaded"] == pytest.approx(4192 * MIB, rel=0.02)
    assert found["prepared"] == pytest.approx(5216 * MIB, rel=0.02)
    assert found["prepared"] - found["loaded"] == 1024 * MIB
    for allocated, held in ((3956, loaded), (4468, step)):
        kinds = held.static_by_kind
        assert kinds["weights"] + kinds["quantization_statistics"] == pytest.approx(allocated * MIB, rel=0.02)


class Counting(Allocator):
    """An allocator that counts what it is asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: dict[int, int] = {}
        self.level = self.most = 0

    def allocate(self, num_bytes: int) -> int:
        block = super().allocate(num_bytes)
        self.asked[block] = rounded_up(num_bytes, 512)
        self.level += self.asked[block]
        self.most = max(self.most, self.level)
        return block

    def free(self, address: int) -> None:
        super().free(address)
        self.level -= self.asked.pop(address)

    def reset_peaks(self) -> None:
        super().reset_peaks()
        self.most = self.level


CASES: list[tuple[str, dict[str, Any]]] = [
    ("shallow", {"precision": "norms"}),
    ("llama", {"precision": "norms"}),
    ("llama", {"precision": "compute", "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}),
    ("llama", {"precision": "none", "gradient_checkpointing": False, "lora": LoraConfig(r=4)}),
    ("llama", {"precision": "unprepared", "quantization_config": None, "optimizer": "sgd"}),
    ("gemma2", {"precision": "peft"}),
    ("mixtral", {"precision": "full", "optimizer": "adamw_8bit"}),
    ("t5", {"precision": "norms", "exact": True}),
]


@pytest.mark.parametrize(("name", "options"), few(CASES, CASES[:1]), ids=str)
def test_what_the_allocator_is_asked_for_at_most_is_the_peak(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Counting] = []

    def make(*args: Any) -> Counting:
        made.append(Counting(*args))
        return made[-1]

    monkeypatch.setattr(reserved, "Allocator", make)
    predict = StepPredictor({"shallow": SHALLOW, **DEEP_MODELS}[name], **{"quantization_config": NF4, **options})
    step = predict(2, 48)
    samples = sum(part.least_bytes for part in step.unknown if part.what.startswith("samples"))
    beside = 2 * reserved.WORKSPACE_BYTES[0] + rounded_up(samples, 512)
    assert made[-1].most - beside == step.peak_bytes
    blocks = next(part for part in step.unknown if "blocks" in part.what)
    assert blocks.most_bytes == made[-1].peak_allocated_bytes - made[-1].most
    assert step.reserved_bytes == made[-1].peak_reserved_bytes >= made[-1].peak_allocated_bytes


@pytest.mark.parametrize("name", few(["t5", "llama", "gemma2"], ["t5"]))
@pytest.mark.parametrize("precision", ["full", "compute", "norms"])
def test_the_samples_beside_a_step_are_those_that_a_preparation_keeps(name: str, precision: str) -> None:
    config = DEEP_MODELS[name]
    plan = Plan.for_pretrained(config, NF4, precision=precision)
    step = predict_step(config, quantization_config=NF4, precision=precision, batch_size=1, seq_len=8)
    (samples,) = (part for part in step.unknown if part.what.startswith("samples"))
    assert samples.least_bytes == samples.most_bytes == plan.sample_bytes


WIDE = LlamaConfig(**SHAPES | {"vocab_size": 1 << 18, "tie_word_embeddings": False})
OF_PEFT: dict[str, Any] = {"precision": "peft", "quantization_config": NF4, "batch_size": 1, "seq_len": 8}
predicted = functools.partial(predict_step, SHALLOW, quantization_config=NF4, batch_size=2, seq_len=48)


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["norms", "peft"])
@pytest.mark.parametrize("name", DEEP_MODELS)
def test_blocks_that_are_not_run_reserve_what_they_would(name: str, precision: str) -> None:
    options: dict[str, Any] = {"quantization_config": NF4, "precision": precision, "batch_size": 2, "seq_len": 2000}
    cut, all_ = (predict_step(DEEP_MODELS[name], exact=exact, **options) for exact in (False, True))
    assert cut.traced_blocks < all_.traced_blocks
    assert cut.reserved_by_phase == all_.reserved_by_phase


def test_it_is_in_the_prediction_on_cuda_alone() -> None:
    step = predicted()
    assert step.to_dict()["reserved_bytes"] == step.reserved_bytes == (step.reserved_by_phase or {})["step"]
    assert "reserved by the allocator: loaded 2.0 MiB, prepared " in str(step)
    packed = {"quantization_config": PACKED, "engine": "fsdp2", "num_devices": 2}
    for nowhere in (predicted(kernels="cpu"), predicted(**packed)):
        assert nowhere.reserved_by_phase is None
        assert nowhere.reserved_bytes is None
        assert "reserved" not in str(nowhere)
    shared = predicted(engine="ddp", num_devices=2)
    assert (shared.reserved_bytes or 0) >= (step.reserved_bytes or 0)


def test_settings_of_the_allocator_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = predict_step(WIDE, **OF_PEFT).reserved_by_phase
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:x")
    assert predict_step(WIDE, **OF_PEFT).reserved_by_phase != usual
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    with pytest.raises(ConfigError, match=r"^PYTORCH_ALLOC_CONF: expected the native backend.*max_split_size_mb:x"):
        predicted()
    assert predicted(kernels="cpu").reserved_bytes is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # is set
    assert predict_step(WIDE, **OF_PEFT).reserved_by_phase == usual
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:x")
    with pytest.raises(ConfigError, match=r"^PYTORCH_CUDA_ALLOC_CONF: "):
        predicted()


def test_a_step_fits_that_runs_once_the_cache_was_emptied() -> None:
    predict = StepPredictor(SHALLOW, quantization_config=NF4)
    step = predict(2, 2000)
    assert step.reserved_bytes is not None
    assert predict.fits(max((step.reserved_by_phase or {}).values()), 2, 2000)
    assert not predict.fits(step.peak_bytes - 1, 2, 2000)


@pytest.mark.thorough
def test_a_search_goes_by_what_fits() -> None:
    predict = StepPredictor(SHALLOW, quantization_config=NF4)
    step = predict(2, 2000)
    assert step.reserved_bytes is not None
    budget = (step.peak_bytes + step.reserved_bytes) // 2
    longest = predict.longest_sequence(budget, 2)
    assert predict.fits(budget, 2, longest)
    assert not predict.fits(budget, 2, longest + 1)


def test_pefts_function_empties_the_cache_unless_it_is_told_not_to() -> None:
    emptied, kept = (predict_step(WIDE, **OF_PEFT, empty_cache=is_emptied) for is_emptied in (True, False))
    assert (emptied.reserved_by_phase or {})["prepared"] < (kept.reserved_by_phase or {})["prepared"]
    assert predict_step(WIDE, **OF_PEFT).reserved_by_phase == emptied.reserved_by_phase
    with pytest.raises(ConfigError, match="gradient_checkpointing_kwargs and empty_cache alone, found freeze"):
        predict_step(WIDE, **OF_PEFT, freeze=True)
