"""The optimizers that ``transformers.TrainingArguments.optim`` names: made, or refused with what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from ..errors import ConfigError
from .quantization import library_optimizer

# Torch's, which on CUDA update all parameters at once unless they are fused.
_OF_TORCH = {
    "adamw_torch": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}
# Those of bitsandbytes, by the name of their class; the names say bits and pages.
_OF_LIBRARY = {
    "AdamW": (
        "adamw_bnb_8bit",
        "adamw_8bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
    ),
    "AdEMAMix": (
        "ademamix",
        "ademamix_8bit",
        "paged_ademamix_32bit",
        "paged_ademamix_8bit",
    ),
    "Lion": ("lion_8bit", "lion_32bit", "paged_lion_32bit", "paged_lion_8bit"),
    "RMSprop": ("rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"),
}
# Those of other packages, which the trainer makes where the package is there.
_OF_PACKAGES = (
    "adamw_anyprecision",
    "grokadamw",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
)
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
_ELSEWHERE = "it runs on other devices than CUDA; choose 'adamw_torch'"
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
    "adamw_torch_xla": _ELSEWHERE,
    "adamw_torch_npu_fused": _ELSEWHERE,
}
_LEARNING_RATE = 1e-4  # no size depends on it


def named_optimizer(name: Any, parameters: Any, on_cuda: bool) -> Any:
    """Make the optimizer of a name.

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
    refuse_unpredicted(name)
    if name == "adamw_torch_fused":
        return torch.optim.AdamW(parameters, lr=_LEARNING_RATE, fused=True)
    if name in _OF_TORCH:
        return _OF_TORCH[name](parameters, lr=_LEARNING_RATE, foreach=on_cuda)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            parameters, lr=_LEARNING_RATE, scale_parameter=False, relative_step=False
        )
    for cls, names in _OF_LIBRARY.items():
        if name in names:
            bits = 8 if "8bit" in name else 32
            is_paged = name.startswith("paged")
            return library_optimizer(cls, parameters, _LEARNING_RATE, bits, is_paged)
    if name in _OF_PACKAGES:
        return _of_package(name, parameters)
    known = [*_OF_TORCH, "adamw_torch_fused", "adafactor", *_OF_PACKAGES]
    for names in _OF_LIBRARY.values():
        known += names
    raise ConfigError(
        f"optimizer: expected one of {', '.join(map(repr, known))} or a function, found {name!r}"
    )


def refuse_unpredicted(name: str) -> None:
    """Raise ``ConfigError`` for the name of an optimizer whose step is not predicted."""
    if name in _REFUSED:
        raise ConfigError(f"optimizer: {name!r} is not predicted: {_REFUSED[name]}")


def _of_package(name: str, parameters: Any) -> Any:
    """Make the optimizer of a package as the trainer makes it by default."""
    from transformers import Trainer

    settings: Any = SimpleNamespace(
        optim=name,
        optim_args=None,
        learning_rate=_LEARNING_RATE,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        warmup_steps=0,
    )
    try:
        cls, options = Trainer.get_optimizer_cls_and_kwargs(settings)
    # transformers raises either for a package that is missing
    except (ImportError, ValueError) as error:
        raise ConfigError(f"optimizer: {name!r} cannot be made: {error}") from error
    optimizer = cls(parameters, **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer
