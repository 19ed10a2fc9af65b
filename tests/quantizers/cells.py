"""What the journey goes through: tiny models that the real libraries quantize, each as its users do.

A library that is not installed is an error, and no test is skipped. The weights are those of the zoo's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import zoo

DTYPE = torch.bfloat16
Answer = Callable[[str, str, str], None]
"""Says what holds in a column of a row of docs/compatibility.md: the fixture ``answer``."""


def pretrained(name: str, quantization_config: Any = None) -> PreTrainedModel:
    """A model of the zoo, quantized through transformers as it is loaded, or not at all."""
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    return model_class.from_pretrained(
        zoo.checkpoint(name), dtype=DTYPE, device_map={"": "cpu"}, quantization_config=quantization_config
    )


def dequantized(module: nn.Module) -> torch.Tensor:
    """A layer's weight by its tensor's own method, shape ``(out_features, in_features)``."""
    return module.weight.dequantize()


def is_composed(module: nn.Module) -> bool:
    """Whether a layer's weight is of a tensor class of its library."""
    return type(module._parameters.get("weight")) not in (nn.Parameter, type(None))


@dataclass(frozen=True)
class Cell:
    """A method with its settings.

    Attributes:
        load: Loads an architecture of the zoo; two calls give the same values and share nothing.
        dequantize: Computes the weight of a quantized layer, by the library's own code.
        is_quantized: Whether a module is one of the quantized layers.
        is_serializable: Whether the model's own ``save_pretrained`` writes it.
    """

    load: Callable[[str], PreTrainedModel]
    dequantize: Callable[[nn.Module], torch.Tensor] = dequantized
    is_quantized: Callable[[nn.Module], bool] = is_composed
    is_serializable: bool = True


def torchao(name: str, **options: Any) -> Callable[[str], PreTrainedModel]:
    def load(architecture: str) -> PreTrainedModel:
        from torchao import quantization

        given = {key: value() if callable(value) else value for key, value in options.items()}
        return pretrained(architecture, transformers.TorchAoConfig(getattr(quantization, name)(**given)))

    return load


def _per_group() -> Any:
    from torchao.quantization import PerGroup

    return PerGroup(32)


def hqq(nbits: int, axis: int = 1) -> Callable[[str], PreTrainedModel]:
    """By the library's own function: transformers 5 raises for its ``HqqConfig``."""

    def load(architecture: str) -> PreTrainedModel:
        from hqq.core.quantize import BaseQuantizeConfig
        from hqq.models.hf.base import AutoHQQHFModel

        model = pretrained(architecture)
        config = BaseQuantizeConfig(nbits=nbits, group_size=32, axis=axis)
        places = {fqn: "cpu" for fqn, _ in model.named_modules() if fqn}
        AutoHQQHFModel.quantize_model(model, quant_config=config, compute_dtype=DTYPE, device=places)
        return model

    return load


def quanto(weights: str) -> Callable[[str], PreTrainedModel]:
    return lambda architecture: pretrained(architecture, transformers.QuantoConfig(weights=weights))


def _is_hqq(module: nn.Module) -> bool:
    return type(module).__name__ == "HQQLinear"


CELLS = {
    "torchao": {
        "int8-weight-only": Cell(torchao("Int8WeightOnlyConfig")),
        "float8-weight-only": Cell(torchao("Float8WeightOnlyConfig")),
        "int4-in-int8-weight-only": Cell(
            torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=_per_group)
        ),
        "int8-dynamic-activation": Cell(torchao("Int8DynamicActivationInt8WeightConfig")),
        "int8-dynamic-activation-int4": Cell(
            torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int4, weight_granularity=_per_group)
        ),
    },
    "hqq": {f"{nbits}-bit": Cell(hqq(nbits), lambda m: m.dequantize(), _is_hqq) for nbits in (8, 4, 3, 2, 1)},
    "quanto": {weights: Cell(quanto(weights), is_serializable=False) for weights in ("int8", "int4", "int2", "float8")},
}
