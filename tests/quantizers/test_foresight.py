"""A step of a model that another library quantized is predicted to the byte, or refused."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cells import CELLS
from kbitwrap import KbitPreparedModel, StepTracker, UnsupportedModelError, predict_step
from support import zoo
from support.snapshot import Snapshot

# The first two have weights of tensor classes of their own; the third computes some from others as they are read.
REFUSED = {"torchao": r"found a \w+Tensor", "quanto": r"found a \w+Tensor", "compressed-tensors": "cannot be copied"}


@pytest.mark.filterwarnings("ignore:.*let no gradient through:UserWarning")  # test_peft.py has which they are
@pytest.mark.parametrize(("method", "name"), [(method, name) for method, cells in CELLS.items() for name in cells])
def test_a_step_is_predicted_to_the_byte_or_refused(method: str, name: str) -> None:
    load = CELLS[method][name].load
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model = load("llama")
    batch, before = zoo.inputs("llama", model), Snapshot(model)
    options = {"batch_size": 2, "seq_len": 12, "inputs": batch, "lora": lora, "kernels": "cpu", "exact": True}
    if method in REFUSED:
        with pytest.raises(UnsupportedModelError, match=REFUSED[method]):
            predict_step(model, **options)
        return
    memory = predict_step(model, **options)
    assert before.diff(Snapshot(model)) == []
    prepared = KbitPreparedModel(model).prepare()
    adapted = get_peft_model(model, lora)
    prepared.adopt(adapted)
    adapted.train()
    optimizer = torch.optim.AdamW([parameter for parameter in adapted.parameters() if parameter.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        with StepTracker(adapted, optimizer, batch) as tracker:
            adapted(**batch).loss.backward()
            optimizer.step()
    assert (memory.peak_bytes, memory.phases) == (tracker.peak_bytes, tracker.phases)
    assert (memory.static_bytes, memory.by_kind) == (tracker.static_bytes, tracker.by_kind)
