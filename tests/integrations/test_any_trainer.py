"""The callback on a Trainer whose model kbitwrap did not prepare: record, refusal, merge, and the same numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

from kbitwrap import (
    ConfigError,
    KbitPreparedModel,
    Manifest,
    ManifestError,
    ManifestMismatchError,
    doctor,
    merge_checkpoint,
    prepare_model_for_kbit_training,
    prepared_of,
    restore,
)
from kbitwrap.integrations import KbitTrainerCallback
from support import zoo
from support.merging import assert_same_model
from support.snapshot import Snapshot
from support.trainers import (
    EVERY_STEP,
    NAME,
    NUM_STEPS,
    RecordingTrainer,
    adapt,
    load_base,
    outcome,
    prepare,
    trained_weights,
    trainer_for,
)

pytestmark = pytest.mark.filterwarnings(r"ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LAST = f"checkpoint-{NUM_STEPS}"


def by_peft(model: nn.Module) -> nn.Module:
    return peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def by_the_drop_in(model: nn.Module) -> nn.Module:
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False, precision="compute")


PREPARED = {"nobody": lambda model: model, "PEFT": by_peft, "the drop-in": by_the_drop_in}


def train(
    model: nn.Module, folder: Path, callback: KbitTrainerCallback | None, *, resumed: Path | None = None, **kwargs: Any
) -> RecordingTrainer:
    """Train with the one line, or without it."""
    trainer = trainer_for(adapt(model), folder, **EVERY_STEP | kwargs)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.02  # a delta that 4 bits can take
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    return trainer


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The files of the base that `load_base` quantizes."""
    zoo.load("llama", None, num_hidden_layers=1).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("who", PREPARED)
def test_one_line_records_any_run_and_merges_it_and_changes_no_number(
    who: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = train(PREPARED[who](load_base()), tmp_path / "alone", None, bf16=True)
    model = PREPARED[who](load_base())
    before = Snapshot(model)
    callback = KbitTrainerCallback(merge_to=tmp_path / "live")
    trainer = train(model, tmp_path / "run", callback, bf16=True)
    assert outcome(trainer) == outcome(alone)
    said = f"kbitwrap: merged into {tmp_path / 'live'} (half), "
    assert re.search(re.escape(said) + r"\d+\.\d% of the delta kept\n", capsys.readouterr().err)
    if who == "the drop-in":
        assert prepared_of(trainer.model) is not None
        restore(trainer.model)
    else:
        assert prepared_of(trainer.model) is None
        trainer.model.unload()
        changed = before.diff(Snapshot(model))
        assert not [line for line in changed if "hook" in line or "kbitwrap" in line], changed

    # the base is recorded as its files have it, whoever cast it since
    for folder in ("checkpoint-1", LAST, "."):
        manifest = Manifest.load(tmp_path / "run" / folder)
        manifest.check(load_base())
        assert manifest.unknown == (() if who == "the drop-in" else ("not prepared",))
    with pytest.raises(ManifestMismatchError):
        manifest.check(load_base("fp4"))

    # by what the record says, the saved adapter gives the model that was merged live
    adapter = tmp_path / "run" / LAST
    newest = f"'.*run' holds no adapter; its newest checkpoint does: give '.*{LAST}'"
    with pytest.raises(ConfigError, match=newest):
        merge_checkpoint(base, tmp_path / "run", tmp_path / "saved")
    merge_checkpoint(base, adapter, tmp_path / "saved", check=True)
    assert_same_model(tmp_path / "live", tmp_path / "saved")
    assert not doctor(adapter, base=base).findings
    cards = [(tmp_path / name / "README.md").read_text() for name in ("live", "saved")]
    assert all("in nf4 in training, which the manifest says" in card for card in cards)
    assert "The LORA adapter trained in `run` was added" in cards[0]
    assert '"use_cache": false' not in (tmp_path / "live" / "config.json").read_text()


def test_a_run_that_nothing_prepared_is_resumed_on_its_base_alone(tmp_path: Path) -> None:
    whole = train(load_base(), tmp_path, KbitTrainerCallback())
    checkpoint = tmp_path / "checkpoint-1"
    resumed = train(load_base(), tmp_path / "again", KbitTrainerCallback(), resumed=checkpoint)
    assert (resumed.losses, trained_weights(resumed.model)) == (whole.losses[1:], trained_weights(whole.model))

    other = load_base()
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    cases = [
        (other, "tensors"),
        (load_base("fp4"), "another quantization: bnb_4bit_quant_type: expected 'nf4'"),
        (by_peft(load_base()), "tensors"),
    ]
    cases.append((prepare("none").model, "prepared: expected False, found True"))
    for model, said in cases:
        with pytest.raises(ManifestMismatchError, match=said) as caught:
            train(model, tmp_path / "other", KbitTrainerCallback(), resumed=checkpoint)
        assert "or not at all where that says 'not prepared'" in str(caught.value)
    with pytest.raises(ManifestError, match="not prepared: train without the block"):
        KbitPreparedModel.from_manifest(load_base(), checkpoint)


@pytest.mark.parametrize("form", ["half", "mixed", "quantized"])
def test_the_merge_at_the_end_has_the_form_asked_for_and_takes_its_own_place_again(
    form: str, base: Path, tmp_path: Path
) -> None:
    for _ in range(2):
        callback = KbitTrainerCallback(merge_to=tmp_path / "merged", merge_as=form)
        train(load_base(), tmp_path / "run", callback, learning_rate=1e-5)
    merge_checkpoint(base, tmp_path / "run" / LAST, tmp_path / "saved", merge_as=form)
    assert_same_model(tmp_path / "merged", tmp_path / "saved")
    assert {path.name for path in tmp_path.iterdir()} == {"base", "run", "merged", "saved"}
    with pytest.raises(ConfigError, match="merge_as: expected one of"):
        KbitTrainerCallback(merge_as="double")


def test_a_merge_into_the_output_folder_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"merge_to: expected a folder of its own, .*No step was taken"):
        train(load_base(), tmp_path / "run", KbitTrainerCallback(merge_to=tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoint-1").exists()


def test_a_merge_that_is_refused_is_a_warning_and_the_training_stands(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"was trained, and not merged: .*'kbitwrap merge' merges"):
        trainer = train(load_base(), tmp_path / "run", KbitTrainerCallback(merge_to=tmp_path / "merged"))
    assert len(trainer.losses) == NUM_STEPS
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["mine.txt"]
    assert (tmp_path / "run" / NAME).is_file()
