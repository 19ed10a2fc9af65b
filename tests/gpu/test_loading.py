"""The peak of loading is what a CUDA device's allocator counts. Skipped where there is none."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers

from kbitwrap.foresight.loading import loading_bytes
from kbitwrap.model.pretrained import meta_model
from support import zoo

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("quant", ["nf4", "nf4-double", "int8", None])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "qwen2_vl", "t5"])
def test_the_peak_of_loading_is_that_of_the_allocator(name: str, quant: str | None) -> None:
    row = zoo.ARCHITECTURES[name]
    config = None if quant is None else zoo._quantization_config(row, quant, torch.bfloat16)
    folder = zoo.checkpoint(name)
    predicted = loading_bytes(meta_model(str(folder), config, torch.bfloat16))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cls: Any = getattr(transformers, row.model_class)
    options = {} if config is None else {"quantization_config": config}
    model = cls.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cuda:0"}, **options)
    assert torch.cuda.max_memory_allocated() - before == predicted
    del model
