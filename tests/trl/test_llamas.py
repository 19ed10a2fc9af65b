"""The loop of docs/figures/llamas.py trains as TRL's trainer does, with the same base, adapters and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler

import runs
from trl import SFTConfig, SFTTrainer

SETTINGS = {
    "hidden_size": 64,
    "num_layers": 1,
    "pretraining_steps": 40,
    "steps": 8,
    "length": 32,
    "learning_rate": 1e-3,
    "num_held_out": 4,
}

pytestmark = [
    # TRL 1.16 sets the field by the name that transformers 5.23 deprecates, and calls two methods so.
    pytest.mark.filterwarnings(r"ignore:`gradient_checkpointing\w*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]


class InOrder(SFTTrainer):  # type: ignore[misc]
    """Takes the rows as they come, and keeps each step's loss."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        step_loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), step_loss.item()]
        return step_loss


def adapters(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters() if p.requires_grad])


def test_the_loop_trains_as_trls_trainer_does(figures: Callable[[str], Any], tmp_path: Path) -> None:
    llamas = figures("llamas")
    settings = llamas.Settings(**SETTINGS)
    text = llamas.read_text(settings)
    llamas.pretrain(text, settings, seed=0).bfloat16().save_pretrained(tmp_path / "base")
    folder = str(tmp_path / "base")
    exact = llamas.adapt(llamas.load_exact(folder, settings.quant), settings)
    run = llamas.Run("none", settings, 0, folder, exact)
    first = adapters(run.model)
    values = {name: p.detach().clone() for name, p in run.model.named_parameters() if p.requires_grad}
    found = run.train(text)

    model = llamas.adapt(llamas.load(folder, settings.quant), settings)
    for name, value in values.items():
        model.get_parameter(name).data = value.clone()
    order = torch.randperm(len(text.training), generator=torch.Generator().manual_seed(0))
    rows = text.training[order[: settings.steps * settings.batch_size]]
    arguments = SFTConfig(
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        max_steps=settings.steps,
        learning_rate=settings.learning_rate,
        max_length=None,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    dataset = Dataset.from_dict({"input_ids": rows.tolist()})
    trainer = InOrder(model=model, args=arguments, train_dataset=dataset, processing_class=runs.tokenizer())
    assert torch.equal(adapters(trainer.model), first)
    trainer.train()
    differences = [abs(a - b) for a, b in zip(trainer.losses, found["train_loss"], strict=True)]
    moved, apart = (adapters(run.model) - first).norm(), (adapters(trainer.model) - adapters(run.model)).norm()
    # TRL adds its loss up in tiles. Another schedule, decay or clipping moves adapters far more apart.
    assert apart < 0.02 * moved
    assert max(differences) < 5e-4
