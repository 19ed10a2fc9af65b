"""An optimizer's step is predicted like that of every step after the first, whatever makes the optimizer."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import pytest
import torch
from peft import get_peft_model
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor
from transformers.training_args import OptimizerNames

from kbitwrap import ConfigError, KbitPreparedModel, StepMemory, StepTracker, predict_step
from support import zoo
from support.thorough import every_other, few

OPTIMIZERS = {
    "makes its state with itself": lambda parameters: torch.optim.Adagrad(parameters),
    "makes its state one by one": lambda parameters: Adafactor(
        parameters, lr=1e-4, scale_parameter=False, relative_step=False
    ),
    "computes tables": lambda parameters: bitsandbytes.optim.AdamW8bit(parameters),
    "reads its counters": lambda parameters: torch.optim.RAdam(parameters),
}
LORA = zoo.lora_config("llama", r=64, target_modules=["q_proj", "down_proj"])  # 4,096 elements and more are in 8 bits


def predicted(optimizer: Any, **options: Any) -> StepMemory:
    model = zoo.load("llama", quant="nf4", num_hidden_layers=1)
    batch = zoo.inputs("llama", model)
    options = {"kernels": "cpu", "lora": LORA, **options}
    return predict_step(model, inputs=batch, optimizer=optimizer, **options)


def tracked(make: Any) -> tuple[StepTracker, torch.optim.Optimizer]:
    """A real second step with the optimizer that is made of the parameters."""
    model = zoo.load("llama", quant="nf4", num_hidden_layers=1)
    batch = zoo.inputs("llama", model)
    prepared = KbitPreparedModel(model).prepare()
    adapted: Any = get_peft_model(model, LORA)
    prepared.adopt(adapted)
    optimizer = make([parameter for parameter in adapted.train().parameters() if parameter.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        with StepTracker(adapted, optimizer, batch) as tracker:
            adapted(**batch).loss.backward()
            optimizer.step()
    return tracker, optimizer


@pytest.mark.parametrize("kind", every_other(OPTIMIZERS))
def test_a_function_that_makes_an_optimizer_is_predicted_to_the_byte(kind: str) -> None:
    memory = predicted(OPTIMIZERS[kind])
    tracker, _ = tracked(OPTIMIZERS[kind])
    assert (memory.static_bytes, memory.phases) == (tracker.static_bytes, tracker.phases)


# Their packages are not in the tests' environment.
OF_PACKAGES = {
    "adamw_anyprecision",
    "grokadamw",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
}
REFUSED = {
    "galore": "projects gradients",
    "apollo": "projects gradients",
    "lomo": "during the backward pass",
    "adalomo": "during the backward pass",
    "adamw_torch_4bit": "compiled",
    "adamw_torch_8bit": "compiled",
    "stable_adamw": "reads values",
    "adamw_torch_xla": "cannot be made",
    "adamw_torch_npu_fused": "cannot be made",
}


def reason(name: str) -> str | None:
    """Why an optimizer is refused, if it is."""
    if name in OF_PACKAGES:
        return "cannot be made"
    return next((why for start, why in REFUSED.items() if name.startswith(start)), None)


NAMES = [one.value for one in OptimizerNames]
PREDICTED = [name for name in NAMES if reason(name) is None]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("name", few(PREDICTED, ["paged_ademamix_8bit", "lion_8bit", "rmsprop"]))
def test_every_optimizer_of_the_trainer_is_predicted_to_the_byte(name: str, tmp_path: Any) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    tracker, _ = tracked(lambda parameters: cls(parameters, **options))
    memory = predicted(name)
    assert (memory.static_bytes, memory.phases) == (tracker.static_bytes, tracker.phases)


@pytest.mark.parametrize(
    "name", few([name for name in NAMES if name not in PREDICTED], ["adalomo", "adamw_torch_4bit", "grokadamw"])
)
def test_every_other_optimizer_of_the_trainer_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer: '{name}' .*{reason(name)}") as caught:
        predicted(name, lora=zoo.lora_config("llama", target_modules=["q_proj"]))
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_on_cuda_paged_states_of_large_weights_are_not_counted_and_their_scales_are() -> None:
    lora = zoo.lora_config("llama", r=2048, target_modules=["q_proj"])  # two weights of 131,072 elements
    by_name = {
        name: predicted(name, lora=lora, kernels="cuda").static_by_kind["optimizer"]
        for name in ("adamw_8bit", "paged_adamw_8bit", "paged_lion_8bit")
    }
    num_elements, num_tables = 131_072, 2
    scales = num_elements // 256 * 4
    tables = num_tables * 256 * 4
    assert by_name["adamw_8bit"] == 2 * 2 * (num_elements + scales) + tables
    assert by_name["paged_adamw_8bit"] == 2 * 2 * scales + tables
    assert by_name["paged_lion_8bit"] == 2 * scales + tables // num_tables
