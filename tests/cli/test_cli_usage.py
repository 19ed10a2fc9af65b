"""What was typed and cannot be used: one line that says what to do, at once, and nothing imported for it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from kbitwrap.cli import main, plan

ROOT = Path(__file__).parents[2]
COMMANDS = ("demo", "plan", "doctor", "merge", "stamp", "convert", "run")
HELP = [["--help"], ["-h"], ["--version"], *([command, "--help"] for command in COMMANDS)]
LONG = "x" * 256
# What was typed, and what is said of it.
WRONG = {
    "plna m": "kbitwrap: error: No such command 'plna'. Did you mean 'plan'?",
    "frobnicate": "No such command 'frobnicate'",
    "--verison": "No such option: --verison",
    "plan": "kbitwrap plan: error: Missing argument 'MODEL'. (see 'kbitwrap plan --help')",
    "plan m extra": "unexpected extra argument(s) (extra). Type: kbitwrap plan MODEL (see ",
    "plan --model m": "No such option: --model. Type: kbitwrap plan MODEL (see ",
    "plan m --memory": "--memory-budget",
    "plan m --json=1": "kbitwrap: error: Option '--json' does not take a value.",
    "plan m --quant": "kbitwrap: error: Option '--quant' requires an argument.",
    "plan m --quant int3": "Invalid value for '--quant': 'int3' is not one of 'nf4', 'nf4-double', 'fp4', ",
    "plan m --precision norm": "Invalid value for '--precision': 'norm' is not one of 'full', 'compute', 'norms', ",
    "plan m --precision full half": "unexpected extra argument",
    "plan m --memory-budget -5MiB": "'--memory-budget': expected a number of bytes such as 536870912 or '512MiB'",
    "plan m --memory-budget 8": "'--memory-budget': 8 bytes: give a unit, as in 8GiB",
    "plan m --step --budget 8": "'--budget': 8 bytes: give a unit, as in 8GiB",
    "plan m --step --seq 0": "Invalid value for '--seq'",
    "plan m --step --batch -1": "Invalid value for '--batch'",
    "plan m --step --seq 2k": "Invalid value for '--seq': expected a whole number such as 2048 (see ",
    "plan m --step --batch 1x": "Invalid value for '--batch': expected a whole number such as 2048 (see ",
    "plan m --step --rank 1.5": "Invalid value for '--rank': expected a whole number such as 2048 (see ",
    "plan m --step --sequence 8": "No such option: --sequence",
    "plan m --dtype bf16": "'--dtype': 'bf16' is not one of 'bfloat16', 'float16'",
    "plan m --seq 8": "--seq applies to training steps only: add --step",
    "plan m --budget 8GiB": "--budget applies to training steps only: add --step. The budget of preparing alone is ",
    "plan m --step --memory-budget 8GiB": "for what preparing adds; the budget of a whole step is --budget",
    "plan m --step --budget 1GiB --device-memory 1GiB": "expected at most one of --budget, --device-memory",
    "plan m --unified": "--unified applies to training steps only: add --step",
    "run --unified s.py": "--unified is for --plan",
    "plan m --kernels cpu": "--kernels applies to training steps only: add --step",
    f"doctor {LONG}": "there is nothing at 'xxx",
    "export --from a": "there is no command 'export' any more: 'kbitwrap convert' does what it did",
    "inspect absent": "there is no command 'inspect' any more: 'kbitwrap doctor PATH' says what it said",
    "doctor": "Missing argument 'PATH'",
    "doctor absent": "there is nothing at 'absent'",
    "doctor m a": "unexpected extra argument(s) (a). Type: kbitwrap doctor MERGED --adapter ADAPTER (see ",
    "doctor --merged m": "No such option: --merged. Type: kbitwrap doctor MERGED --adapter ADAPTER (see ",
    "doctor m --adapter": "Option '--adapter' requires an argument.",
    "doctor . --quant nf4": "--quant says how a base was quantized: give --adapter, or --base",
    "merge --out absent": "Missing argument '[BASE] ADAPTER'",
    "merge --base b a --out c": "No such option: --base. Type: kbitwrap merge [BASE] ADAPTER --out DST (see ",
    "merge --adapter a --out b": "No such option: --adapter. Type: kbitwrap merge [BASE] ADAPTER --out DST (see ",
    "merge a --otu b": "No such option: --otu (Possible options: --out)",
    "stamp a b": "unexpected extra argument(s) (b). Type: kbitwrap stamp ADAPTER --base BASE (see ",
    "stamp --adapter a": "No such option: --adapter. Type: kbitwrap stamp ADAPTER --base BASE (see ",
    "merge m": "Missing option '--out'",
    "merge m a --out b --max-shard-size much": "'--max-shard-size': expected a number of bytes",
    "convert --out b": "Missing option '--from'",
    "convert a b": "Missing option '--from'. Type: kbitwrap convert --from SRC --out DST (see ",
    "convert --from a --out b c": "unexpected extra argument(s) (c). Type: kbitwrap convert --from SRC --out DST (see ",
    "convert --from a --out b --like c --dtype float16": "expected at most one of --like, --dtype",
    "bench": "no command 'bench' any more: its figures are measured in a checkout of the repository, by python ",
    "bench --step --help": "by python docs/figures benchmarks",
    "run": "kbitwrap run: error: Missing argument 'SCRIPT'",
    "run --script s.py": "No such option: --script. Type: kbitwrap run SCRIPT (see ",
    "run --precision half s.py": "Invalid value for '--precision': 'half' is not one of ",
    "run --precison full s.py": "No such option: --precison",
    "run absent.py": "cannot read the script 'FOLDER/absent.py'",
}
PROGRAM = """
import contextlib, io, json, resource, sys

def seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

def ask(arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(arguments)
    return [status, out.getvalue(), err.getvalue(), seconds()]

from kbitwrap.cli import main
answers = [ask(arguments) for arguments in json.loads(sys.argv[1])]
heavy = sorted({"torch", "transformers", "peft", "bitsandbytes", "matplotlib"} & sys.modules.keys())
print(json.dumps({"answers": answers, "heavy": heavy}))
"""


def test_help_and_usage_errors_are_one_line_and_do_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "typed.txt").touch()
    typed = [*HELP, *(text.split() for text in WRONG)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(typed)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    result = json.loads(found.stdout)
    assert result["heavy"] == []
    answers = result["answers"]
    for arguments, (status, out, err, _) in zip(HELP, answers, strict=False):
        assert (status, err) == (0, ""), arguments
        assert out.strip().startswith("kbitwrap " if "--version" in arguments else "Usage: kbitwrap")
    for (text, message), (status, out, err, _) in zip(WRONG.items(), answers[len(HELP) :], strict=True):
        assert (status, out) == (2, ""), text
        assert message in err.replace(str(tmp_path), "FOLDER")
        assert err.startswith("kbitwrap")
        assert err.count("\n") == 1
    # The first has the imports in it; each of the others would on its own.
    assert answers[0][3] < 0.5
    assert max(after[3] - before[3] for before, after in itertools.pairwise(answers)) < 0.25
    assert {path.name for path in tmp_path.iterdir()} == {"typed.txt"}


BAD_INPUT = {
    "plan /no/such": "there is no model at '/no/such'",
    "plan .": "there is no config.json in '.'",
    f"plan {LONG}": "Repo id must use alphanumeric chars",
    "plan nobody/nothing": "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them ",
    f"doctor . --adapter {LONG}": "there is no adapter_config.json",
    f"merge {LONG} --out b": "there is no adapter_config.json",
    "merge absent --out b": "there is no adapter_config.json with adapter_model.safetensors in 'absent'",
    "merge m absent --out b": "there is no adapter_config.json with adapter_model.safetensors in 'absent'",
    "merge m . --out b": "there is no adapter_config.json with adapter_model.safetensors in '.'",
    "stamp absent": "there is no adapter_config.json with adapter_model.safetensors in 'absent'",
}


@pytest.mark.parametrize("text", BAD_INPUT)
def test_what_is_not_there_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(text.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("kbitwrap: error: ")
    assert BAD_INPUT[text] in err


def test_values_may_follow_one_another_and_an_argument_may_follow_them(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--precision", "full", "norms", "/no/such"], ["/no/such", "--precision=full", "--json"]):
        assert main(["plan", *arguments]) == 2
        assert "there is no model at '/no/such'" in capsys.readouterr().err


def test_an_unexpected_error_has_a_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan, "choose_quantization", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["plan", str(tmp_path)])


CODE = """
from pathlib import Path
Path({!r}).touch()
from transformers import LlamaConfig as Mine, LlamaForCausalLM as Its
"""


@pytest.mark.parametrize("arguments", [["plan"], ["doctor"]])
def test_code_in_a_folder_is_not_run_and_nothing_is_asked(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, ran, asked = tmp_path / "model", tmp_path / "it ran", []
    model.mkdir()
    (model / "mine.py").write_text(CODE.format(str(ran)))
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Its"}}
    (model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    assert main([*arguments, str(model)]) == 2
    out, err = capsys.readouterr()
    assert (out, asked, ran.exists()) == ("", [], False)
    assert err.count("\n") == 1


def test_code_that_is_trusted_is_run_and_that_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    ran = tmp_path / "it ran"
    (tmp_path / "mine.py").write_text(CODE.format(str(ran)) + "raise ImportError('seen')\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}))
    assert main(["plan", str(tmp_path), "--trust-remote-code"]) == 2
    said = "kbitwrap: --trust-remote-code: code that the model brings along is run\n"
    assert capsys.readouterr().err.startswith(said)
    assert ran.exists()
