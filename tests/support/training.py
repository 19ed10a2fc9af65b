"""One real training step, and what preparing and undoing looks like around it."""

from __future__ import annotations

import torch
from peft import PeftModel, get_peft_model
from transformers import PreTrainedModel

from support import zoo


def adapt(name: str, model: PreTrainedModel, *, modules_to_save: bool = False, **kwargs: object) -> PeftModel:
    """A PEFT model with a LoRA on it, the same at each call."""
    torch.manual_seed(0)
    return get_peft_model(model, zoo.lora_config(name, modules_to_save=modules_to_save, **kwargs))


def is_checkpointing(model: torch.nn.Module) -> bool:
    """Whether activation checkpointing is on anywhere, under whatever name a version of transformers asks for it."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def step(name: str, model: torch.nn.Module, *, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Train one step in train mode.

    Returns:
        The loss, and the gradients by name before the optimizer used them.
    """
    model.train()
    loss = zoo.loss(name, model, zoo.inputs(name, model, seed=seed))
    loss.backward()
    parameters = {fqn: p for fqn, p in model.named_parameters() if p.requires_grad}
    gradients = {fqn: p.grad.clone() for fqn, p in parameters.items() if p.grad is not None}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), gradients
