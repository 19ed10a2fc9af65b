"""Inspection of a checkpoint for float32 tensors that a preparation left in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..config import StrPath
from ..reports import Report, shown
from ..tensors.dtypes import HALF_DTYPES, dtype_name, find_dtype
from .convert import casts_by_dtype
from .reader import (
    EIGHT_BIT_STATE,
    SavedCheckpoint,
    open_checkpoint,
)

_QUANTIZATION_STATE = re.compile(
    rf"\.(?:weight|quant_state)\.[^.]+$|\.(?:{'|'.join(EIGHT_BIT_STATE)})$"
)


@dataclass(frozen=True, repr=False)
class CheckpointReport(Report):
    """The contents of a checkpoint, and the float32 tensors that a preparation left in it. True if there are any.

    Attributes:
        path: The checkpoint.
        config_dtype: The dtype that its config names, such as ``"bfloat16"``; ``None``
            where it names none.
        half_dtype: The half dtype that the model has or had; ``None`` where nothing
            says so.
        is_quantized: Whether it holds quantized weights.
        num_tensors: The number of tensors.
        num_bytes: Their size, in bytes.
        dtypes: ``{dtype: {"count", "bytes"}}`` of all tensors.
        leftovers: ``{name: bytes}``: float32 tensors that the model, loaded in half,
            would not have, and the bytes that each wastes.
        wasted_bytes: The sum of these.
    """

    path: Path
    config_dtype: str | None
    half_dtype: str | None
    is_quantized: bool
    num_tensors: int
    num_bytes: int
    dtypes: Mapping[str, Mapping[str, int]]
    leftovers: Mapping[str, int]
    wasted_bytes: int

    def __bool__(self) -> bool:
        return bool(self.leftovers)

    def _brief(self) -> str:
        size, wasted = f"{self.num_bytes:,} bytes", f"{self.wasted_bytes:,} wasted"
        return f"{self.num_tensors} tensors, {size}, {wasted}, {shown(str(self.path))}"


def inspect_checkpoint(path: StrPath) -> CheckpointReport:
    """Find the float32 tensors that a preparation left in a checkpoint. Only headers are read.

    A float32 tensor is left over where the model is half or quantized and its
    architecture does not keep that tensor in float32. Nothing is left over in a float32
    model: a checkpoint that is float32 throughout, is not quantized and whose config
    names no half dtype.

    Args:
        path: A folder with safetensors files, or one such file.

    Returns:
        The report.

    Raises:
        ConfigError: There is no checkpoint, or it is damaged or incomplete.

    Example:
        >>> import os, tempfile, torch
        >>> from safetensors.torch import save_file
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> tensors = {
        ...     "norm.weight": torch.ones(4),
        ...     "head.weight": torch.ones(4, 4, dtype=torch.bfloat16),
        ... }
        >>> save_file(tensors, path)
        >>> report = inspect_checkpoint(path)
        >>> report.leftovers, report.half_dtype
        ({'norm.weight': 8}, 'bfloat16')
    """
    return inspect_opened(open_checkpoint(path))


def inspect_opened(checkpoint: SavedCheckpoint) -> CheckpointReport:
    """Find the same in a checkpoint that was opened."""
    is_quantized = any(map(_QUANTIZATION_STATE.search, checkpoint.beside))
    half = _half_dtype(checkpoint)
    leftovers = {}
    if half is not None or is_quantized:
        for name in casts_by_dtype(checkpoint, half or torch.bfloat16):
            leftovers[name] = checkpoint.tensors[name].num_bytes // 2

    dtypes: dict[str, dict[str, int]] = {}
    for stored in checkpoint.tensors.values():
        row = dtypes.setdefault(dtype_name(stored.dtype), {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += stored.num_bytes

    return CheckpointReport(
        path=checkpoint.path,
        config_dtype=dtype_name(checkpoint.dtype) if checkpoint.dtype else None,
        half_dtype=dtype_name(half) if half else None,
        is_quantized=is_quantized,
        num_tensors=len(checkpoint.tensors),
        num_bytes=checkpoint.num_bytes,
        dtypes=dtypes,
        leftovers=leftovers,
        wasted_bytes=sum(leftovers.values()),
    )


def _half_dtype(checkpoint: SavedCheckpoint) -> torch.dtype | None:
    """Return the half dtype of the config, or else of most base tensors, or else that quantized layers compute in."""
    tensors = checkpoint.tensors.items()
    own = [tensor.dtype for name, tensor in tensors if name not in checkpoint.beside]
    most = max(HALF_DTYPES, key=own.count)
    settings = checkpoint.config.get("quantization_config")
    compute = None
    if isinstance(settings, dict):
        compute = find_dtype(settings.get("bnb_4bit_compute_dtype"))

    for found in (checkpoint.dtype, most if most in own else None, compute):
        if found in HALF_DTYPES:
            return found

    return None
