"""The peak of loading is what a CUDA device's allocator counts. Skipped where there is none."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import core_model_loading

from kbitwrap.foresight.loading import loading_of
from kbitwrap.model.pretrained import meta_model
from support import zoo
from support.foreseen import ReadAhead

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def loading_bytes(model: Any) -> int:
    loading = loading_of(model)
    assert loading is not None
    return loading.peak_bytes


def most_allocated(row: zoo.Architecture, folder: Path, **options: Any) -> int:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cls: Any = getattr(transformers, row.model_class)
    cls.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cuda:0"}, **options)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("quant", ["nf4", "nf4-double", "int8", None])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "qwen2_vl", "t5"])
def test_the_peak_of_loading_is_that_of_the_allocator(name: str, quant: str | None) -> None:
    row = zoo.ARCHITECTURES[name]
    config = None if quant is None else zoo._quantization_config(row, quant, torch.bfloat16)
    folder = zoo.checkpoint(name)
    predicted = loading_bytes(meta_model(str(folder), config, torch.bfloat16))
    assert most_allocated(row, folder, quantization_config=config) == predicted


@pytest.mark.parametrize("quant", ["nf4", "nf4-double", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_threads_that_load_what_was_saved_quantized_take_at_most_what_is_predicted(
    name: str, quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = zoo.ARCHITECTURES[name]
    zoo.load(name, quant).save_pretrained(tmp_path)
    predicted = loading_bytes(meta_model(tmp_path))
    assert most_allocated(row, tmp_path) <= predicted
    monkeypatch.setattr(core_model_loading, "ThreadPoolExecutor", ReadAhead)
    assert most_allocated(row, tmp_path) == predicted
