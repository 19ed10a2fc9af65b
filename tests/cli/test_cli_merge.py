"""`kbitwrap merge` and `kbitwrap stamp`: what is said to a first-time user, in notes and in errors of one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from kbitwrap import KbitPreparedModel
from kbitwrap.checkpoints import base as checkpoints_base
from kbitwrap.cli import console, main
from support import training, zoo

MERGE = ("--quant", "nf4-double", "--dtype", "bfloat16", "--device", "cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases") / "base"
    shutil.copytree(zoo.checkpoint("llama"), folder)
    return folder


@pytest.fixture(scope="module")
def recorded(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that names its base, with the manifest of its run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    with KbitPreparedModel(zoo.load("llama", "nf4-double")) as prepared:
        peft_model = training.adapt("llama", prepared.model)
        peft_model.peft_config["default"].base_model_name_or_path = str(base)
        peft_model.save_pretrained(folder)
        prepared.manifest().save(folder / "kbitwrap.json")
        peft_model.unload()
    return folder


@pytest.fixture
def adapter(recorded: Path, tmp_path: Path) -> Path:
    """The same adapter without the manifest."""
    folder = tmp_path / "adapter"
    shutil.copytree(recorded, folder)
    (folder / "kbitwrap.json").unlink()
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def name_base(adapter: Path, name: str) -> None:
    """Write another name of the base into an adapter's config."""
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = name
    path.write_text(json.dumps(config))


def other_base(folder: Path) -> Path:
    """A base of the same shape with other weights."""
    model: Any = LlamaForCausalLM.from_pretrained(zoo.checkpoint("llama"))
    for parameter in model.parameters():
        parameter.data += 0.01
    model.save_pretrained(folder)
    return folder


# ----------------------------------------------------------------------------------------------------
# The base
# ----------------------------------------------------------------------------------------------------


