"""The demonstration's adapter, merged in three ways: what each loses, and what doctor says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from .. import KbitPreparedModel, doctor
from .console import Result
from .demo_sides import Subject, in_float32
from .loading import quantization_on
from .losses import divergence, logits

IN_PLACE = "merge_and_unload in {quant}"
RELOADED = "merge_and_unload in bfloat16"
OURS = "kbitwrap's export"


@dataclass(frozen=True)
class Merge:
    """One way to merge.

    Attributes:
        name: What to call it.
        num_bytes: The bytes of the files of weights.
        lost: The part of the fine-tune that is lost: KL(adapter model ‖ merged), relative
            to KL(adapter model ‖ base).
        kept: The part of the adapter's delta that doctor finds.
        onto: The weights that doctor finds it added to: ``"trained"``, ``"original"`` or
            ``"other"``.
        faults: What doctor finds wrong, a line each.
    """

    name: str
    num_bytes: int
    lost: float
    kept: float
    onto: str
    faults: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether it is a merge onto the weights that were trained on."""
        return self.onto == "trained" and not self.faults

    def to_dict(self) -> Result:
        """The figures as plain values, ready for JSON."""
        return {**vars(self), "faults": list(self.faults)}


@dataclass(frozen=True)
class Merges:
    """The merges of one saved adapter of the built-in model.

    Attributes:
        subject: The built-in model.
        folder: Where the adapter and the merged models are saved.
        base: The logits of the dequantized base, in float32.
        expected: The same with the adapter beside it.
    """

    subject: Subject
    folder: Path
    base: Tensor
    expected: Tensor

    @property
    def adapter(self) -> Path:
        """The folder of the adapter."""
        return self.folder / "adapter"

    @property
    def all_learned(self) -> float:
        """The whole of the fine-tune: KL(adapter model ‖ base)."""
        return divergence(self.expected, self.base)

    def reloaded(self) -> Merge:
        """Merge onto the base as it was saved, in bfloat16."""
        base = self._load(self.subject.base, torch.bfloat16)
        merged: Any = PeftModel.from_pretrained(base, self.adapter)
        return self.in_place(RELOADED, merged.merge_and_unload())

    def in_place(self, name: str, merged: Any) -> Merge:
        """Save and measure a model that PEFT merged.

        Args:
            name: What to call the merge.
            merged: The model.

        Returns:
            What was measured.
        """
        path = self.folder / name.replace(" ", "-")
        merged.save_pretrained(path)
        return self._measured(name, path)

    def exported(self, prepared: KbitPreparedModel, model: PeftModel) -> Merge:
        """Export the merged model, and measure it.

        Args:
            prepared: The prepared model.
            model: The same under its adapter.

        Returns:
            What was measured.
        """
        path = self.folder / "exported"
        prepared.export(path, merge_adapters=True, model=model)
        return self._measured(OURS, path)

    def _load(self, path: Path | None, dtype: torch.dtype | str) -> Any:
        assert path is not None  # the built-in model has a folder
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, device_map={"": self.subject.device}
        )

    def _measured(self, name: str, path: Path) -> Merge:
        found = logits(in_float32(self._load(path, "auto")), self.subject.blocks)
        quantization = quantization_on(self.subject.device, self.subject.quant)
        report = doctor(
            path,
            base=self.subject.base,
            adapter=self.adapter,
            quant=quantization,
        )
        assert report.merge is not None  # base and adapter were given
        files = path.glob("*.safetensors")
        return Merge(
            name=name,
            num_bytes=sum(file.stat().st_size for file in files),
            lost=divergence(self.expected, found) / self.all_learned,
            kept=report.merge.kept,
            onto=report.merge.onto,
            faults=tuple(fault.cause for fault in report.merge.faults),
        )
