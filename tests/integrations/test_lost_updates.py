"""Updates that round to nothing: counted while a Trainer trains, and training in the wrong dtype, which is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from kbitwrap import StateError
from kbitwrap.integrations import KbitTrainerCallback, prepared_trainer
from kbitwrap.integrations.lost_updates import LostUpdates
from support.thorough import few
from support.trainers import EVERY_STEP, NUM_STEPS, adapt, load_base, outcome, prepare, trainer_for

pytestmark = pytest.mark.filterwarnings("ignore:restore\\(\\) made:UserWarning")


class Counted(TrainerCallback):
    """Counts by hand, element by element, what each step changed."""

    def __init__(self) -> None:
        self.before: dict[str, list[float]] = {}
        self.shares: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = {n: p.detach().double().flatten().tolist() for n, p in model.named_parameters() if "lora_" in n}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        lost = updates = 0
        for name, before in self.before.items():
            parameter = model.get_parameter(name)
            gradients = parameter.grad.double().flatten().tolist()
            now = parameter.detach().double().flatten().tolist()
            for old, new, gradient in zip(before, now, gradients, strict=True):
                updates += gradient != 0
                lost += gradient != 0 and old == new
        self.shares.append(lost / updates)


SETTINGS = (
    ("adamw_torch", 1e-2),
    ("adamw_torch", 1e-3),
    ("adamw_torch", 2e-5),
    ("adamw_torch_fused", 2e-4),
    ("sgd", 1e-1),
)
RUNS = [(dtype, *setting, seed) for dtype in ("bfloat16", "float32") for setting in SETTINGS for seed in (0, 1)]
CHOSEN = [("bfloat16", "adamw_torch", 2e-5, 0), ("bfloat16", "adamw_torch_fused", 2e-4, 1), ("float32", "sgd", 1e-1, 0)]


@pytest.mark.parametrize(("dtype", "optim", "rate", "seed"), few(RUNS, CHOSEN))
def test_the_share_that_is_logged_is_that_of_a_direct_count(
    dtype: Any, optim: str, rate: float, seed: int, tmp_path: Path
) -> None:
    prepared = prepare("none", adapter_dtype=dtype)
    counted, callback = Counted(), KbitTrainerCallback(prepared, count_lost_updates=True)
    settings = {"optim": optim, "learning_rate": rate, "seed": seed, "logging_steps": 1}
    trainer = trainer_for(adapt(prepared.model), tmp_path, callbacks=[counted, callback], **settings)
    trainer.train()
    logged = [entry["lost_updates"] for entry in trainer.state.log_history if "lost_updates" in entry]
    assert logged == counted.shares
    assert len(logged) == NUM_STEPS
    if dtype == "bfloat16" and rate == 2e-5:
        assert logged[-1] > 0.5
    if dtype == "float32" and optim != "sgd":
        assert max(logged) < 0.01


def test_the_share_is_of_all_steps_since_the_last_log_and_costs_no_number(tmp_path: Path) -> None:
    found = []
    for is_counted in (False, True):
        prepared = prepare("none", adapter_dtype="bfloat16")
        callback = KbitTrainerCallback(prepared, count_lost_updates=is_counted)
        settings = {"learning_rate": 2e-5, "logging_steps": 2}
        trainer = trainer_for(adapt(prepared.model), tmp_path, callbacks=[callback], **settings)
        trainer.train()
        found.append(outcome(trainer))
        logged = [entry for entry in trainer.state.log_history if "lost_updates" in entry]
        assert [entry["step"] for entry in logged] == ([2, NUM_STEPS] if is_counted else [])
    assert found[0] == found[1]


def test_steps_without_updates_and_skipped_ones_do_not_count() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer: Any = torch.optim.SGD([parameter], lr=1e-5)
    lost = LostUpdates()
    assert lost.take() is None

    def step() -> None:
        lost.before_step(optimizer)
        optimizer.step()
        lost.after_step(optimizer)

    step()  # without gradients
    assert lost.take() is None
    parameter.grad = torch.tensor([0.0, 1.0, 1.0, 1e4], dtype=torch.bfloat16)
    step()
    assert lost.take() == 2 / 3
    assert lost.take() is None
    optimizer.param_groups[0]["lr"] = 0
    step()
    assert lost.take() is None
    optimizer.param_groups[0]["lr"] = 1e-5
    optimizer.step_was_skipped = True
    step()
    assert lost.take() is None


# ----------------------------------------------------------------------------------------------------
# The dtype when training begins.
# ----------------------------------------------------------------------------------------------------


def test_training_in_another_dtype_than_asked_for_is_refused(tmp_path: Path) -> None:
    prepared = prepare("compute", adapter_dtype="bfloat16")
    trainer = trainer_for(adapt(prepared.model), tmp_path, callbacks=[KbitTrainerCallback(prepared)], **EVERY_STEP)
    assert {p.dtype for n, p in trainer.model.named_parameters() if "lora_" in n} == {torch.bfloat16}
    trainer.train()
    again = prepare("compute", adapter_dtype="bfloat16")
    late = trainer_for(adapt(again.model), tmp_path, callbacks=[KbitTrainerCallback(again)], **EVERY_STEP)
    with pytest.raises(StateError, match=r"adapter_dtype='bfloat16', and .*lora_A.* are in another dtype"):
        late.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert late.losses == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_of_a_prepared_trainer_is_the_uninterrupted_one(dtype: Any, tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        trainer = trainer_for(adapt(load_base()), tmp_path, **EVERY_STEP)
        names = {*vars(trainer)}
        with prepared_trainer(trainer, adapter_dtype=dtype):
            trainer.train(**kwargs)
            trained = [p for group in trainer.optimizer.param_groups for p in group["params"]]
            assert {p.dtype for p in trained} == {getattr(torch, dtype)}
        assert "create_optimizer" not in {*vars(trainer)} - names
        return trainer

    losses, weights = outcome(run())
    again = run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert outcome(again) == (losses[1:], weights)
