"""The adapters of a model whose step is predicted: their config, and what PEFT makes of it."""

from __future__ import annotations

import copy
import re
from typing import Any

from torch import nn

from ..errors import ConfigError, UnsupportedModelError

# Names of modules, or of parameters: no pattern, and no number of a block.
_PLAIN = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
_OF_NAMES = {
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
}
_OF_ALL_LAYERS = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "bias",
    "use_rslora",
    "use_dora",
    "fan_in_fan_out",
    "init_lora_weights",
    "inference_mode",
    "task_type",
    "base_model_name_or_path",
    "revision",
}


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


def numbers_no_block(lora: Any) -> bool:
    """Return whether blocks that are alike get the same adapters, however many there are.

    Args:
        lora: The config of the adapters; ``None`` for none.

    Returns:
        Whether that is certain: the config is one of LoRA that names layers by names
        alone, and has no field that is not known here.
    """
    import peft

    if lora is None:
        return True
    if type(lora) is not peft.LoraConfig:
        return False
    defaults = vars(peft.LoraConfig())
    for field, value in vars(lora).items():
        if field in _OF_ALL_LAYERS or value == defaults[field]:
            continue
        if field not in _OF_NAMES or not _are_plain(value):
            return False
    return True


def _are_plain(names: Any) -> bool:
    """Return whether names say nothing of a block's number; one that is alone is a pattern."""
    if isinstance(names, str):
        return names == "all-linear"
    return all(_PLAIN.fullmatch(name) for name in names)


def with_adapters(model: nn.Module, lora: Any) -> nn.Module:
    """Give a model adapters by PEFT's function.

    Args:
        model: The model.
        lora: The config of the adapters; ``None`` leaves the model as it is.

    Returns:
        The model with them.

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
