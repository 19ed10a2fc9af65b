"""Where a checkpoint may be written, and what overwriting replaces: nothing of a source, and no file of others."""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from kbitwrap import ConfigError, ExportError, KbitPreparedModel, convert_checkpoint, merge_checkpoint
from kbitwrap.checkpoints.merge import _CARD
from kbitwrap.cli import main
from kbitwrap.export import staging as staging_module
from kbitwrap.export.staging import atomic_write, staged
from kbitwrap.export.writer import checkpoint_writer
from support import zoo
from support.files import read
from support.training import adapt

UNQUANTIZED = "ignore:.* has neither a quantization attribute:UserWarning"


def write(destination: Path, *sources: Path | str) -> None:
    """Overwrite as the writers of checkpoints do."""
    writing = checkpoint_writer(destination, "test", overwrite=True, progress=False, sources=sources)
    with writing as writer:
        (writer.folder / "config.json").write_text("new")
        (writer.folder / "model.safetensors").write_text("new")


NEW = {"config.json": b"new", "model.safetensors": b"new"}

# ----------------------------------------------------------------------------------------------------
# Sources.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("destination", "source"),
    [
        ("run", "run"),
        ("run/x/../../run", "run"),
        ("link", "run"),
        ("run", "link"),
        ("run", "run/kbitwrap.json"),  # holds the manifest
        (".", "run"),
        ("run/..", "run"),
        ("run/merged", "run"),
        ("link/deep/merged", "run"),
        ("elsewhere", "linked"),  # a file of the source is a link to one of the destination's
    ],
)
def test_a_destination_that_is_holds_or_lies_in_a_source_is_refused(
    destination: str, source: str, tmp_path: Path
) -> None:
    for name in ("run", "run/x", "elsewhere", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "kbitwrap.json").write_text("{}")
    (tmp_path / "elsewhere" / "model.safetensors").write_text("weights")
    (tmp_path / "linked" / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "model.safetensors")
    (tmp_path / "link").symlink_to("run")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ExportError, match=f"is, holds or lies in '{tmp_path / source}', which is read; nothing was"):
        write(tmp_path / destination, "a/name/on-the-hub", "", tmp_path / "absent", tmp_path / source)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_destination_beside_its_sources_is_written(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "kbitwrap.json").write_text("{}")
    write(tmp_path / "out", tmp_path / "run", tmp_path / "kbitwrap.json")
    write(tmp_path / "run-2", tmp_path / "run", tmp_path / "out", "out")
    assert read(tmp_path / "out") == read(tmp_path / "run-2") == NEW


def test_merging_over_the_adapter_or_the_base_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = zoo.load("llama", None)
    model.save_pretrained(tmp_path / "base")
    adapt("llama", model).save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "kbitwrap.json").write_text("{}")
    before = read(tmp_path / "base"), read(tmp_path / "run")
    for out in ("run", "base", "."):
        options = ["--out", str(tmp_path / out), "--overwrite", "--quant", "none"]
        assert main(["merge", str(tmp_path / "base"), str(tmp_path / "run"), *options]) == 2
        assert "is, holds or lies in" in capsys.readouterr().err
        with pytest.raises(ExportError, match="is, holds or lies in"):
            merge_checkpoint(
                tmp_path / "base", tmp_path / "run", tmp_path / out, quantization_config=False, overwrite=True
            )
    assert before == (read(tmp_path / "base"), read(tmp_path / "run"))
    (tmp_path / "run" / "kbitwrap.json").unlink()
    options = ["--out", str(tmp_path / "out"), "--as", "quantized", "--quant", "none"]
    assert main(["merge", str(tmp_path / "base"), str(tmp_path / "run"), *options]) == 2
    assert "--as: 'quantized' is for layers of bitsandbytes" in capsys.readouterr().err