def test_a_base_that_the_adapter_does_not_name_is_noted(
    adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name_base(adapter, "someone/base")
    other = other_base(tmp_path / "other")
    status, out, err = run(capsys, "merge", other, adapter, "--out", tmp_path / "out", *MERGE, "--json")
    assert status == 0
    note = f"the adapter names 'someone/base' as its base; what was merged is {str(other)!r}"
    assert f"kbitwrap: note: {note}" in err
    (found,) = json.loads(out)["notes"]
    assert found.startswith(note)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in card  # a folder is no name on the hub
    assert "# other, merged\n\nThe weights of the base, other, " in card


@pytest.mark.parametrize("named", ["itself", "a link to it", "someone/base", "a snapshot in the cache of the hub"])
def test_a_base_of_the_name_that_the_adapter_has_is_not_noted(
    named: str, base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(base)
    snapshot = tmp_path / "models--someone--base" / "snapshots" / "0123"
    names = {"itself": base, "a link to it": link, "a snapshot in the cache of the hub": snapshot}
    name_base(adapter, str(names.get(named, named)))
    status, out, err = run(capsys, "merge", base, adapter, "--out", tmp_path / "out", *MERGE, "--json")
    assert (status, json.loads(out)["notes"]) == (0, [])
    assert "the adapter names" not in err


def test_a_base_that_the_manifest_proves_is_not_noted(
    base: Path, recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(base, other)
    assert run(capsys, "merge", other, recorded, "--out", tmp_path / "out", "--device", "cpu")[::2] == (0, "")
    assert "# base, merged\n" in (tmp_path / "out" / "README.md").read_text()


def test_a_base_that_the_adapter_names_and_that_is_not_here_is_asked_for(
    adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name_base(adapter, "some/folder")
    status, _, err = run(capsys, "merge", adapter, "--out", tmp_path / "out", *MERGE)
    assert status == 2
    assert "'some/folder': it is no folder here, and no model of that name is in the cache or on the hub" in err
    remedy = "give the base that is here: --base DIR, or for merge DIR before the adapter"
    assert f"the config of the adapter names this base: {remedy}" in err
    assert remedy in run(capsys, "stamp", adapter)[2]
    absent = tmp_path / "absent"
    _, _, err = run(capsys, "merge", absent, "--out", tmp_path / "out")
    assert f"in {str(absent)!r}: there is no such folder\n" in err


def test_base_and_adapter_in_the_wrong_order_are_refused(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = run(capsys, "merge", adapter, base, "--out", tmp_path / "out", *MERGE)
    assert (status, "the order is BASE ADAPTER" in err) == (2, True)


def test_an_adapter_in_place_of_the_model_to_plan_is_told_with_its_base(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ([], ["--step"]):
        status, out, err = run(capsys, "plan", adapter, *options)
        assert (status, out) == (2, "")
        assert err == f"kbitwrap: error: {str(adapter)!r} holds an adapter: plan its base, {str(base)!r}\n"


def test_a_merge_is_no_base_of_the_adapter_in_it_and_doctor_tells_what_was_merged_twice(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert run(capsys, "merge", base, adapter, "--out", once, *MERGE)[0] == 0
    for folder in (adapter, shutil.copytree(adapter, tmp_path / "renamed")):
        status, _, err = run(capsys, "merge", once, folder, "--out", twice, *MERGE)
        assert status == 2
        assert (
            f"{str(once)!r} is a merge of the adapter {folder.name!r} already, whose name or SHA-256 its README.md has"
            in err
        )
        assert str(base) in err

    # an adapter that was trained on that merge, and has the name of the first
    name_base(adapter, str(once))
    assert run(capsys, "merge", once, adapter, "--out", twice, *MERGE)[0] == 0
    status, out, _ = run(capsys, "doctor", twice, "--base", base, "--adapter", adapter, "--quant", "nf4-double")
    assert status == 1
    assert "the delta is doubled: merged twice, or by a wrong scale" in out.splitlines()[0]


def test_another_base_than_the_recorded_one_is_named(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = other_base(tmp_path / "other")
    status, _, err = run(capsys, "merge", other, recorded, "--out", tmp_path / "out", "--device", "cpu")
    assert status == 1
    assert (
        f"is not the base that the run recorded, LlamaForCausalLM from {str(zoo.checkpoint('llama'))!r}: load that one."
        in err
    )


# ----------------------------------------------------------------------------------------------------
# Warnings
# ----------------------------------------------------------------------------------------------------


def test_what_the_library_warns_of_is_a_note_in_the_words_of_the_command_line(
    base: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = training.adapt("llama", zoo.load("llama", "nf4-double"), target_modules="all-linear")
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    options = (*MERGE, "--as", "mixed", "--json")
    status, out, err = run(capsys, "merge", base, tmp_path / "adapter", "--out", tmp_path / "out", *options)
    assert status == 0
    lines = err.splitlines()
    assert all(line.startswith("kbitwrap: note: ") for line in lines)
    assert "an adapter touches every quantized layer" in lines[0]
    assert lines[0].endswith("; --as quantized keeps the size of the base")
    assert lines[:1] == [f"kbitwrap: note: {note}" for note in json.loads(out)["notes"]]


# ----------------------------------------------------------------------------------------------------
# The destination
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", "exists and is not empty; choose another folder, or replace this one (overwrite=True, --overwrite)"),
        ("file", "expected a folder or nothing, found a file; nothing was written"),
        ("file/new", "cannot be written: File exists"),
    ],
)
def test_a_destination_that_cannot_be_made_is_refused_before_the_base_is_loaded(
    name: str,
    said: str,
    base: Path,
    recorded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints_base, "load_pretrained", lambda *_: 1 / 0)
    (tmp_path / "file").touch()
    status, out, err = run(capsys, "merge", base, recorded, "--out", tmp_path / name)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err


# ----------------------------------------------------------------------------------------------------
# The quantization in training
# ----------------------------------------------------------------------------------------------------


def test_a_merge_without_a_record_says_which_value_is_which_config(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, err = run(capsys, "merge", adapter, "--out", tmp_path / "out", "--device", "cpu")
    assert (status, err.count("\n")) == (2, 1)
    assert f"it is not known how the base {str(base)!r} was quantized in training" in err
    assert err.endswith(f"or the quantization (--quant; 'none' for none). {console.QUANT_BY_CONFIG}\n")


def test_a_stamp_is_refused_where_nothing_says_how_the_base_was_quantized(
    base: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}  # of another library: it says nothing of it
    for content in (None, {}, config):
        if content is not None:
            (adapter / "config.json").write_text(json.dumps({"model_type": "llama", **content}))
        status, out, err = run(capsys, "stamp", adapter, "--device", "cpu")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"it is not known how the base {str(base)!r} was quantized in training" in err
        assert console.QUANT_BY_CONFIG in err
        assert not (adapter / "kbitwrap.json").exists()


@pytest.mark.parametrize("quant", ["none", "nf4-double"])
def test_a_stamp_is_made_as_it_is_told_and_says_how_it_is_replaced(
    quant: str, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("stamp", adapter, "--quant", quant, "--device", "cpu")
    status, out, err = run(capsys, *arguments)
    assert status == 0
    assert "tensors of the base" in out
    assert "how the base was quantized" not in err
    assert err == f"kbitwrap: note: --quant {quant} was taken at its word; merge and doctor go by it now\n"
    status, _, err = run(capsys, *arguments)
    assert (status, err.count("\n")) == (2, 1)
    path = adapter / "kbitwrap.json"
    assert f"{path}: the run has its manifest; it is not replaced. Delete this file to stamp again" in err
    path.unlink()
    assert run(capsys, *arguments)[0] == 0


@pytest.mark.parametrize("quant", ["nf4", "fp4", "fp4-double", "int8", "none"])
def test_another_quantization_than_the_manifest_records_is_told_before_anything_is_loaded(
    quant: str,
    recorded: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("the base was loaded")

    monkeypatch.setattr(checkpoints_base, "load_pretrained", load)
    out = tmp_path / "out"
    status, _, err = run(capsys, "merge", recorded, "--out", out, "--quant", quant, "--device", "cpu")
    assert (status, err) == (
        1,
        "kbitwrap: the manifest records nf4-double as the quantization of the base in training, and "
        f"{quant} was given\n",
    )
    assert not out.exists()


def test_the_quantization_that_the_manifest_records_may_be_given(
    recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--quant", "nf4-double", "--device", "cpu")
    assert run(capsys, "merge", recorded, "--out", tmp_path / "out", *options)[::2] == (0, "")
