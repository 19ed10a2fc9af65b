"""What the journey goes through: tiny models that the real libraries quantize, each as its users do.

A library that is not installed is an error, and no test is skipped. The weights are those of the zoo's checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

import handmade
from support import zoo

DTYPE = torch.bfloat16
Answer = Callable[[str, str, str], None]
"""Says what holds in a column of a row of docs/compatibility.md: the fixture ``answer``."""


def pretrained(
    name: str, quantization_config: Any = None, folder: Path | None = None, dtype: torch.dtype = DTYPE
) -> PreTrainedModel:
    """A model of the zoo, quantized through transformers as it is loaded, or not at all."""
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    folder = zoo.checkpoint(name) if folder is None else folder
    return model_class.from_pretrained(
        folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=quantization_config
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
        can_merge: Whether the library can dequantize its weights.
        left: Attributes and parameters that its layers, and PEFT's, leave on the base: functions, and a second name.
    """

    load: Callable[[str], PreTrainedModel]
    dequantize: Callable[[nn.Module], torch.Tensor] = dequantized
    is_quantized: Callable[[nn.Module], bool] = is_composed
    is_serializable: bool = True
    can_merge: bool = True
    left: tuple[str, ...] = ()


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


def gptqmodel(method: str, bits: int, backend: str = "auto") -> Callable[[str], PreTrainedModel]:
    """Hand-made weights, computed by the kernel that the library chooses on a CPU, or by another."""
    stored = {
        "gptq": {"sym": False, "desc_act": False, "checkpoint_format": "gptq"},
        "awq": {"version": "gemm", "zero_point": True},
    }

    def load(architecture: str) -> PreTrainedModel:
        config = {"bits": bits, "group_size": handmade.GROUP_SIZE, "backend": backend, **stored[method]}
        folder = handmade.checkpoint(architecture, method, bits, json.dumps(config))
        # The library compiles what dequantizes the weights of each layer, which takes longer than all else here.
        with torch._dynamo.config.patch(disable=True):
            return pretrained(architecture, folder=folder)

    return load


def _is_gptqmodel(module: nn.Module) -> bool:
    return type(module).__module__.startswith("gptqmodel.")


def by_gptqmodel(module: nn.Module) -> torch.Tensor:
    """A layer's weight by what its library computes for the input that has a one in each row."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size).T


def aqlm(bits: int, dtype: torch.dtype = DTYPE) -> Callable[[str], PreTrainedModel]:
    """Hand-made weights with one codebook of so many bits."""
    config = {
        "in_group_size": 8,
        "out_group_size": 1,
        "num_codebooks": 1,
        "nbits_per_codebook": bits,
        "linear_weights_not_to_quantize": ["lm_head"],
    }
    return lambda name: pretrained(
        name, folder=handmade.checkpoint(name, "aqlm", bits, json.dumps(config)), dtype=dtype
    )


def compressed_tensors(*, has_run: bool) -> Callable[[str], PreTrainedModel]:
    """Weights of 4 bits, which the library decompresses at the first forward; PEFT adapts none before that."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": handmade.GROUP_SIZE}
    config = {
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"blocks": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }

    def load(name: str) -> PreTrainedModel:
        model = pretrained(name, folder=handmade.checkpoint(name, "compressed-tensors", 4, json.dumps(config)))
        if has_run:
            with torch.no_grad():
                model(**zoo.inputs(name, model))
        return model

    return load


def bitnet(name: str) -> PreTrainedModel:
    """Weights that are made ternary whenever they are used: the mode that transformers trains."""
    config = {
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
        "modules_to_not_convert": ["lm_head"],
    }
    return pretrained(name, folder=handmade.checkpoint(name, "bitnet", 16, json.dumps(config)))


def gemma(bits: int) -> Callable[[str], PreTrainedModel]:
    """Weights of so many bits, between activations that are rounded to steps which the checkpoint has."""
    config = {"num_bits": bits, "modules_to_not_convert": ["lm_head"]}
    return lambda name: pretrained(name, folder=handmade.checkpoint(name, "gemma", bits, json.dumps(config)))


def _has_scheme(module: nn.Module) -> bool:
    return "quantization_scheme" in vars(module)


def _is_hqq(module: nn.Module) -> bool:
    return type(module).__name__ == "HQQLinear"


METHODS = {
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
    "gptq": {
        "4-bit": Cell(gptqmodel("gptq", 4), by_gptqmodel, _is_gptqmodel),
        "8-bit": Cell(gptqmodel("gptq", 8), by_gptqmodel, _is_gptqmodel),
    },
    "awq": {
        "4-bit": Cell(gptqmodel("awq", 4), by_gptqmodel, _is_gptqmodel),
        "4-bit-torch": Cell(gptqmodel("awq", 4, "torch_awq"), by_gptqmodel, _is_gptqmodel),
    },
    "aqlm": {"10-bit": Cell(aqlm(10), can_merge=False, left=("gemv_op", "gemm_op", "use_gemv_rule", "qweight"))},
    "compressed-tensors": {"4-bit": Cell(compressed_tensors(has_run=True), lambda m: m.weight, _has_scheme)},
    "bitnet": {"online": Cell(bitnet, can_merge=False)},
    "gemma": {"static-8-bit": Cell(gemma(8), is_serializable=False, can_merge=False)},
}
# Some libraries need environments of their own: the variable names the methods that are installed here.
CELLS = {name: METHODS[name] for name in os.environ.get("QUANTIZERS", "torchao hqq quanto bitnet gemma").split()}
