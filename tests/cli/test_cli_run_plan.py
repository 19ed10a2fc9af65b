"""`kbitwrap run --plan`: a script that nobody edited says what its step takes, and trains nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState

from kbitwrap import predict_step
from kbitwrap.cli import main
from support import zoo
from support.foreseen import DEPRECATED

pytestmark = pytest.mark.filterwarnings(DEPRECATED)

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import sys
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

if __name__ == "__main__":
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=nf4, dtype="bfloat16", device_map="auto")
    # before
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()
    args = TrainingArguments("out", per_device_train_batch_size=2, max_steps=2, bf16=True, report_to="none", **MORE)
    rows = [{"input_ids": [9] * 8, "labels": [9] * 8}] * 8
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    try:
        trainer.train()
    except Exception:
        print("went on")
    trainer.save_model("trained")
"""


def written(
    folder: Path,
    *,
    before: str = "",
    more: str = "{'use_cpu': True}",
    text: str = SCRIPT,
    base: Path | None = None,
) -> str:
    script = folder / "train.py"
    text = text.replace("MODEL", repr(str(base or zoo.checkpoint("llama"))))
    script.write_text(text.replace("# before", before).replace("MORE", more))
    return str(script)


@pytest.fixture(autouse=True)
def _nothing_is_shared_by_accelerate() -> Iterator[None]:
    """A script's own trainer has accelerate share its autocast with the whole process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.thorough
@pytest.mark.parametrize("is_integrated", [False, True])
def test_the_memory_of_the_gpu_here_is_the_hosts_too_where_the_gpu_says_so(
    is_integrated: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["--device-memory", "3.0 GiB", *(["--unified"] if is_integrated else [])]
    assert main(["run", "--plan", *told, written(tmp_path, more="{}")]) == 0
    expected = capsys.readouterr().out
    assert ("The memory is the host's too." in expected) == is_integrated
    for name in ("is_available", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    gpu = f"""
        from types import SimpleNamespace
        gpu = SimpleNamespace(total_memory=3 * 2**30, is_integrated={int(is_integrated)})
        torch.cuda.is_available, torch.cuda.get_device_properties = lambda: True, lambda _: gpu
        trainer.train()
    """
    text = SCRIPT.replace("trainer.train()\n", f"{gpu.strip()}\n", 1)
    assert main(["run", "--plan", written(tmp_path, more="{}", text=text)]) == 0
    assert capsys.readouterr().out == expected


def test_unified_memory_without_its_size_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--plan", "--unified", written(tmp_path, before="print('ran')")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "--unified says that host and device share --device-memory: give both" in said.err


def test_a_script_is_planned_and_nothing_is_trained_or_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path)
    assert main(["run", "--plan", "--budget", "1GiB", script]) == 0
    out = capsys.readouterr().out
    assert "trainable params: " in out
    verdict = next(line for line in out.splitlines() if "GiB" in line)
    assert verdict == "1.0 GiB: 2 x 8 tokens fit with unprepared."
    assert "2 x 8 tokens on cpu" in out
    assert "\nunprepared " in out
    assert "went on" not in out
    assert not (tmp_path / "trained").exists()
    assert main(["run", "--plan", "--budget", "1KiB", script]) == 1
    assert "\n1.0 KiB: 2 x 8 tokens do not fit with unprepared.\n" in capsys.readouterr().out
    assert transformers.Trainer.train.__qualname__ == "Trainer.train"


def test_a_script_on_a_cpu_is_predicted_for_the_gpu_whose_memory_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--plan", "--device-memory", "2GiB", written(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "2.0 GiB (1.4 GiB for torch): 2 x 8 tokens fit with unprepared.\n" in out
    assert "2 x 8 tokens on cuda" in out
    assert "the script trains on a CPU (use_cpu); its step is predicted for a GPU" in err


@pytest.mark.thorough
def test_the_step_is_the_one_of_the_models_preparation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path, before="model = prepare_model_for_kbit_training(model)", more="{}")
    assert main(["run", "--plan", "--precision", "norms", script]) == 0
    out = capsys.readouterr().out
    assert "2 x 8 tokens on cuda" in out
    assert "\nnorms " in out
    assert "Loading the model, before the step, takes " in out


@pytest.mark.thorough
@pytest.mark.parametrize("is_saved", [False, True], ids=["quantized on loading", "saved quantized"])
def test_what_is_loaded_gives_the_same_step(
    is_saved: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path)
    if is_saved:
        zoo.load("llama").save_pretrained(tmp_path / "base")
        text = SCRIPT.replace("quantization_config=nf4, ", "")
        script = written(tmp_path, text=text, base=tmp_path / "base")
    found = []
    for options in ([], ["--load"]):
        assert main(["run", "--plan", *options, script]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]


LOOP = """\
import torch

torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('done')", "the script ended before a trainer's train()"),
        ("import sys; sys.exit(3)", "the script ended before a trainer's train()"),
        ("raise ValueError('bad')", "the script ended before a trainer's train()"),
        (LOOP, "for a loop without a trainer 'kbitwrap plan MODEL --step' answers"),
        (SCRIPT.replace("# before", "model.generate(torch.ones(1, 2).long())"), "models have weights only with --load"),
        (SCRIPT.replace("max_steps=2", "max_steps=2, torch_compile=True"), "args.torch_compile: what a compiled model"),
    ],
    ids=["ends", "exits", "raises", "loop", "generates", "compiled"],
)
def test_a_script_whose_step_cannot_be_told_is_answered_in_one_line(
    text: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--plan", written(tmp_path, text=text)]) == 2
    err = capsys.readouterr().err
    last = err.splitlines()[-1]
    assert last.startswith("kbitwrap: error: ")
    assert said in last
    raises = "raise" in text or "generate" in text or text == LOOP
    assert ("Traceback" in err) == raises


def test_what_is_said_of_a_script_names_no_option_that_was_given_or_that_run_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--plan", "--load", written(tmp_path, text="print('done')")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "kbitwrap: error: the script ended before a trainer's train()"
    assert main(["run", "--plan", written(tmp_path, more="{'use_cpu': True, 'optim': 'lomo'}")]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("kbitwrap: error: optimizer: 'lomo' is not predicted: ")


def test_a_limit_is_for_a_plan_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--budget", "1GiB", written(tmp_path)]) == 2
    assert "--budget is for --plan" in capsys.readouterr().err


@pytest.mark.thorough
def test_libraries_are_changed_when_the_script_imports_them(tmp_path: Path) -> None:
    script = written(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-m", "kbitwrap", "run", "--plan", script]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert ", 2 x 8 tokens on cpu\n" in result.stdout


def test_a_trainer_has_its_arguments_already(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    trainer = transformers.Trainer(zoo.load("llama", None), args)
    with pytest.raises(ValueError, match=r"^args: the trainer has them: leave them out$"):
        predict_step(trainer, args=args, seq_len=8)
