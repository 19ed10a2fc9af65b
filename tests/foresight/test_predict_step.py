"""A step with other adapters than a LoRA holds, to the byte, what a tracker counts of the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, get_peft_model

from kbitwrap import KbitPreparedModel, StepMemory, StepTracker, patched, predict_step
from support import zoo
from support.thorough import few

REENTRANT = {"use_reentrant": True}  # as PEFT's function by default, and without its warning


def tracked(name: str, way: str, batch: zoo.Batch, lora: Any, **fields: Any) -> StepTracker:
    """A real second step."""
    model: Any = zoo.load(name, num_hidden_layers=1)
    prepared = KbitPreparedModel(model, precision=way, **fields).prepare()
    model = get_peft_model(model, lora)
    prepared.adopt(model)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    zoo.loss(name, model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    with StepTracker(model, optimizer, batch) as tracker:
        zoo.loss(name, model, batch).backward()
        optimizer.step()
    return tracker


def figures(memory: StepMemory | StepTracker) -> tuple[int, int, dict[str, int], dict[str, int]]:
    return memory.static_bytes, memory.peak_bytes, memory.phases, memory.by_kind


# Each with a model, and a precision.
ADAPTERS: dict[str, tuple[str, str, Any]] = {
    "AdaLoRA, whose ranks PEFT makes trainable": (
        "llama",
        "full",
        AdaLoraConfig(init_r=6, target_modules=["q_proj", "v_proj"], total_step=10, task_type="CAUSAL_LM"),
    ),
    "LoRA on tied embeddings, whose tie PEFT breaks": (
        "gemma2",
        "norms",
        LoraConfig(r=4, target_modules=["embed_tokens"], ensure_weight_tying=True, task_type="CAUSAL_LM"),
    ),
    "prompt tuning, outside of the model": (
        "llama",
        "compute",
        PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    ),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_step_with_other_adapters_and_originals_kept_equals_the_real_one_to_the_byte(kind: str) -> None:
    name, way, adapters = ADAPTERS[kind]
    fields = {"keep_originals": True, "audit": True}
    model = zoo.load(name, num_hidden_layers=1)
    batch = zoo.inputs(name, model)
    predicted = predict_step(
        model, precision=way, batch_size=2, seq_len=12, inputs=batch, lora=adapters, kernels="cpu", **fields
    )
    assert figures(predicted) == figures(tracked(name, way, batch, adapters, **fields))


def test_pefts_own_function_is_predicted_where_a_drop_in_stands_in_its_place() -> None:
    def predicted() -> StepMemory:
        model = zoo.load("llama", num_hidden_layers=1)
        options = {"gradient_checkpointing_kwargs": REENTRANT, "kernels": "cpu", "optimizer": "sgd"}
        lora = zoo.lora_config("llama", target_modules=["q_proj"])
        return predict_step(model, precision="peft", batch_size=1, seq_len=8, lora=lora, **options)

    outside = predicted()
    with patched(precision="none"), patched(precision="compute"):
        assert figures(predicted()) == figures(outside)


SAVED = [(name, quant) for name in ("llama", "gpt2", "mixtral") for quant in ("nf4", "nf4-double", "fp4", "int8")]
SHAPE = {"batch_size": 2, "seq_len": 12, "precision": "norms", "optimizer": "sgd"}


@pytest.mark.parametrize(("name", "quant"), few(SAVED, [("mixtral", "fp4")]))
def test_a_base_that_was_saved_quantized_takes_what_it_takes_quantized_on_loading(
    name: str, quant: str, tmp_path: Path
) -> None:
    zoo.load(name, quant).save_pretrained(tmp_path)
    settings = zoo._quantization_config(zoo.ARCHITECTURES[name], quant, torch.bfloat16)
    lora = zoo.lora_config(name)
    on_loading = predict_step(
        str(zoo.checkpoint(name)), quantization_config=settings, dtype="bfloat16", lora=lora, **SHAPE
    )
    expected, found = on_loading.to_dict(), predict_step(tmp_path, lora=lora, **SHAPE).to_dict()
    assert found.pop("loading_bytes") != expected.pop("loading_bytes")
    assert found.pop("mapped_bytes") <= expected.pop("mapped_bytes")  # codes are smaller than what is quantized
    assert found == expected


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_base_that_was_saved_quantized_keeps_its_dtype_whichever_is_asked_for(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    zoo.load("llama", "nf4", dtype).save_pretrained(tmp_path)
    of_its_own, asked = (predict_step(tmp_path, dtype=one, **SHAPE).to_dict() for one in (None, "bfloat16"))
    (warning,) = set(asked["warnings"]) - set(of_its_own["warnings"])
    assert f"the base's files are {str(dtype).removeprefix('torch.')}, which loading keeps" in warning
    assert {**asked, "warnings": None} == {**of_its_own, "warnings": None}
