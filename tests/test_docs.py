"""Every block of Python and of commands in README.md and docs/ runs as it is printed.

A block whose title says that it needs something does not run with its page. The blocks run in order, in a folder where
`path/to/model` and the names of models are small models. Those of docs/programs/
run each in a process of its own; their asserts are the claims.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from peft import get_peft_model
from transformers import Trainer, TrainingArguments

from kbitwrap import KbitPreparedModel, StepPredictor
from kbitwrap.cli import main
from support import forks, pages, zoo
from support.engines import load_for_fsdp2
from support.files import make_tokenizer
from support.texts import tokenizer
from support.thorough import few
from support.trainers import dataset, prompt

NEEDS = {
    "Needs the network": 4,
    "Needs a GPU": 2,
    "Needs HQQ": 1,
    "Needs minutes": 8,
    "Needs hours": 1,
    "Needs several processes": 2,
    "Needs a CPU with AVX512-BF16": 1,
    "Needs TRL": 5,
}
NOT_CODE = {"bibtex", "json", "text"}

# Blocks that hold these texts are run by other tests, which compare what they leave.
ELSEWHERE = {
    "train_dataset=train_dataset).train()": "integrations/test_trainer_page.py",
    "class Sample": "integrations/test_trainer_page.py",
    "torch.optim.AdamW(p for p in": "integrations/test_trainer_page.py",
    "SuspendedEvaluation(": "integrations/test_trainer_page.py",
    "float64, rounded to bfloat16": "export/test_merge.py",
    "replace_parameter_4bit_prequantized": "test_experts.py",
}
WHOLE_PAGES = {"manifest.md": "manifest/test_manifest_diff.py"}

SCRIPT = """
import sys

from peft import prepare_model_for_kbit_training

