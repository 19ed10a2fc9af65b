"""The adapters of a model whose step is predicted: their config, and what PEFT makes of it."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..errors import ConfigError, UnsupportedModelError


def checked(lora: Any) -> Any:
    """Return a copy of a config of adapters, whose initial values take no weights; of the default one for ``None``."""
    import peft

    if lora is None:
        lora = peft.LoraConfig(r=16, target_modules="all-linear")
    if not isinstance(lora, peft.PeftConfig):
        raise ConfigError(
            f"lora: expected a config of PEFT such as LoraConfig(r=16), found {type(lora).__name__}"
        )
    lora = copy.deepcopy(lora)
    if isinstance(getattr(lora, "init_lora_weights", True), str):
        # the values do not matter here, and to make them takes weights
        lora.init_lora_weights = True
    return lora


def are_default(lora: Any) -> bool:
    """Return whether adapters are the default ones, of any rank: all blocks of a kind get the same of them."""
    import peft

    if type(lora) is not peft.LoraConfig:
        return False
    default = peft.LoraConfig(
        r=lora.r, target_modules="all-linear", task_type=lora.task_type
    )
    return bool(lora == default)


def with_adapters(model: nn.Module, lora: Any) -> nn.Module:
    """Give a model adapters of a config by PEFT's function; ``None`` leaves it as it is.

    Raises:
        UnsupportedModelError: PEFT refuses the config.
    """
    import peft

    if lora is None:
        return model
    try:
        adapted: nn.Module = peft.get_peft_model(model, lora)
    # whatever PEFT raises for a config that does not suit the model
    except Exception as error:
        raise UnsupportedModelError(
            f"PEFT cannot put these adapters on the model: {error}"
        ) from error
    return adapted
