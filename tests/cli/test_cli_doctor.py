"""`kbitwrap doctor`: what it prints, and what its exit status says."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from kbitwrap import doctor
from kbitwrap.cli import main
from support import training, zoo
from support.thorough import few

GIVE_ADAPTER = "give the adapter that was merged (adapter, --adapter)"
NO_MANIFEST = "no kbitwrap.json: KbitTrainerCallback writes one in training, and kbitwrap stamp after it"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    training.adapt("llama", zoo.load("llama")).save_pretrained(folder)
    return folder


@pytest.fixture
def broken(adapter: Path, tmp_path: Path) -> Path:
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = min(tensors)
    save_file({**tensors, name: tensors[name] * torch.inf}, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_doctor_prints_in_a_line_what_is_fine_and_line_by_line_if_asked(
    adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [
        f"{adapter}: no fault found in files, lora_B, adapter values; not measured: 1",
        f"not measured: whether the base is the manifest's, and unchanged: {NO_MANIFEST}",
    ]
    assert main(["doctor", str(adapter)]) == 0
    assert capsys.readouterr().out.splitlines() == first
    assert main(["doctor", str(adapter), "--verbose"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *first,
        "",
        f"{adapter}: files: fine: adapters, weights and configs can be read",
        f"{adapter}: lora_B: fine: not all of 10 are zero",
        f"{adapter}: adapter values: fine: 20 tensors are finite",
        f"{adapter}: base: not measured: {NO_MANIFEST}",
    ]


def test_a_base_that_the_adapter_names_and_that_is_here_is_compared_with_the_manifest(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapter, run)
    base = str(zoo.checkpoint("llama"))
    assert main(["stamp", str(run), "--base", base, "--quant", "nf4"]) == 0
    path = run / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "base_model_name_or_path": base}))
    capsys.readouterr()
    assert main(["doctor", str(run), "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"{run}: no fault found in files, lora_B, adapter values, base"
    assert f"{run}: base: fine: " in out
    assert f"note: the base is {base!r}, which the config of the adapter names" in err
    path.write_text(json.dumps({**config, "base_model_name_or_path": "not/here"}))
    assert main(["doctor", str(run)]) == 0
    assert "give base (--base)" in capsys.readouterr().out


def test_doctor_names_each_fault_with_evidence_and_remedy(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(broken)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert main(["doctor", str(broken), "--verbose"]) == 1
    verbose = capsys.readouterr().out.splitlines()
    assert verbose[: len(lines)] == lines
    assert f"{broken}: adapter values: fault: an adapter is not finite" in verbose
    assert lines[0] == f"{broken}: faults: 1; no fault found in files, lora_B; not measured: 1"
    assert lines[3:5] == ["an adapter is not finite", f"  where: {broken}"]
    assert lines[5].startswith("  evidence: ['base_model.model.model.layers.0.mlp.down_proj.lora_A.weight'")
    assert lines[6].startswith("  remedy: ")


def test_doctor_prints_its_report_as_json(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(broken), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == doctor(broken).to_dict()


def test_doctor_measures_with_a_base_and_an_adapter(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo.load("llama").save_pretrained(tmp_path / "base")
    assert main(["doctor", str(tmp_path / "base")]) == 0
    assert f"how much of the adapter it holds: {GIVE_ADAPTER}" in capsys.readouterr().out
    training.adapt("llama", zoo.load("llama")).merge_and_unload().save_pretrained(tmp_path / "merged")
    options = ["--base", str(tmp_path / "base"), "--adapter", str(adapter)]
    assert main(["doctor", str(tmp_path / "base"), *options]) == 1
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "not a merge: no delta (model.layers.0.mlp.down_proj.weight and 9 more)"
    assert lines[0] == "0.0% of the delta is there, with an error of 100.0% of it; the worst tensors:"
    assert main(["doctor", str(tmp_path / "merged"), *options]) == 1
    assert "% of the delta survived" in capsys.readouterr().out


def test_doctor_says_first_that_a_merge_is_one_by_the_command_that_merge_prints(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, folder = str(zoo.checkpoint("llama")), str(tmp_path / "an out")
    merge = ["merge", base, str(adapter), "--out", folder, "--quant", "nf4"]
    assert main(merge) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    command = shlex.split(last.removeprefix("to check it: "))
    options = ["--base", base, "--adapter", str(adapter)]
    assert command == ["kbitwrap", "doctor", folder, *options, "--quant", "nf4"]
    for measured in (["--json"], ["--check"]):
        assert main([*merge, "--overwrite", *measured]) == 0
        assert "to check it" not in capsys.readouterr().out
    assert main(command[1:]) == 0
    first = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
    onto = "added to the base's weights in nf4, as given; nothing records whether it was trained on these"
    assert first == f"a merge: 100.0% of the adapter's delta, {onto}"


QUANTS = ["nf4", "nf4-double", "fp4", "fp4-double", "int8"]


@pytest.mark.parametrize("quant", few(QUANTS, ["fp4-double"]))
def test_doctor_finds_the_quantization_that_nothing_records_and_says_so(
    quant: str, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(zoo.checkpoint("llama"))
    options = ["--base", base, "--adapter", str(adapter)]
    assert main(["merge", base, str(adapter), "--out", str(tmp_path / "out"), "--quant", quant]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "out"), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    taken = f"in {quant}, which the checkpoint fits"
    onto = f"added to the base's weights {taken}; nothing records whether it was trained on these"
    assert said.startswith(f"a merge: 100.0% of the adapter's delta, {onto}")
    assert f"nothing records the base's quantization, so its weights were taken {taken}; give the quantization" in said


def test_an_adapter_on_embeddings_alone_fits_a_quantization_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = str(zoo.checkpoint("llama")), str(tmp_path / "adapter")
    config = LoraConfig(target_modules=["embed_tokens"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(zoo.load("llama"), config).save_pretrained(adapter, save_embedding_layers=False)
    assert main(["merge", base, adapter, "--out", str(tmp_path / "out"), "--quant", "nf4"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "out"), "--base", base, "--adapter", adapter]) == 0
    assert "in nf4, which the checkpoint fits" in " ".join(capsys.readouterr().out.split())


def test_doctor_does_not_say_that_an_adapter_was_trained_on_a_base_that_nothing_records(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(zoo.checkpoint("llama"))
    options = ["--base", base, "--adapter", str(adapter)]
    assert main(["merge", base, str(adapter), "--out", str(tmp_path / "out"), "--quant", "none"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(tmp_path / "out"), *options]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    onto = "added to the base's weights as they are; nothing records whether it was trained on these"
    assert first == f"a merge: 100.0% of the adapter's delta, {onto}"
    assert main(["doctor", base, *options]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("not a merge onto the base's weights as they are: ")


# ----------------------------------------------------------------------------------------------------
# A merge of which not all is given.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, an adapter that names it, and their merge."""
    folder = tmp_path_factory.mktemp("run")
    base: Any = zoo.load("llama", quant=None)
    base.save_pretrained(folder / "base")
    adapted = training.adapt("llama", base)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    assert main(["merge", str(folder / "adapter"), "--out", str(folder / "merged"), "--quant", "nf4"]) == 0
    return folder