assert prepare_model_for_kbit_training.__module__.startswith("kbitwrap")
assert sys.argv[1:] == ["--epochs", "3"]
"""


# ----------------------------------------------------------------------------------------------------
# What is run, and where.
# ----------------------------------------------------------------------------------------------------


def test_what_is_not_run_here_says_what_it_needs_and_is_little() -> None:
    titles = Counter(block.title for path in pages.pages().values() for block in pages.blocks(path) if block.title)
    assert titles == NEEDS


def test_every_block_is_code_that_is_run_or_output() -> None:
    languages = {block.language for path in pages.pages().values() for block in pages.blocks(path)}
    assert languages == {"python", "bash", "console"} | NOT_CODE


@pytest.mark.parametrize("text", ELSEWHERE)
def test_what_other_tests_run_is_one_block_that_they_look_for(text: str) -> None:
    paths = [path for name, path in pages.pages().items() if name not in WHOLE_PAGES]
    assert sum(text in block.text for path in paths for block in pages.blocks(path, "python")) == 1
    assert text in (Path(__file__).parent / ELSEWHERE[text]).read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------
# Pages.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: models under the names that they use, and a run that was trained on one."""
    place = tmp_path_factory.mktemp("place")
    for name in ("path/to/model", "mistralai/Mistral-7B-v0.3"):
        (place / name).parent.mkdir(parents=True)
        (place / name).symlink_to(zoo.checkpoint("llama"))
    (place / "train.py").write_text(SCRIPT, encoding="utf-8")

    model = zoo.load("llama")
    prepared = KbitPreparedModel(model, precision="full").prepare()
    model.save_pretrained(place / "my-model")  # while prepared: in float32
    peft_model = get_peft_model(model, zoo.lora_config("llama", task_type="CAUSAL_LM"))
    prepared.manifest().save(place / "run" / "kbitwrap.json")
    for folder in ("run", "adapter"):
        peft_model.save_pretrained(place / folder)
        tokenizer().save_pretrained(place / folder)
    texts = ["a few words", "a few other words", "one more text", "and the last one of all"]
    (place / "mine.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    prepared.export(place / "merged-model", merge_adapters=True, model=peft_model)
    prepared.restore()
    peft_model.merge_and_unload().save_pretrained(place / "merged-4bit")
    return place


def given() -> dict[str, Any]:
    """What a page says is the reader's: a quantized model, freshly loaded, and what it is trained with."""
    model = zoo.load("llama")
    arguments = TrainingArguments("trainer", report_to="none", use_cpu=True)
    return {
        "model": model,
        "trainer": Trainer(model=get_peft_model(zoo.load("llama"), zoo.lora_config("llama")), args=arguments),
        "lora_config": zoo.lora_config("llama", task_type="CAUSAL_LM", lora_dropout=0.1),
        "train_dataset": dataset(model),
        "eval_dataset": dataset(model)[:2],
        "batch": zoo.inputs("llama", model),
        "batches": [zoo.inputs("llama", model, seed=seed) for seed in range(8)],
        "prompt": prompt(model),
        "tokenizer": make_tokenizer(64),
        "engine": SimpleNamespace(load_weights=lambda named: None),
    }


def run_command(command: str, folder: str) -> tuple[int, str]:
    """What a command line of kbitwrap, with variables before it and a file behind it, returns and prints."""
    os.chdir(folder)
    command, _, file = command.partition(" > ")
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    assert words.pop(0) == "kbitwrap"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        for search in ("longest_sequence", "largest_batch"):  # which take many predictions, and have tests of their own
            stack.enter_context(mock.patch.object(StepPredictor, search, return_value=64))
        status = main(words)
    if file:
        Path(file).write_text(output.getvalue(), encoding="utf-8")
    return status, output.getvalue()


def to_run() -> dict[str, list[pages.Block]]:
    """The blocks of each page that are run here; one that stands on two pages is run on the first."""
    found: dict[str, list[pages.Block]] = {}
    seen: set[pages.Block] = set()
    for name, path in pages.pages().items():
        for block in pages.blocks(path) if name not in WHOLE_PAGES else ():
            is_run = not block.title and block.language not in NOT_CODE and block not in seen
            if is_run and not any(text in block.text for text in ELSEWHERE):
                found.setdefault(name, []).append(block)
            seen.add(block)
    return found


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
@pytest.mark.parametrize("name", few(to_run(), ["README.md", "start.md", "merge.md"]))
def test_the_blocks_of_a_page_run(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in to_run()[name]:
        if block.language == "bash":
            for command in block.text.splitlines():
                if command.endswith("--out merged"):  # which another page examines
                    shutil.rmtree("merged", ignore_errors=True)
                status, output = forks.run(run_command, command, str(tmp_path))
                assert status in (0, 1), f"{command}: {output}"  # 1 is an answer
        elif block.language == "console":
            command, _, shown = block.text.removeprefix("$ ").partition("\n")
            assert forks.run(run_command, f"COLUMNS=80 {command}", str(tmp_path))[1] == shown
        else:
            for _ in range(2 if ".export(" in block.text else 1):  # a training script is run again
                torch.manual_seed(0)
                names |= given()
                exec(compile(block.text, name, "exec"), names)


def test_the_loop_that_resumes_leaves_the_adapter_of_one_that_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, resume = (pages.program(pages.DOCS / "resume.md", text) for text in ("batches[:4]", "batches[4:]"))
    runs = {"whole": [start.replace("[:4]", "")], "stopped": [start], "resumed": [start, resume]}
    adapters = {}
    for name, programs in runs.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        for seed, program in enumerate(programs):
            torch.manual_seed(seed)
            exec(compile(program, name, "exec"), given())
        adapters[name] = Path("run", "adapter_model.safetensors").read_bytes()
    assert adapters["resumed"] == adapters["whole"] != adapters["stopped"]


def shard_and_export(rank: int, join: forks.Join, program: str, folder: str) -> None:
    """Run a program in one of two processes that train together."""
    os.chdir(folder)
    model = load_for_fsdp2("llama")
    loaded: dict[str, torch.Tensor] = {}
    engine = SimpleNamespace(load_weight=loaded.__setitem__)
    lora_config = zoo.lora_config("llama", task_type="CAUSAL_LM")
    with join():
        exec(program, {"model": model, "lora_config": lora_config, "engine": engine})
    assert bool(loaded) == (rank == 0)


@pytest.mark.thorough
def test_what_needs_several_processes_runs_in_two(tmp_path: Path) -> None:
    program = pages.program(pages.DOCS / "sharding.md", "fully_shard(")
    forks.run_ranks(shard_and_export, program, str(tmp_path))
    for form in ("base", "merged"):
        assert (tmp_path / "run" / form / "model.safetensors").exists()


@pytest.mark.thorough
def test_the_programs_are_true(tmp_path: Path) -> None:
    folder = pages.DOCS / "programs"
    shutil.copy(folder / "tiny.py", tmp_path)
    names = ["tiny", "prepare", "merge_after", "record", "resume"]
    assert {path.stem for path in folder.iterdir()} == {*names}
    outputs = {name: forks.run_program((folder / f"{name}.py").read_text("utf-8"), folder=tmp_path) for name in names}
    assert "LlamaForCausalLM full" in outputs["record"].stdout
    refusal = outputs["resume"].stdout
    assert "config.precision: expected 'full', found 'norms'" in refusal
    assert "No step was taken" in refusal


# ----------------------------------------------------------------------------------------------------
# Commands that are not run, and what is to be installed.
# ----------------------------------------------------------------------------------------------------


def commands_not_run() -> list[str]:
    """The commands of kbitwrap in blocks that need what a test does not have."""
    found = []
    for path in pages.pages().values():
        blocks = [block for block in pages.blocks(path, "bash") if block.title in NEEDS]
        found += [line for block in blocks for line in block.text.splitlines() if line.startswith("kbitwrap ")]
    return found


@pytest.mark.parametrize("command", commands_not_run())
def test_a_command_that_is_not_run_has_options_that_exist(command: str) -> None:
    name, *rest = shlex.split(command)[1:]
    assert main([name, "--help", *rest]) == 0


def test_a_command_of_the_figures_that_a_page_names_exists() -> None:
    texts = [path.read_text(encoding="utf-8") for path in pages.pages().values()]
    named = {name for text in texts for name in re.findall(r"python docs/figures ([a-z_]+)", text)}
    assert len(named) > 10
    assert named <= runpy.run_path(str(pages.DOCS / "figures"))["WRITES"].keys()


FIGURES_COMMANDS = [
    command
    for path in pages.pages().values()
    for block in pages.blocks(path, "bash")
    for command in re.findall(r"python docs/figures (.+)", block.text)
]


@pytest.mark.parametrize("command", FIGURES_COMMANDS)
def test_a_command_of_the_figures_has_options_that_exist(
    command: str, figures: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = shlex.split(command)
    monkeypatch.setattr("sys.argv", [name, *arguments, "--help"])
    with pytest.raises(SystemExit) as ended:
        figures(name).main()
    assert ended.value.code in (None, 0)
    options = {word for word in arguments if word.startswith("-")}
    assert options <= {*re.findall(r"--?[\w-]+", capsys.readouterr().out)}


def test_the_header_of_the_site_and_the_citation_name_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pages.DOCS / "figures")
    front_page = importlib.import_module("front_page")
    name, _, version = front_page.on_config(SimpleNamespace(site_name="kbitwrap")).site_name.partition(" ")
    assert name == "kbitwrap"
    assert f'\nversion = "{version}"\n' in (pages.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"version = {{{version}}}" in (pages.DOCS / "contributing.md").read_text(encoding="utf-8")


def test_the_workflows_run_the_gate_and_the_readmes_command() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (pages.ROOT / ".github").rglob("*.yml")}
    runs = {
        name: [step["run"] for job in workflow["jobs"].values() for step in job.get("steps", ()) if "run" in step]
        for name, workflow in workflows.items()
    }
    (command,) = re.findall(
        "^pip install .* && pytest .*$", (pages.ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    release = runs.pop("release")
    assert runs == {"check": [".ci/run"], "test": [command], "weekly": [".ci/run --all"]}
    assert workflows["release"]["jobs"]["check"]["uses"] == "./.github/workflows/check.yml"
    assert release[-1].endswith(" && python -m build")
    classifiers = (pages.ROOT / "pyproject.toml").read_text("utf-8")
    pythons = workflows["test"]["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    assert pythons == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', classifiers)


def test_the_extras_that_anything_names_exist() -> None:
    project = (pages.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^([\w-]+) = \[", section, re.MULTILINE))
    files = [*pages.pages().values(), pages.ROOT / ".ci" / "run", *(pages.ROOT / "kbitwrap").rglob("*.py")]
    named = [
        extra
        for file in files
        for group in re.findall(r"pip install[^\n]*?(?:kbitwrap|\.)\[([^\]]+)\]", file.read_text(encoding="utf-8"))
        for extra in group.split(",")
    ]
    assert "test" in named
    assert [extra for extra in named if extra not in extras and "$" not in extra] == []


def test_the_figures_that_open_the_benchmarks_are_those_of_the_tables_below() -> None:
    source = (pages.DOCS / "benchmarks.md").read_text(encoding="utf-8")
    opening, _, tables = source.partition("\n## ")
    rows = [line for line in opening.splitlines() if line.startswith("| ") and "**" not in line]
    figures = [figure for row in rows for figure in re.findall(r"\d+\.\d+(?:e-\d+)?", row.partition(" | ")[2])]
    measured = set(re.findall(r"[^\s()|]+", tables))
    assert len(figures) > 15
    assert [figure for figure in figures if figure not in measured] == []
