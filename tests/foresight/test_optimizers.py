"""An optimizer's step is predicted like that of every step after the first, whatever makes the optimizer."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from peft import get_peft_model
from transformers.optimization import Adafactor

from kbitwrap import KbitPreparedModel, StepTracker, predict_step
from support import zoo

OPTIMIZERS = {
    "makes its state with itself": lambda parameters: torch.optim.Adagrad(parameters),
    "makes its state one by one": lambda parameters: Adafactor(
        parameters, lr=1e-4, scale_parameter=False, relative_step=False
    ),
    "computes tables": lambda parameters: bitsandbytes.optim.AdamW8bit(parameters),
    "reads its counters": lambda parameters: torch.optim.RAdam(parameters),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_function_that_makes_an_optimizer_is_predicted_to_the_byte(kind: str) -> None:
    lora = zoo.lora_config("llama", target_modules=["q_proj", "down_proj"])
    model = zoo.load("llama", quant="nf4", num_hidden_layers=1)
    batch = zoo.inputs("llama", model)
    memory = predict_step(
        model, batch_size=2, seq_len=12, inputs=batch, lora=lora, optimizer=OPTIMIZERS[kind], kernels="cpu"
    )
    prepared = KbitPreparedModel(model).prepare()
    adapted: Any = get_peft_model(model, lora)
    prepared.adopt(adapted)
    optimizer = OPTIMIZERS[kind]([parameter for parameter in adapted.train().parameters() if parameter.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        with StepTracker(adapted, optimizer, batch) as tracker:
            adapted(**batch).loss.backward()
            optimizer.step()
    assert (memory.static_bytes, memory.phases) == (tracker.static_bytes, tracker.phases)
