"""What a merged model is compared with: the formula in float64, rounded once, or another merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from torch import nn
from transformers import PreTrainedModel

from kbitwrap import ExportReport, KbitPreparedModel
from support import zoo
from support.files import tensors_of
from support.snapshot import tensor_digest

# Half a unit in the last place, relative to the power of two below a number; and the smallest normal's exponent.
HALF_ULP = {torch.bfloat16: (-8, -126), torch.float16: (-11, -14), torch.float32: (-24, -126)}


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Each element is off by half a unit in the last place at most, and by float32's own rounding before that."""
    assert found.shape == exact.shape
    power, smallest = HALF_ULP[found.dtype]
    exponents = torch.frexp(exact).exponent.double() - 1
    half_ulp = torch.exp2(exponents.clamp(min=smallest) + power)
    float32_rounding = 2.0**-21 * exact.abs().max()
    assert ((found.double() - exact).abs() <= half_ulp + float32_rounding).all()


def layers_of(model: nn.Module) -> dict[str, Any]:
    """PEFT's layers by the base's names."""
    return {
        fqn.removeprefix("base_model.model."): module
        for fqn, module in model.named_modules()
        if "base_layer" in module._modules and ".base_layer" not in fqn
    }


def assert_same_model(found: Path, expected: Path) -> None:
    """The same tensors bit for bit, in files of the same names, and the same configs."""
    there, wanted = tensors_of(found), tensors_of(expected)
    assert {n: tensor_digest(t) for n, t in there.items()} == {n: tensor_digest(t) for n, t in wanted.items()}
    assert {p.name for p in found.glob("*.safetensors*")} == {p.name for p in expected.glob("*.safetensors*")}
    for path in expected.glob("*.json"):
        assert _plain(found / path.name) == _plain(path)


def _plain(path: Path) -> Any:
    return {k: v for k, v in json.loads(path.read_text()).items() if k not in ("_name_or_path", "use_cache")}


def export(model: nn.Module, folder: Path, *, base: nn.Module | None = None, **options: Any) -> ExportReport:
    """Export what was made of a model that is not prepared."""
    wrapper = KbitPreparedModel(base or model, gradient_checkpointing=False)
    return wrapper.export(folder, merge_adapters=True, model=model, **options)


def load(name: str, folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load an exported checkpoint as a user does; nothing may be missing, nothing left over."""
    model_class = getattr(transformers, zoo.ARCHITECTURES[name].model_class)
    options = {} if dtype is None else {"dtype": dtype}
    model, info = model_class.from_pretrained(folder, output_loading_info=True, **options)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model


def jitter(model: nn.Module, scale: float = 0.02) -> None:
    """Make every trainable value another one, so that no adapter is at its initial nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += (scale * torch.randn(parameter.shape, generator=generator)).to(parameter)


def base_weight(layer: nn.Module) -> torch.Tensor:
    """The weight of a live base layer in float64, shape ``(out_features, in_features)``."""
    weight = layer.weight
    if weight.dtype == torch.int8:
        scales = weight.SCB if weight.SCB is not None else layer.state.SCB
        return weight.data.double() * scales.double().view(-1, 1) / 127
    if getattr(weight, "quant_state", None) is not None:
        return dequantize_4bit(weight.data, weight.quant_state).double()
    return weight.detach().double()


def lora_weight(layer: Any, adapters: tuple[str, ...] = ("default",)) -> torch.Tensor:
    """W + sum of s B A (Hu et al. 2021), in float64."""
    weight = base_weight(layer.get_base_layer())
    for adapter in adapters:
        a, b = layer.lora_A[adapter].weight.detach().double(), layer.lora_B[adapter].weight.detach().double()
        weight = weight + (b @ a) * layer.scaling[adapter]
    return weight


def same_outputs(name: str, adapted: nn.Module, folder: Path) -> PreTrainedModel:
    """Load the plain model, and check that it computes what the adapted one does."""
    plain = load(name, folder, torch.float32).eval()
    batch = zoo.inputs(name, plain)
    with torch.no_grad():
        expected, found = adapted.eval()(**batch), plain(**batch)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)
    return plain
