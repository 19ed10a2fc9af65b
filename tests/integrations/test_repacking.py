"""Evaluations on a CPU with AVX512-BF16, where 4-bit layers repack their weights, and what is recorded of the base."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from kbitwrap import Manifest, UnsupportedModelError, merge_checkpoint
from kbitwrap.integrations import KbitTrainerCallback
from support import settings, zoo
from support.merging import tensors_of
from support.snapshot import tensor_digest
from support.trainers import EVERY_STEP, adapt, dataset, load_base, trainer_for

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:bitsandbytes..gemv_4bit. an autograd kernel was not registered:UserWarning"),
]
QUANTS = ["nf4", "nf4-double"]


@pytest.fixture(autouse=True)
def _repacking(monkeypatch: pytest.MonkeyPatch) -> None:
    settings.repack(monkeypatch)


def evaluating(quant: str, folder: Path, callback: KbitTrainerCallback, **options: Any) -> Any:
    model = adapt(load_base(quant))
    fields = {**EVERY_STEP, "eval_dataset": dataset(model), **options}
    return trainer_for(model, folder, callbacks=[callback], **fields)


def checkpoint_of_base(folder: Path) -> Path:
    base: PreTrainedModel = zoo.load("llama", None, num_hidden_layers=1)
    base.save_pretrained(folder)
    return folder


def digests(folder: Path) -> dict[str, object]:
    return {name: tensor_digest(tensor) for name, tensor in tensors_of(folder).items()}


@pytest.mark.parametrize("quant", QUANTS)
def test_the_merge_at_the_end_is_that_of_the_files_whatever_was_evaluated(quant: str, tmp_path: Path) -> None:
    every_step = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = evaluating(quant, tmp_path / "run", KbitTrainerCallback(merge_to=tmp_path / "live"), **every_step)
    trainer.evaluate()
    trainer.train()

    base = checkpoint_of_base(tmp_path / "base")
    merge_checkpoint(base, tmp_path / "run" / "checkpoint-3", tmp_path / "saved", device="cpu")
    assert digests(tmp_path / "live") == digests(tmp_path / "saved")


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("evaluates", ["the first run", "the resumed run"])
def test_a_run_is_resumed_on_its_base_whatever_was_evaluated(quant: str, evaluates: str, tmp_path: Path) -> None:
    first = evaluating(quant, tmp_path / "run", KbitTrainerCallback())
    if evaluates == "the first run":
        first.evaluate()
    first.train()

    second = evaluating(quant, tmp_path / "again", KbitTrainerCallback())
    if evaluates == "the resumed run":
        second.evaluate()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert [str(one.message) for one in caught if "other logits" in str(one.message)] == []
    assert len(second.losses) == 2


@pytest.mark.parametrize("quant", QUANTS)
def test_one_trainer_resumes_after_its_evaluations(quant: str, tmp_path: Path) -> None:
    trainer = evaluating(quant, tmp_path, KbitTrainerCallback(), eval_strategy="steps", eval_steps=1)
    trainer.train()
    recorded = Manifest.load(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again = Manifest.load(tmp_path)
    assert (again.essence(), again.logits) == (recorded.essence(), recorded.logits)


def test_a_callback_that_came_after_an_evaluation_records_no_wrong_base(tmp_path: Path) -> None:
    model = adapt(load_base())
    trainer = trainer_for(model, tmp_path, eval_dataset=dataset(model))
    trainer.evaluate()
    model.state_dict()
    trainer.add_callback(KbitTrainerCallback())
    with pytest.raises(UnsupportedModelError, match="the scales lie in the order of a weight that is repacked"):
        trainer.train()
    assert trainer.losses == []
