"""Runs of adapters that PEFT begins with a part of the base, and what the callback's record of them is good for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kbitwrap import ManifestMismatchError, doctor, merge_checkpoint
from kbitwrap.integrations import KbitTrainerCallback
from support import zoo
from support.merging import assert_same_model
from support.trainers import EVERY_STEP, adapt, load_base, trainer_for

pytestmark = pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.mark.parametrize(("quant", "method"), [(None, "pissa"), ("nf4", "olora")])
def test_a_run_is_merged_by_its_record_though_that_has_the_residual(
    quant: str | None, method: str, tmp_path: Path
) -> None:
    model = adapt(load_base(quant), init_lora_weights=method, lora_dropout=0.0)
    callback = KbitTrainerCallback(merge_to=tmp_path / "live")
    trainer_for(model, tmp_path / "run", callbacks=[callback], **EVERY_STEP).train()
    checkpoint = tmp_path / "run" / "checkpoint-3"
    base: Any = zoo.load("llama", None, num_hidden_layers=1)
    base.save_pretrained(tmp_path / "base")
    merge_checkpoint(tmp_path / "base", checkpoint, tmp_path / "saved", device="cpu")
    assert_same_model(tmp_path / "live", tmp_path / "saved")
    assert doctor(checkpoint, base=tmp_path / "base").findings == ()

    base.model.norm.weight.data += 1
    base.save_pretrained(tmp_path / "other")
    with pytest.raises(ManifestMismatchError, match=r"model\.norm\.weight"):
        merge_checkpoint(tmp_path / "other", checkpoint, tmp_path / "wrong", device="cpu")


def test_a_resumed_run_that_trains_biases_is_merged_by_its_record(tmp_path: Path) -> None:
    base: Any = zoo.load("llama", None, torch.float32, num_hidden_layers=1, attention_bias=True)
    base.save_pretrained(tmp_path / "base")
    for num_steps in (2, 3):
        model = LlamaForCausalLM.from_pretrained(tmp_path / "base")
        adapted = adapt(model, bias="lora_only", lora_dropout=0.0)
        callback = KbitTrainerCallback(merge_to=tmp_path / "live")
        trainer = trainer_for(adapted, tmp_path / "run", callbacks=[callback], **EVERY_STEP, max_steps=num_steps)
        trainer.train(resume_from_checkpoint=num_steps == 3)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    merge_checkpoint(tmp_path / "base", checkpoint, tmp_path / "saved", device="cpu")
    assert_same_model(tmp_path / "live", tmp_path / "saved")
    assert doctor(checkpoint, base=tmp_path / "base").findings == ()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no memory")])
def test_a_merge_for_which_there_is_no_memory_is_a_warning(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    callback = KbitTrainerCallback(merge_to=tmp_path / "live")
    trainer = trainer_for(adapt(load_base()), tmp_path / "run", callbacks=[callback])
    with pytest.warns(UserWarning, match="the model was trained, and not merged"):
        trainer.train()
    assert not (tmp_path / "live").exists()


def test_every_adapter_of_a_checkpoint_has_its_record(tmp_path: Path) -> None:
    model = adapt(load_base())
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    trainer_for(model, tmp_path, callbacks=[KbitTrainerCallback()], **EVERY_STEP).train()
    records = [(tmp_path / place / "kbitwrap.json").read_bytes() for place in ("checkpoint-3", "checkpoint-3/other")]
    assert records[0] == records[1]
