"""What a merged model is compared with: the formula in float64, rounded once, or another merged model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

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


def layers_of(model: nn.Module, kind: str = "base_layer") -> dict[str, Any]:
    """PEFT's layers by the base's names."""
    return {
        fqn.removeprefix("base_model.model."): module
        for fqn, module in model.named_modules()
        if kind in module._modules and ".base_layer" not in fqn
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
