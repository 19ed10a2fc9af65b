"""Adapters and bases by their names on the hub, from its cache; and a merge that is uploaded."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from kbitwrap import KbitPreparedModel
from kbitwrap.cli import console, main
from support import training, zoo
from support.merging import assert_same_model

QUANT = ("--quant", "nf4-double", "--dtype", "bfloat16", "--device", "cpu")
BASE, ADAPTER = "someone/Base", "someone/Adapter"


def in_cache(cache: Path, name: str) -> Path:
    """The folder of a snapshot in the layout of the hub's cache."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123")
    return folder / "snapshots" / "0123"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a base, an adapter that names it, and a second one with the manifest of its run."""
    cache = tmp_path_factory.mktemp("hub")
    shutil.copytree(zoo.checkpoint("llama"), in_cache(cache, BASE))
    with KbitPreparedModel(zoo.load("llama", "nf4-double")) as prepared:
        peft_model = training.adapt("llama", prepared.model)
        peft_model.peft_config["default"].base_model_name_or_path = BASE
        for name in (ADAPTER, f"{ADAPTER}-Recorded"):
            # the head was not trained; PEFT would look for the base
            peft_model.save_pretrained(in_cache(cache, name), save_embedding_layers=False)
        recorded = cache / "models--someone--Adapter-Recorded" / "snapshots" / "0123" / "kbitwrap.json"
        recorded.write_text(prepared.manifest().to_json())
        peft_model.unload()
    return cache


@pytest.fixture(autouse=True)
def from_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_names_on_the_hub_stand_for_folders(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = cache / "models--someone--Adapter" / "snapshots" / "0123"
    assert run(capsys, "merge", snapshot, "--out", tmp_path / "folder", *QUANT)[0] == 0
    for number, given in enumerate([(ADAPTER,), (BASE, ADAPTER), (f"{ADAPTER}-Recorded",)]):
        options = ("--device", "cpu") if "Recorded" in given[-1] else QUANT
        status, _, err = run(capsys, "merge", *given, "--out", tmp_path / str(number), "--check", *options)
        assert status == 0, err
        assert_same_model(tmp_path / str(number), tmp_path / "folder")
        card = (tmp_path / str(number) / "README.md").read_text()
        assert f'base_model: "{BASE}"' in card
        assert f"adapter `{given[-1].partition('/')[2]}` was added" in card
    options = ("--adapter", ADAPTER, "--quant", "nf4-double")
    status, out, err = run(capsys, "doctor", tmp_path / "folder", *options)
    assert (status, "no fault found" in out) == (0, True), err


def test_nothing_is_written_into_the_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "stamp", ADAPTER, *QUANT)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "is the hub's cache" in err


@pytest.mark.parametrize("is_offline", [False, True])
@pytest.mark.parametrize(
    "arguments", [["merge", "someone/None"], ["merge", "someone/None", ADAPTER], ["plan", "someone/None"]], ids=" ".join
)
def test_a_name_that_is_mistyped_is_one_line_at_once(
    arguments: list[str],
    is_offline: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits for {seconds} s"))
    options = () if arguments[0] == "plan" else ("--out", tmp_path / "out", *QUANT)
    status, out, err = run(capsys, *arguments, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "'someone/None'" in err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """The calls of the hub that write, none of which is made."""
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(HfApi, "create_repo", lambda self, name, **given: calls.append((name, given)))

    def upload(self: HfApi, *, repo_id: str, folder_path: Any, **given: Any) -> str:
        calls.append((repo_id, {"files": sorted(path.name for path in Path(folder_path).iterdir())}))
        return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(HfApi, "upload_folder", upload)
    return calls


def test_a_merge_is_uploaded_after_it_is_written(
    uploads: list[tuple[str, dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status, printed, err = run(capsys, "merge", ADAPTER, "--out", out, "--push-to-hub", "me/merged", "--json", *QUANT)
    assert status == 0
    assert json.loads(printed)["path"] == str(out)
    assert "nothing records how the base was quantized, so --quant nf4-double was taken at its word" in err
    assert err.endswith("kbitwrap: uploaded: https://huggingface.co/me/merged\n")
    assert uploads == [
        ("me/merged", {"exist_ok": True}),
        ("me/merged", {"files": sorted(path.name for path in out.iterdir())}),
    ]


@pytest.mark.parametrize("name", ["", "a/b/c", "me/--merged", "me/merged.git"])
def test_a_name_that_no_repository_can_have_is_refused_before_the_merge(
    name: str, uploads: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "merge", ADAPTER, "--out", tmp_path / "out", "--push-to-hub", name, *QUANT)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "--push-to-hub" in err
    assert f"'{name}'" in err
    assert uploads == []
    assert not (tmp_path / "out").exists()


def test_an_upload_that_fails_leaves_the_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("403 Forbidden")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    status, _, err = run(capsys, "merge", ADAPTER, "--out", tmp_path / "out", "--push-to-hub", "me/merged", *QUANT)
    assert status == 2
    assert f"{tmp_path / 'out'} is written, and was not uploaded to 'me/merged': 403 Forbidden" in err
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("command", ["merge", "stamp", "doctor", "plan"])
def test_help_tells_the_kinds_of_quantization_by_the_lines_of_a_script(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run(capsys, command, "--help")
    shown = "".join(out.replace("│", " ").split())
    assert "".join(console.QUANT_BY_CONFIG.split()) in shown
