"""One line on TRL's trainers, which prepare nothing: the same bits, a record in each checkpoint, and a merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import runs
from kbitwrap import Manifest, ManifestMismatchError, doctor, merge_checkpoint, prepared_of
from kbitwrap.integrations import KbitTrainerCallback
from runs import NUM_STEPS, TRAINERS, outcome, trainer_for
from support import zoo
from support.files import read
from support.merging import assert_same_model

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:`gradient_checkpointing\w*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("kind", TRAINERS)
def test_one_line_changes_no_bit_and_leaves_a_record_and_a_merge(kind: str, tmp_path: Path) -> None:
    alone = trainer_for(kind, "name", tmp_path / "alone", **EVERY_STEP)
    alone.train()
    trainer = trainer_for(kind, "name", tmp_path / "run", **EVERY_STEP)
    trainer.add_callback(KbitTrainerCallback(merge_to=tmp_path / "merged"))
    trainer.train()
    assert outcome(trainer) == outcome(alone)
    assert prepared_of(trainer.model) is None
    adapter = tmp_path / "run" / f"checkpoint-{NUM_STEPS}"
    for folder in (tmp_path / "run" / "checkpoint-1", adapter, tmp_path / "run"):
        assert Manifest.load(folder).unknown == ("not prepared",)
        assert Manifest.load(folder).logits is not None
    assert not doctor(adapter, base=zoo.checkpoint("llama")).findings

    merge_checkpoint(zoo.checkpoint("llama"), adapter, tmp_path / "saved", check=True)
    if kind == "reward":  # the base's files have a config for generation, which is another model's
        live, saved = read(tmp_path / "merged"), read(tmp_path / "saved")
        assert {name for name in saved if live.get(name) != saved[name]} == {"README.md", "generation_config.json"}
    else:
        assert_same_model(tmp_path / "merged", tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").get_vocab() == runs.tokenizer().get_vocab()
    assert "in nf4 in training, which the manifest says" in (tmp_path / "merged" / "README.md").read_text()


def test_a_run_is_resumed_as_without_the_line_and_on_its_own_base_alone(tmp_path: Path) -> None:
    def trainer_of(folder: str, model: Any = None) -> Any:
        trainer = trainer_for("sft", "model", tmp_path / folder, model=model, **EVERY_STEP)
        trainer.add_callback(KbitTrainerCallback())
        return trainer

    whole = trainer_of("whole")
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    # PEFT loads adapters in float32, with this callback as without
    alone, resumed = trainer_for("sft", "model", tmp_path / "alone"), trainer_of("resumed")
    alone.train(resume_from_checkpoint=checkpoint)
    with pytest.warns(UserWarning, match=r"was bfloat16 at step 2, and is float32 now: .*adapter_dtype='bfloat16'"):
        resumed.train(resume_from_checkpoint=checkpoint)
    assert outcome(resumed) == outcome(alone)

    other = trainer_of("other", zoo.load("llama", "fp4"))
    with pytest.raises(ManifestMismatchError, match=r"another quantization: .*No step was taken"):
        other.train(resume_from_checkpoint=checkpoint)
    assert other.losses == []
