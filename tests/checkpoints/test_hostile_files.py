"""Files that were made to harm: pipes, devices, links to elsewhere, and configs of models that no memory holds."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from campaign import files
from kbitwrap import (
    ConfigError,
    ExportError,
    Manifest,
    ManifestError,
    Plan,
    convert_checkpoint,
    doctor,
    merge_checkpoint,
    stamp_adapter,
)
from kbitwrap.checkpoints.inspection import inspect_checkpoint

SEED = 17


@pytest.mark.thorough
@pytest.mark.parametrize("num_files", [500, 3_000])
def test_damaged_files_are_refused_or_harmless(num_files: int) -> None:
    assert [line for violations in files.trials(SEED, num_files) for line in violations] == []


# ----------------------------------------------------------------------------------------------------
# What lies in a file's place.
# ----------------------------------------------------------------------------------------------------


def test_a_pipe_or_a_device_is_no_manifest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ManifestError, match="not a file"):
            Manifest.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "optimizer.pt"])
def test_a_pipe_in_the_place_of_tensors_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    for examine in (inspect_checkpoint, doctor):
        with pytest.raises(ConfigError):
            examine(tmp_path)


# ----------------------------------------------------------------------------------------------------
# Links.
# ----------------------------------------------------------------------------------------------------


def checkpoint_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file({"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("at", ["notes.txt", "sub/notes.txt", "linked"])
def test_what_a_link_leads_to_elsewhere_is_not_copied(at: str, tmp_path: Path) -> None:
    source = checkpoint_in(tmp_path / "model")
    (source / "sub").mkdir()
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (source / at).symlink_to(tmp_path / "private" / ("" if at == "linked" else "key"))
    with pytest.raises(ConfigError, match="leads out of the checkpoint"):
        convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_links_to_itself_is_not_followed(tmp_path: Path) -> None:
    source = checkpoint_in(tmp_path / "model")
    (source / "sub").mkdir()
    for name in "ab":
        (source / "sub" / name).symlink_to(source / "sub")
    with pytest.raises(ConfigError, match="links to a folder"):
        convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")


def test_links_within_the_folder_and_into_the_cache_of_the_hub_are_copied(tmp_path: Path) -> None:
    source = checkpoint_in(tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "4567").write_text("{}")
    (source / "tokenizer.json").symlink_to("../../blobs/4567")
    (source / "vocab.json").symlink_to("tokenizer.json")
    convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    for name in ("tokenizer.json", "vocab.json"):
        assert (tmp_path / "out" / name).read_text() == "{}"
        assert not (tmp_path / "out" / name).is_symlink()


# ----------------------------------------------------------------------------------------------------
# Models that no memory holds.
# ----------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Any:
    """A process that gets half a gibibyte more, and no more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 29), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def base_in(folder: Path, **changed: Any) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**files.CONFIG)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


def _merge(base: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**files.CONFIG))
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(base / "adapter")
    merge_checkpoint(base, base / "adapter", f"{base}-merged", quantization_config=False)


@pytest.mark.parametrize("read", [Plan.for_pretrained, _merge])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels"])
def test_a_config_that_counts_millions_is_refused_at_once(
    key: str, read: Callable[[Path], Any], tmp_path: Path, little_memory: None
) -> None:
    for count in (10**7, 10**12):
        with pytest.raises(ConfigError, match=f"'{key}' is {count}"):
            read(base_in(tmp_path / str(count), **{key: count}))


def test_a_model_of_more_modules_than_any_has_is_not_built_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kbitwrap.model.pretrained._MAX_MODULES", 1_000)
    with pytest.raises(ConfigError, match="more than 1,000 modules"):
        Plan.for_pretrained(base_in(tmp_path, num_hidden_layers=90_000))


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size"])
def test_a_base_whose_config_is_larger_than_its_files_is_not_allocated(
    key: str, tmp_path: Path, little_memory: None
) -> None:
    with pytest.raises(ConfigError, match="one of them is of another model"):
        _merge(base_in(tmp_path, **{key: 10**9}))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("r", 10**9, f"a rank of {10**9}"),
        ("base_model_name_or_path", 7, "base_model_name_or_path: expected a name or a path, found 7"),
    ],
)
def test_an_adapter_that_is_larger_than_its_tensors_or_says_no_values_is_refused(
    key: str, value: object, why: str, tmp_path: Path, little_memory: None
) -> None:
    base = base_in(tmp_path)
    _merge(base)
    path = base / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=why):
        merge_checkpoint(base, base / "adapter", base / "again", quantization_config=False)


def test_a_path_that_is_too_long_is_refused_as_one_where_nothing_is(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 256)
    base = base_in(tmp_path / "base")
    calls: list[Callable[[], Any]] = [
        lambda: doctor(long),
        lambda: merge_checkpoint(base, long, tmp_path / "out", quantization_config=False),
        lambda: merge_checkpoint(base, None, long, quantization_config=False),
        lambda: merge_checkpoint(long, None, tmp_path / "out", quantization_config=False),
        lambda: convert_checkpoint(base, tmp_path / "out", like=long),
        lambda: convert_checkpoint(base, tmp_path / "out", long),
        lambda: stamp_adapter(long, base),
        lambda: inspect_checkpoint(long),
        lambda: Plan.for_pretrained(long),
    ]
    for call in calls:
        with pytest.raises((ConfigError, ExportError, ManifestError)):
            call()
