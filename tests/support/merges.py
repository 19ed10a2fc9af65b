"""A run on the disk with its right merge, which tests break and measure."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model
from safetensors.torch import save_file

from kbitwrap import DoctorReport, KbitPreparedModel, doctor
from support import zoo
from support.files import tensors_of

Tensors = dict[str, torch.Tensor]
EXPERTS = {"mixtral": ["experts.gate_up_proj", "experts.down_proj"]}


def train(model: Any, seed: int) -> None:
    """Give an adapter a delta of about one hundredth of the weights, another one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_bias = parameter.requires_grad and name.endswith("bias")
            if "lora_B" in name or "modules_to_save" in name or is_bias:
                parameter += (0.002 * torch.randn(parameter.shape, generator=generator)).to(parameter)


@dataclass
class Run:
    """A base in bfloat16, an adapter that was trained on it in 4 bits, and its right merge."""

    name: str
    folder: Path

    @functools.cached_property
    def adapted(self) -> list[str]:
        """The tensors that the adapter changes."""
        measured = self.examine(self.folder / "merged").merge
        assert measured is not None
        return sorted(measured.tensors)

    def delta(self, fqn: str) -> torch.Tensor:
        """What the adapter adds to a tensor, not rounded."""
        if not (self.folder / "float32").exists():
            reload_and_merge(self, torch.float32, self.folder / "float32")
        return self.of("float32")[fqn] - self.of("base")[fqn].float()

    def of(self, folder: str) -> Tensors:
        return tensors_of(self.folder / folder)

    def examine(self, merged: Path) -> DoctorReport:
        return doctor(merged, base=self.folder / "base", adapter=self.folder / "adapter")


def load(name: str, quant: str | None = "nf4", dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model of a run, loaded from the zoo; a llama has one layer, as most runs are of one."""
    return zoo.load(name, quant, dtype, num_hidden_layers=1 if name == "llama" else None)


def make_run(name: str, folder: Path, **settings: Any) -> Run:
    load(name, None).save_pretrained(folder / "base")
    # what the adapter's merge is without a delta, with it, and with another adapter's
    for seed, merged in enumerate(("trained", "merged", "other")):
        torch.manual_seed(0)
        model = load(name)
        config = zoo.lora_config(name, target_parameters=EXPERTS.get(name), init_lora_weights=True, **settings)
        with KbitPreparedModel(model, **zoo.fields(name)) as prepared:
            adapted = get_peft_model(model, config)
            manifest = prepared.manifest()
            if seed:
                train(adapted, seed)
            if merged == "merged":
                adapted.save_pretrained(folder / "adapter")
                manifest.save(folder / "adapter" / "kbitwrap.json")
            prepared.export(folder / merged, merge_adapters=True, model=adapted)
    return Run(name, folder)


def change(run: Run, folder: Path, broken: Callable[[Run, Tensors], None], **config: Any) -> Path:
    """Copy a right merge, and change its tensors and its config."""
    shutil.copytree(run.folder / "merged", folder)
    tensors = run.of("merged")
    broken(run, tensors)
    stored = {fqn: tensor.contiguous().clone() for fqn, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def copy_without_record(run: Run, adapter: Path) -> None:
    """Copy a run's adapter without its manifest."""
    shutil.copytree(run.folder / "adapter", adapter, ignore=shutil.ignore_patterns("kbitwrap.json"))


def reload_and_merge(run: Run, dtype: torch.dtype, folder: Path, **saving: Any) -> Path:
    """Merge as most people do: onto the base's own weights, by PEFT."""
    model_class = getattr(transformers, zoo.ARCHITECTURES[run.name].model_class)
    base = model_class.from_pretrained(run.folder / "base", dtype=dtype)
    PeftModel.from_pretrained(base, run.folder / "adapter").merge_and_unload().save_pretrained(folder, **saving)
    return folder
