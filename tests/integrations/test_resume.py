"""Stop, and resume from a manifest in a new process: the losses are those of a run that never stopped."""

from __future__ import annotations

import math
from pathlib import Path

import peft
import pytest
import torch

from kbitwrap import KbitPreparedModel
from support import forks, zoo
from support.training import adapt

QUANTS = ("nf4", "int8")
# The ways to go on: where the base gets its adapter, or that it is not prepared at all.
WAYS = {
    "full": ("adapter after", "adapter before", "unprepared"),
    "compute": ("adapter after",),
    "norms": ("adapter after", "unprepared"),
    "adapted": ("adapter after", "adapter before"),
}


class Run:
    """A training that can be stopped and resumed: model, adapter and optimizer."""

    def __init__(self, quant: str) -> None:
        self.model = zoo.load("llama", quant)

    def adapt(self) -> peft.PeftModel:
        self.peft_model = adapt("llama", self.model)
        parameters = [p for p in self.peft_model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        return self.peft_model

    def train(self, steps: range) -> list[float]:
        self.peft_model.train()
        losses = []
        for seed in steps:
            loss = zoo.loss("llama", self.peft_model, zoo.inputs("llama", self.peft_model, seed=seed))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, path: Path) -> None:
        adapter = peft.get_peft_model_state_dict(self.peft_model)
        torch.save({"adapter": adapter, "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        peft.set_peft_model_state_dict(self.peft_model, saved["adapter"])
        self.optimizer.load_state_dict(saved["optimizer"])


def resume(folder: Path, quant: str) -> dict[str, dict[str, list[float]]]:
    """Go on with every training that was stopped; called in a new process."""
    found: dict[str, dict[str, list[float]]] = {}
    for precision, ways in WAYS.items():
        stopped = folder / precision
        for way in ways:
            run = Run(quant)
            if way == "adapter before":
                run.adapt()
            if way == "unprepared":
                run.adapt()
            else:
                prepared = KbitPreparedModel.from_manifest(run.model, stopped / "kbitwrap.json").prepare()
                if way == "adapter after":
                    run.adapt()
                prepared.adopt(run.peft_model)
            run.load(stopped / "state.pt")
            found.setdefault(precision, {})[way] = run.train(range(4, 8))
    return found


def resumed(folder: Path, quant: str) -> dict[str, dict[str, list[float]]]:
    """Train eight steps without a stop, stop a second time after four, and go on in a new process."""
    found = {}
    for precision in WAYS:
        run = Run(quant)
        with KbitPreparedModel(run.model, precision=precision) as prepared:
            prepared.adopt(run.adapt())
            run.train(range(4))
            stopped = folder / precision
            stopped.mkdir()
            run.save(stopped / "state.pt")
            prepared.manifest().save(stopped / "kbitwrap.json")
            found[precision] = {"uninterrupted": run.train(range(4, 8))}
    for precision, losses in forks.run(resume, folder, quant).items():
        found[precision] |= losses
    return found


# bitsandbytes' 8-bit kernel computes in float16, and says so on every bf16 model.
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
@pytest.mark.parametrize("quant", QUANTS)
def test_resuming_in_a_new_process_gives_the_same_losses(quant: str, tmp_path: Path) -> None:
    for precision, losses in resumed(tmp_path, quant).items():
        uninterrupted = losses.pop("uninterrupted")
        assert all(math.isfinite(loss) for loss in uninterrupted)
        assert len(set(uninterrupted)) == 4
        assert set(losses) == set(WAYS[precision])
        for way, found in losses.items():
            # Without a manifest nothing tells that the base was prepared: the losses are others, and nothing says so.
            assert (found == uninterrupted) == (way != "unprepared"), (precision, way)
