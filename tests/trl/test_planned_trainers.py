"""`kbitwrap plan --step --trainer` is the step that TRL's trainer takes with its defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import runs
from kbitwrap import predict_step
from kbitwrap.cli import main
from kbitwrap.model.quantization import bitsandbytes_config
from support import zoo
from support.foreseen import DEPRECATED, Cell, figures
from support.thorough import few

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

OPTIONS = ["--step", "--precision", "none", "--rank", "2", "--json", "--kernels", "cpu"]


@pytest.mark.parametrize("kind", few(runs.TRAINERS, ["sft"]))
def test_a_trainer_by_name_has_its_own_defaults(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = AutoConfig.from_pretrained(zoo.checkpoint("llama"), max_position_embeddings=4096)
    config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), *OPTIONS, "--trainer", kind]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]["none"]
    expected = predict_step(
        config,
        args=runs.TRAINERS[kind][1](str(tmp_path), use_cpu=True),
        precision="none",
        kernels="cpu",
        lora=lora(kind),
        quantization_config=bitsandbytes_config("nf4", "bfloat16"),
        dtype="bfloat16",
    )
    assert (found["batch_size"], found["seq_len"]) == (8, 1024)
    assert found == json.loads(json.dumps(expected.to_dict()))


def test_beside_the_default_stands_what_trl_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.from_pretrained(zoo.checkpoint("llama"), max_position_embeddings=4096).save_pretrained(tmp_path)
    options = ["--step", "--rank", "2", "--json", "--kernels", "cpu", "--trainer", "sft", "--seq", "8"]
    assert main(["plan", str(tmp_path), *options]) == 0
    assert [*json.loads(capsys.readouterr().out)["steps"]] == ["unprepared", "norms"]


def lora(kind: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules="all-linear", task_type="SEQ_CLS" if kind == "reward" else None)


@pytest.mark.parametrize("kind", few(("sft", "dpo", "reward"), ["dpo"]))
def test_a_length_that_is_given_wins_over_that_of_the_arguments(kind: str, tmp_path: Path) -> None:
    cell = Cell(kind)
    options = {"lora": cell.lora, "precision": "none", "quantization_config": runs.NF4, "kernels": "cpu"}
    found = []
    for length in (8, 32):
        args = runs.config_of(kind, tmp_path, max_length=length)
        found.append(predict_step(str(zoo.checkpoint("llama")), args=args, seq_len=32, **options))
    assert figures(found[0]) == figures(found[1])
