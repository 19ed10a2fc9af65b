"""The optimizers that ``transformers.TrainingArguments.optim`` names: made, or refused with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from ..errors import ConfigError

_PROJECTS = (
    "it projects gradients of the base's own layers by their values, and adapters leave those layers frozen; "
    "with adapters choose 'adamw_8bit', whose state is as small"
)
_IN_BACKWARD = (
    "it updates weights during the backward pass, in a loop of its own; "
    "choose 'adamw_8bit', or give optimizer=None for a step that ends with the backward pass"
)
_COMPILED = (
    "its step is compiled, and nothing promises what a compiled kernel holds; "
    "choose 'adamw_8bit', or give optimizer=None for a step that ends with the backward pass"
)
_REFUSED = {
    "galore_adamw": _PROJECTS,
    "galore_adamw_8bit": _PROJECTS,
    "galore_adafactor": _PROJECTS,
    "galore_adamw_layerwise": _PROJECTS,
    "galore_adamw_8bit_layerwise": _PROJECTS,
    "galore_adafactor_layerwise": _PROJECTS,
    "apollo_adamw": _PROJECTS,
    "apollo_adamw_layerwise": _PROJECTS,
    "lomo": _IN_BACKWARD,
    "adalomo": _IN_BACKWARD,
    "adamw_torch_4bit": _COMPILED,
    "adamw_torch_8bit": _COMPILED,
    "stable_adamw": "its step reads values; choose 'adamw_torch', whose state is as large",
}


def named_optimizer(name: Any, parameters: Any, on_cuda: bool) -> Any:
    """Make the optimizer of a name as transformers' trainer makes it by default.

    Args:
        name: A name of ``TrainingArguments.optim``.
        parameters: What it trains.
        on_cuda: Whether it steps as on a CUDA device.

    Returns:
        The optimizer.

    Raises:
        ConfigError: There is none of the name, its package is missing, or its step cannot
            be predicted.
    """
    from transformers import Trainer
    from transformers.training_args import OptimizerNames

    refuse_unpredicted(name)
    try:
        settings: Any = SimpleNamespace(
            optim=OptimizerNames(name),
            optim_args=None,
            learning_rate=1e-4,  # no size depends on it, nor on the others
            adam_beta1=0.9,
            adam_beta2=0.999,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            warmup_steps=0,
        )
        cls, options = Trainer.get_optimizer_cls_and_kwargs(settings)
    # transformers raises either for a package that is missing
    except (ImportError, ValueError) as error:
        raise ConfigError(f"optimizer: {name!r} cannot be made: {error}") from error
    return optimizer_of(cls, parameters, options, on_cuda)


def optimizer_of(cls: Any, parameters: Any, options: Any, on_cuda: bool) -> Any:
    """Make an optimizer that is ready to step, as on a CUDA device or not."""
    with _disable_current_modes():  # some compute tables
        made = cls(parameters, **options)
    for group in made.param_groups:
        if on_cuda and "foreach" in group and not group.get("fused"):
            group["foreach"] = True  # torch's choice there
    if hasattr(made, "train"):
        made.train()
    return made


def refuse_unpredicted(name: Any) -> None:
    """Raise ``ConfigError`` for the name of an optimizer whose step is not predicted."""
    if name in _REFUSED:
        raise ConfigError(f"optimizer: {name!r} is not predicted: {_REFUSED[name]}")