@pytest.mark.parametrize("out", ["snapshots/0123", "snapshots/0123/out", "snapshots/4567", "blobs", "blobs/out", "."])
def test_nothing_is_written_inside_a_cache_of_the_hub(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    cache = hub / "models--someone--Tiny"
    for name in ("blobs", "refs"):
        (cache / name).mkdir(parents=True)
    (cache / "refs" / "main").write_text("0123")
    zoo.load("llama", None).save_pretrained(cache / "snapshots" / "0123")  # files, as where no links can be made
    (tmp_path / "linked").symlink_to(cache)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    before = read(cache / "snapshots" / "0123")
    for folder in (cache, tmp_path / "linked"):
        with pytest.raises(ExportError, match="is the hub's cache"):
            merge_checkpoint("someone/Tiny", None, folder / out, quantization_config=False, overwrite=True)
    with pytest.raises(ExportError, match="is the hub's cache"):
        merge_checkpoint("someone/Tiny", None, hub / "merged", quantization_config=False)
    with pytest.raises(ExportError, match="is the hub's cache"):
        atomic_write(cache / out / "kbitwrap.json", b"{}", lambda path: True)
    assert read(cache / "snapshots" / "0123") == before
    assert sorted(os.listdir(cache)) == ["blobs", "refs", "snapshots"]
    assert os.listdir(cache / "snapshots") == ["0123"]
    merge_checkpoint("someone/Tiny", None, tmp_path / "merged", quantization_config=False)


@pytest.mark.filterwarnings(UNQUANTIZED)
def test_an_export_over_what_the_model_or_its_tokenizer_was_loaded_from_is_refused(tmp_path: Path) -> None:
    zoo.load("llama", None).save_pretrained(tmp_path / "base")
    model = zoo.load("llama").from_pretrained(tmp_path / "base")
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    before = read(tmp_path / "base"), read(tmp_path / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    with KbitPreparedModel(model, gradient_checkpointing=False) as prepared:
        for out in ("base", "tokenizer", "tokenizer/out"):
            with pytest.raises(ExportError, match="is, holds or lies in"):
                prepared.export(tmp_path / out, processing_class=tokenizer, overwrite=True)
        prepared.export(tmp_path / "out", processing_class=tokenizer)
    assert before == (read(tmp_path / "base"), read(tmp_path / "tokenizer"))


@pytest.mark.parametrize("out", ["prepared", "prepared/out", ".", "like", "like/out"])
def test_converting_over_what_is_read_is_refused(out: str, tmp_path: Path) -> None:
    for name, dtype in (("prepared", torch.float32), ("like", torch.bfloat16)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.ones(8, dtype=dtype)}, tmp_path / name / "model.safetensors")
    with pytest.raises(ExportError, match="is, holds or lies in"):
        convert_checkpoint(tmp_path / "prepared", tmp_path / out, like=tmp_path / "like", overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["like", *["model.safetensors"] * 2, "prepared"]


# ----------------------------------------------------------------------------------------------------
# What overwriting replaces.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("model.safetensors", "model-00002-of-00003.safetensors", "model.safetensors.index.json", "config.json"),
        *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
        *("generation_config.json", "tokenizer.json", "vocab.txt", "chat_template.jinja", "preprocessor_config.json"),
    ],
)
def test_the_files_of_a_checkpoint_are_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("old")
    write(tmp_path / "out")
    assert read(tmp_path / "out") == NEW