def name_base(run: Path, folder: Path, name: str | None) -> Path:
    """A copy of the adapter whose config names another base."""
    shutil.copytree(run / "adapter", folder)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = name
    path.write_text(json.dumps(config))
    return folder


def test_doctor_takes_the_base_that_the_adapter_names_and_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run / "merged"), "--adapter", str(run / "adapter")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("a merge: 100.0% of the adapter's delta")
    named = f"the base is {str(run / 'base')!r}, which the config of the adapter names"
    assert err == f"kbitwrap: note: {named}\n"
    with contextlib.redirect_stdout(io.StringIO()) as both, contextlib.redirect_stderr(both):
        main(["doctor", str(run / "merged"), "--adapter", str(run / "adapter")])
    assert both.getvalue() == out + err  # the verdict comes first
    assert main(["doctor", str(run / "merged"), "--adapter", str(run / "adapter"), "--base", ""]) == 2
    assert capsys.readouterr().err.startswith("kbitwrap: error: expected a folder")


def test_an_adapter_that_names_no_base_needs_one(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = name_base(run, tmp_path / "adapter", None)
    assert main(["doctor", str(run / "merged"), "--adapter", str(adapter)]) == 2
    named = "does not name its base (base_model_name_or_path): give the base that was trained on"
    said = f"the config of the adapter in {str(adapter)!r} {named}"
    assert capsys.readouterr() == ("", f"kbitwrap: error: {said}\n")
    assert main(["doctor", str(run / "merged"), "--adapter", str(adapter), "--base", str(run / "base")]) == 0
    assert "note" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "merge", "stamp"])
