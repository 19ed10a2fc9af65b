"""A step of a model that another library quantized is predicted to the byte, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cells import CELLS
from kbitwrap import KbitPreparedModel, KbitWrapError, StepTracker, UnsupportedModelError, predict_step
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


# Of a folder: weights that loading makes of others, layers of which no config tells, and a quantizer that builds none.
FOLDERS_REFUSED = {
    "torchao": "quantized with torchao, which makes",
    "hqq": "quantized with HQQ, which the config does not say",
    "compressed-tensors": "no model can be built from the config",
}


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules:UserWarning")  # of GPTQ
@pytest.mark.parametrize(
    ("method", "name"), [(m, n) for m, cells in CELLS.items() for n, cell in cells.items() if cell.is_serializable]
)
def test_a_saved_base_takes_what_the_loaded_one_takes_or_is_refused(method: str, name: str, tmp_path: Path) -> None:
    load = CELLS[method][name].load
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    options = {"batch_size": 2, "seq_len": 12, "lora": lora, "kernels": "cpu"}
    load("llama").save_pretrained(tmp_path)
    if method in FOLDERS_REFUSED:
        with pytest.raises(KbitWrapError, match=FOLDERS_REFUSED[method]):
            predict_step(tmp_path, **options)
        return
    assert predict_step(tmp_path, **options).to_dict() == predict_step(load("llama"), **options).to_dict()