@pytest.mark.parametrize(
    "name",
    [
        *("notes.txt", "README.md", "train.py", ".gitattributes", "adapter_model.safetensors", "adapter_config.json"),
        *("kbitwrap.json", "optimizer.pt", "trainer_state.json", "model.safetensors.bak", "other.safetensors"),
        *("checkpoint-500/", "tokenizer.json/", "link"),
    ],
)
def test_a_file_that_no_checkpoint_consists_of_is_named_and_nothing_is_replaced(name: str, tmp_path: Path) -> None:
    write(tmp_path / "out")
    strange = tmp_path / "out" / name
    if name.endswith("/"):
        strange.mkdir()
    elif name == "link":
        strange = tmp_path / "out" / "config.json"
        strange.rename(tmp_path / "elsewhere")  # a config, which is one of a checkpoint's own files
        strange.symlink_to(tmp_path / "elsewhere")
    else:
        strange.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ExportError, match=re.escape(f"consists of: {strange.name!r}; nothing was written: move that")):
        write(tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before
    assert name.endswith("/") or strange.is_symlink() or strange.read_text() == "mine"


def test_of_many_strange_files_the_first_are_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number in range(6):
        (tmp_path / "out" / f"{number}").touch()
    with pytest.raises(ExportError, match="consists of: '0', '1', '2', '3', '4' and 1 more; nothing"):
        write(tmp_path / "out")
    (tmp_path / "out" / "5").unlink()
    with pytest.raises(ExportError, match="consists of: '0', '1', '2', '3', '4'; nothing"):
        write(tmp_path / "out")


def in_new(path: Path) -> bool:
    return path.name in NEW


def test_a_strange_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with pytest.raises(ExportError, match=r"'notes\.txt'"), staged(tmp_path / "out", overwrite=True, owns=in_new):
        (tmp_path / "out" / "notes.txt").write_text("mine")
    assert read(tmp_path / "out") == {**NEW, "notes.txt": b"mine"}


def test_merging_again_replaces_its_model_card_unless_somebody_has_written_in_it(tmp_path: Path) -> None:
    model = zoo.load("llama", None)
    model.save_pretrained(tmp_path / "base")
    adapt("llama", model).save_pretrained(tmp_path / "run")
    merge = functools.partial(
        merge_checkpoint, tmp_path / "base", tmp_path / "run", tmp_path / "out", quantization_config=False
    )
    merge()
    card = tmp_path / "out" / "README.md"
    of_another = _CARD.format(
        **{"base_model": "", "name": "other", "title": "t", "form": "in nf4", "source": "was given", "added": " A."},
        **{"version": "9", "device": "cuda", "notes": ""},
    )
    written = card.read_text()
    card.write_text(of_another)
    merge(overwrite=True)
    assert card.read_text() == written
    card.write_text(written + "\nTried on Monday.\n")
    with pytest.raises(ExportError, match=r"consists of: 'README\.md'"):
        merge(overwrite=True)
    assert card.read_text().endswith("Monday.\n")


def test_converting_again_replaces_what_it_copied_unless_it_was_changed(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    save_file({"a": torch.ones(8)}, source / "other.safetensors")
    (source / "notes.txt").write_text("of the source")
    convert_checkpoint(source, out, dtype="bfloat16")
    expected = read(out)
    convert_checkpoint(source, out, dtype="bfloat16", overwrite=True)
    assert read(out) == expected
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"consists of: 'notes\.txt'"):
        convert_checkpoint(source, out, dtype="bfloat16", overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    save_file({"a": torch.ones(8)}, out / "model.safetensors")
    with pytest.raises(ExportError, match=r"consists of: 'model\.safetensors', 'notes\.txt'"):  # of a whole model
        convert_checkpoint(source / "other.safetensors", out, dtype="bfloat16", overwrite=True)


# ----------------------------------------------------------------------------------------------------
# A tokenizer beside the model, and no adapter in it.
# ----------------------------------------------------------------------------------------------------


def small_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")), unk_token="a")


def test_an_export_writes_the_tokenizer_that_it_is_given(tmp_path: Path) -> None:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        plain = prepared.export(tmp_path / "plain")
        report = prepared.export(tmp_path / "out", processing_class=small_tokenizer())
        assert report.files == tuple(sorted(read(tmp_path / "out")))
        assert {*report.files} - {*plain.files} == {"tokenizer.json", "tokenizer_config.json"}
        prepared.export(tmp_path / "out", processing_class=small_tokenizer(), overwrite=True)
        with pytest.raises(ConfigError, match=r"processing_class: expected a tokenizer, .*, found a str"):
            prepared.export(tmp_path / "none", processing_class="tokenizer")  # a name is not loaded
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert loaded("b")["input_ids"] == [1]
    assert not (tmp_path / "none").exists()


def test_a_merged_export_without_an_active_adapter_is_refused(tmp_path: Path) -> None:
    with KbitPreparedModel(zoo.load("llama")) as prepared:
        refused = pytest.raises(ExportError, match=r"expected an active adapter, found none.*export without merge_adap")
        with refused:
            prepared.export(tmp_path / "out", merge_adapters=True)
        adapted = adapt("llama", prepared.model)
        with refused, adapted.disable_adapter():
            prepared.export(tmp_path / "out", merge_adapters=True, model=adapted)
        assert not (tmp_path / "out").exists()
        assert "layers merged" not in str(prepared.export(tmp_path / "base"))
        assert f", {len(adapted.targeted_module_names)} layers merged" in str(
            prepared.export(tmp_path / "merged", merge_adapters=True)
        )


# ----------------------------------------------------------------------------------------------------
# Places where no folder can take the destination's.
# ----------------------------------------------------------------------------------------------------


def old(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("old")
    (path / "model-00001-of-00002.safetensors").write_text("old")
    return path


def test_the_working_directory_stays_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(old(tmp_path / "out"))
    write(Path())
    assert sorted(os.listdir()) == sorted(NEW)
    write(tmp_path / "out")
    assert sorted(os.listdir()) == sorted(NEW)
    assert os.path.samefile(tmp_path / "out", ".")


def test_a_folder_keeps_its_mode_and_gives_its_group_to_the_files(tmp_path: Path) -> None:
    out = old(tmp_path / "out")
    others = [group for group in (*os.getgroups(), 1234) if group != os.getegid()]
    if os.geteuid() == 0 or len(others) > 1:
        os.chown(out, -1, others[-1] if os.geteuid() == 0 else others[0])
    out.chmod(0o2750)
    before = out.stat()
    write(out)
    after = out.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)
    assert {path.stat().st_gid for path in out.iterdir()} == {before.st_gid}
    out.chmod(0o700)
    write(out)
    assert out.stat().st_mode & 0o7777 == 0o700
    assert read(out) == NEW


def refuse_to_rename_folders(code: int) -> None:
    """Refuse it from here on, but for those that tell how far a writing is."""
    rename = os.rename

    def refuse_folders(source: Path, destination: Path) -> None:
        if Path(source).is_dir() and Path(source).name not in ("old", "replaced"):
            raise OSError(code, os.strerror(code))
        rename(source, destination)

    os.rename = refuse_folders  # type: ignore[assignment]
    staging_module._exchange = lambda first, second: False


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EBUSY, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("make", [old, Path.mkdir, lambda path: None], ids=["old", "empty", "absent"])
def test_where_folders_cannot_be_renamed_their_files_are(
    code: int, make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "out")
    monkeypatch.setattr(os, "rename", os.rename)
    monkeypatch.setattr(staging_module, "_exchange", staging_module._exchange)
    refuse_to_rename_folders(code)
    write(tmp_path / "out")
    assert read(tmp_path / "out") == NEW
    assert os.listdir(tmp_path) == ["out"]


def in_a_folder_of_others(folder: str, user: int | None) -> None:
    """Write as a user who owns only the inner folder, in a process that ends here whatever happens."""
    try:
        if user is not None:
            os.setuid(user)
        write(Path(folder, "theirs", "ours"))
        os._exit(0 if read(Path(folder, "theirs", "ours")) == NEW else 1)
    finally:
        traceback.print_exc()
        os._exit(1)


def test_a_folder_of_ours_in_one_of_others_is_written(tmp_path: Path) -> None:
    # Any user may enter it, which is not said of a folder in TMPDIR.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        theirs = Path(folder, "theirs")
        ours = old(theirs / "ours")
        user = 1234 if os.geteuid() == 0 else None
        if user is not None:
            os.chown(ours, user, -1)
            for path in ours.iterdir():
                os.chown(path, user, -1)
        os.chmod(folder, 0o755)
        theirs.chmod(0o555)
        child = os.fork()
        if child == 0:
            in_a_folder_of_others(folder, user)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        theirs.chmod(0o755)
        assert status == 0
        assert os.listdir(theirs) == ["ours"]


NEW_NAMESPACES = 0x10000000 | 0x00020000  # of users and of mounts: CLONE_NEWUSER and CLONE_NEWNS of sched.h


def in_namespaces() -> bool:
    """Let this process, which is thrown away, mount what it likes; false where it may not."""
    user, group = os.geteuid(), os.getegid()
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(NEW_NAMESPACES):
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return True


def write_where_others_are_mounted(room: Path) -> None:
    def mount(*arguments: object) -> bool:
        return subprocess.run(["mount", *map(str, arguments)], check=False).returncode == 0

    is_mounted = in_namespaces() and mount("-t", "tmpfs", "none", room)
    for name in ("mounted", "real", "bound", "lower", "upper", "work", "overlay"):
        (room / name).mkdir()
    old(room / "lower" / "out")
    (room / "lower" / "empty").mkdir()
    layers = f"lowerdir={room}/lower,upperdir={room}/upper,workdir={room}/work"
    if is_mounted:
        assert mount("-t", "tmpfs", "none", room / "mounted")
        assert mount("--bind", room / "real", room / "bound")
        assert mount("-t", "overlay", "none", "-o", layers, room / "overlay")
    else:  # as the kernel would
        old(room / "overlay" / "out")
        (room / "overlay" / "empty").mkdir()
        refuse_to_rename_folders(errno.EXDEV)
    for place in ("mounted", "bound", "overlay/out", "overlay/empty", "overlay/new"):
        with staged(room / place, overwrite=True, owns=lambda path: True) as folder:
            there = folder.parent if place == "overlay/new" else room / place
            assert folder.stat().st_dev == there.stat().st_dev  # on the disk that is written to
            assert shutil.disk_usage(folder).total == shutil.disk_usage(there).total
            (folder / "config.json").write_text("first")
        write(room / place)
        assert read(room / place) == NEW, place
    assert not is_mounted or read(room / "real") == NEW
    assert not list(room.rglob(".kbitwrap-*"))


def test_a_mount_point_and_a_lower_layer_are_written_into(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            write_where_others_are_mounted(tmp_path)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ----------------------------------------------------------------------------------------------------
# Single files.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings(UNQUANTIZED)
def test_a_manifest_replaces_a_manifest_and_no_other_file(tmp_path: Path) -> None:
    with KbitPreparedModel(torch.nn.LayerNorm(4).bfloat16()) as prepared:
        manifest = prepared.manifest()
    for name, content in (("a.json", ""), ("b.json", manifest.to_json()), ("kbitwrap.json", "cut off")):
        (tmp_path / name).write_text(content)
        manifest.save(tmp_path / name)
        assert json.loads((tmp_path / name).read_text())["format"] == "kbitwrap-manifest"
    for name in ("config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(ExportError, match="a file that a save has written before, found another file"):
            manifest.save(tmp_path / name)
        assert (tmp_path / name).read_text() == "{}"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ExportError, match="found another file"):
        manifest.save(tmp_path / "pipe")