def test_a_base_that_only_the_adapter_names_and_that_is_nowhere_is_named(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = name_base(run, tmp_path / "adapter", "/home/someone/base")
    arguments = {
        "doctor": ["doctor", str(run / "merged"), "--adapter", str(adapter)],
        "merge": ["merge", str(adapter), "--out", str(tmp_path / "out"), "--quant", "nf4"],
        "stamp": ["stamp", str(adapter), "--quant", "nf4"],
    }
    assert main(arguments[command]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    how = "give the base that is here: --base DIR, or for merge DIR before the adapter"
    remedy = f"the config of the adapter names this base: {how}"
    assert err.splitlines()[-1] == f"kbitwrap: error: there is no model at '/home/someone/base'; {remedy}"


@pytest.mark.parametrize("with_base", [False, True])
def test_the_first_lines_say_that_a_merge_was_not_measured(
    with_base: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = run / "merged"
    options = ["--base", str(run / "base")] if with_base else []
    assert main(["doctor", str(merged), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        f"{merged}: no fault found in files, dtypes; not measured: 1",
        f"not measured: whether it is a merge, and how much of the adapter it holds: {GIVE_ADAPTER}",
        "",
    ]
    assert not any("kbitwrap.json" in line for line in lines)
    report = doctor(merged, adapter=run / "adapter")
    assert report.merge is None
    assert "not measured: 1" in str(report).splitlines()[0]


def test_a_folder_that_is_compared_with_the_dequantized_base_is_not_asked_for_an_adapter(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, base = tmp_path / "served", str(run / "base")
    assert main(["merge", base, "--no-adapter", "--out", str(served), "--quant", "nf4"]) == 0
    capsys.readouterr()
    assert main(["doctor", str(served), "--base", base, "--quant", "nf4"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{served}: no fault found in files, dtypes, dequantized base",
        "",
    ]
    assert main(["doctor", str(run / "merged"), "--base", base, "--quant", "nf4"]) == 1
    assert "if an adapter was merged into it, give that (adapter, --adapter)" in capsys.readouterr().out


def test_a_quantization_without_a_base_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(run / "merged"), "--quant", "nf4"]) == 2
    said = "--quant says how a base was quantized: give --adapter, or --base"
    assert capsys.readouterr() == ("", f"kbitwrap: error: {said}\n")


# ----------------------------------------------------------------------------------------------------
# What cannot be examined.
# ----------------------------------------------------------------------------------------------------


NO_ADAPTER = "there is no adapter_config.json with adapter_model.safetensors in"
WRONG = {
    "--base base --adapter merged": (
        f"{NO_ADAPTER} '{{}}/merged': it holds a model, and not what PEFT saves of an adapter"
    ),
    "--base adapter --adapter adapter": "there is no config.json in '{}/adapter'",
    "--base base --adapter adapter/adapter_model.safetensors": f"{NO_ADAPTER} '{{}}/adapter/adapter_model.safetensors'",
    "--base base/model.safetensors --adapter adapter": (
        "cannot load a model from the file '{}/base/model.safetensors': give its folder"
    ),
}


@pytest.mark.parametrize("options", WRONG)
def test_folders_that_were_exchanged_are_told(options: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = [str(run / word) for word in options.split() if not word.startswith("--")]
    said = f"kbitwrap: error: {WRONG[options].replace('{}', str(run))}\n"
    assert main(["doctor", str(run / "merged"), "--base", base, "--adapter", adapter]) == 2
    assert capsys.readouterr() == ("", said)
    assert main(["merge", base, adapter, "--out", str(run / "out"), "--quant", "nf4"]) == 2
    assert capsys.readouterr() == ("", said)


def test_an_adapter_in_place_of_the_merged_folder_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(run / "adapter"), "--adapter", str(run / "adapter")]) == 2
    said = f"{str(run / 'adapter')!r} holds an adapter: with --adapter, PATH is the folder of the merged model"
    assert capsys.readouterr() == ("", f"kbitwrap: error: {said}\n")


def test_files_that_no_model_is_loaded_from_are_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    file, folder = tmp_path / "model.gguf", tmp_path
    said = {
        file: f"{str(file)!r}: expected a folder, or a .safetensors or .bin file",
        folder: f"{str(folder)!r}: expected a checkpoint, an adapter or a Trainer's output, found no .safetensors or "
        ".bin file with weights",
    }
    for path, message in said.items():
        assert main(["doctor", str(path)]) == 2
        assert capsys.readouterr() == ("", f"kbitwrap: error: {message}\n")
    shutil.copy(run / "base" / "config.json", folder)
    options = ["--base", str(folder), "--adapter", str(run / "adapter")]
    assert main(["doctor", str(run / "merged"), *options]) == 2
    no_weights = f"cannot load a model from {str(folder)!r}: there is no .safetensors or .bin file with weights in it"
    assert capsys.readouterr() == ("", f"kbitwrap: error: {no_weights}\n")
    config = str(run / "base" / "config.json")
    assert main(["doctor", str(run / "merged"), "--base", config, "--adapter", str(run / "adapter")]) == 2
    of_a_file = f"cannot load a model from the file {config!r}: give its folder"
    assert capsys.readouterr() == ("", f"kbitwrap: error: {of_a_file}\n")


@pytest.mark.parametrize("options", [[], ["--base", "absent", "--adapter", "absent"]])
def test_doctor_of_what_is_not_there_is_bad_input(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options:
        zoo.load("llama").save_pretrained(tmp_path)
    assert main(["doctor", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kbitwrap: error: ")
    assert error.count("\n") == 1
