"""A plain model, small enough for thousands of manifests of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kbitwrap import KbitPreparedModel, Manifest
from kbitwrap.edits.storage import ParameterStorage
from kbitwrap.model.records import ParameterRecord


class Tied(nn.Module):
    """A plain model with a tie, a buffer that training writes, one that is not kept, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.bn = nn.BatchNorm1d(4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.bn(self.embed(ids)))) * self.scale


class Shadowed(nn.Module):
    """Two tensors with one canonical name, ``inner.weight``: one is below a child called as PEFT calls one of its."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float16)
        self.inner.base_layer = nn.Linear(4, 2, dtype=torch.float16)


def tied() -> Tied:
    torch.manual_seed(0)
    return Tied().bfloat16()


def small_manifest(**options: Any) -> Manifest:
    with KbitPreparedModel(tied(), **{"precision": "full", **options}) as prepared:
        return prepared.manifest()


class Holder(nn.Module):
    """A model that is nothing but its parameters, `p0`, `p1`, ..."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_parameter(f"p{i}", tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor))


def changed_storage(parameter: nn.Parameter) -> ParameterStorage:
    """The slot of one parameter's storage."""
    holder = Holder(parameter)
    return ParameterStorage(ParameterRecord("p0", [(holder, "p0")], parameter), parameter)


def full(model: nn.Module, **fields: Any) -> KbitPreparedModel:
    """Prepare at precision "full"; a model that is not quantized is warned about, which is tested elsewhere."""
    prepared = KbitPreparedModel(model, precision="full", **fields)
    with pytest.warns(UserWarning, match="neither a quantization attribute nor a quantized layer"):
        return prepared.prepare()
