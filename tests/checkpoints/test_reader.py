"""Tensors of a checkpoint are read a few at a time, and only when they are asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kbitwrap.checkpoints.reader import open_checkpoint
from kbitwrap.tensors.lazy import materialize


@pytest.mark.parametrize("shape", [(3, 700_001), (0, 2), ()])
def test_a_stored_tensor_is_read_when_it_is_asked_for(shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.rand(shape)
    save_file({"before": torch.ones(3), "a": values}, tmp_path / "model.safetensors")
    stored = open_checkpoint(tmp_path).tensors["a"]
    for dtype in (None, torch.bfloat16):
        found = materialize(stored.lazy(dtype))
        assert found.dtype == (dtype or torch.float32)
        assert torch.equal(found, values.to(found.dtype))
