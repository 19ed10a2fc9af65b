"""Measures an export beside the least that it takes: computing what is merged, and writing what is at hand."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel
from safetensors.torch import load_file, save_file

from .. import ExportReport, KbitPreparedModel
from .memory import MemoryMeter, Timings
from .settings import Figures

_NO_SHARDS = "1TB"


@dataclass
class ExportMeasurement:
    """Exports a prepared model, in turn with safetensors' ``save_file`` of the same bytes, and with merging alone.

    Attributes:
        wrapper: The prepared model.
        adapted: The same model with a LoRA, which the export merges; ``None`` exports
            the base.
        meter: Times the export, on the model's device.
        folder: Where files are written, and deleted again.
        timings: Of each part, one for every round.
        peaks: The most host memory that each export held, in bytes above the start.
    """

    wrapper: KbitPreparedModel
    adapted: PeftModel | None
    meter: MemoryMeter
    folder: Path
    timings: dict[str, Timings] = field(default_factory=lambda: defaultdict(Timings))
    peaks: list[int] = field(default_factory=list)

    def run(self, repeats: int) -> Figures:
        """Measure.

        Args:
            repeats: How often each timing is taken.

        Returns:
            The figures, ready for JSON.
        """
        for _ in range(1 + repeats):
            figures = self._measure_once()
        parts = ("export", "save", "merge")
        # The first round also sets things up.
        seconds = {f"{part}_seconds": self.timings[part].seconds[1:] for part in parts}
        cpu_seconds = {
            f"{part}_cpu_seconds": self.timings[part].cpu_seconds[1:] for part in parts
        }
        return {
            **seconds,
            **cpu_seconds,
            "export_peak_bytes": min(self.peaks),
            **figures,
        }

    def _measure_once(self) -> Figures:
        """Export, save and merge once; the files are gone afterwards."""
        exported = self.folder / "exported"
        saved = self.folder / "saved.safetensors"
        report = self._export(exported)
        (file,) = exported.glob("*.safetensors")
        # Copies: reading a file again would be timed as writing.
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        self._save(tensors, saved)
        self._merge()
        is_identical = filecmp.cmp(file, saved, shallow=False)
        shutil.rmtree(exported)
        saved.unlink()
        return {
            "export_bytes": report.num_bytes,
            "largest_bytes": max(tensor.nbytes for tensor in tensors.values()),
            "is_identical": is_identical,
        }

    def _export(self, path: Path) -> ExportReport:
        host = MemoryMeter(torch.device("cpu"))
        _settle_disk()
        host.start()
        with self.meter.timed(self.timings["export"]):
            report = self.wrapper.export(
                path,
                merge_adapters=self.adapted is not None,
                model=self.adapted,
                max_shard_size=_NO_SHARDS,
            )
        self.peaks.append(host.peak())
        return report

    def _save(self, tensors: dict[str, torch.Tensor], path: Path) -> None:
        _settle_disk()
        with self.meter.timed(self.timings["save"]):
            save_file(tensors, path, metadata={"format": "pt"})

    def _merge(self) -> None:
        if self.adapted is None:
            return
        _settle_disk()
        with self.meter.timed(self.timings["merge"]):
            _merge_weights(self.adapted)


@torch.no_grad()
def _merge_weights(adapted: PeftModel) -> None:
    """Compute each merged weight by what it takes and nothing else, and drop it."""
    layers: list[Any] = [
        module for module in adapted.modules() if "lora_A" in module._modules
    ]
    for layer in layers:
        weight = layer.get_base_layer().weight
        merged = dequantize_4bit(weight.data, weight.quant_state).float()
        merged += layer.get_delta_weight("default")
        merged.to(weight.quant_state.dtype)


def _settle_disk() -> None:
    """Wait until earlier writes are on the disk, so that they do not slow this one."""
    if hasattr(os, "sync"):
        os.sync()
