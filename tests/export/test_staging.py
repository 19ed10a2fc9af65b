"""Files and folders that are there whole or not at all, also after a kill."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kbitwrap import ExportError
from kbitwrap.export import staging as staging_module
from kbitwrap.export.staging import atomic_write, staged
from support import forks
from support.killing import fork


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ----------------------------------------------------------------------------------------------------
# Folders.
# ----------------------------------------------------------------------------------------------------


def is_any(path: Path) -> bool:
    return True


def write_folder(destination: Path, content: str, **options: Any) -> None:
    with staged(destination, **{"owns": is_any, **options}) as folder:
        (folder / "a").write_text(content)
        (folder / "b").write_text(content)


def content_of(destination: Path) -> list[str]:
    return [(destination / name).read_text() for name in names_in(destination)]


def test_a_folder_is_there_when_the_body_ends_and_not_before(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    with staged(destination) as folder:
        (folder / "a").write_text("1")
        assert folder.parent.parent == tmp_path
        assert folder.parent.name.startswith(".")
        assert names_in(tmp_path) == [folder.parent.name]
    assert names_in(tmp_path) == ["out"]
    assert content_of(destination) == ["1"]


def test_a_folder_has_the_mode_of_any_new_folder(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    write_folder(tmp_path / "out", "1")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_parents_are_made_and_removed_again_on_an_error(tmp_path: Path) -> None:
    write_folder(tmp_path / "a" / "b" / "out", "1")
    assert content_of(tmp_path / "a" / "b" / "out") == ["1", "1"]
    with pytest.raises(ZeroDivisionError), staged(tmp_path / "c" / "d" / "out"):
        raise ZeroDivisionError
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_in_the_body_leaves_everything_as_it_was(
    tmp_path: Path, error: type[BaseException], overwrite: bool
) -> None:
    destination = tmp_path / "out"
    if overwrite:
        write_folder(destination, "old")
    before = names_in(tmp_path)

    def fail() -> None:
        with staged(destination, overwrite=overwrite, owns=is_any) as folder:
            (folder / "a").write_text("new")
            raise error

    with pytest.raises(error):
        fail()
    assert names_in(tmp_path) == before
    assert not overwrite or content_of(destination) == ["old", "old"]


def test_an_existing_folder_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", "old")
    with pytest.raises(ExportError, match="exists and is not empty; choose another folder, or"):
        write_folder(tmp_path / "out", "new")
    assert content_of(tmp_path / "out") == ["old", "old"]
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_folder_may_stand_at_the_destination(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", "new", overwrite=overwrite)
    assert content_of(tmp_path / "out") == ["new", "new"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_at_the_destination_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(ExportError, match="expected a folder or nothing, found a file"):
        write_folder(tmp_path / "out", "new", overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "old"


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    destination = tmp_path / "out"

    def write_twice() -> None:
        with staged(destination) as folder:
            (folder / "a").write_text("new")
            write_folder(destination, "theirs")

    with pytest.raises(ExportError, match="exists and is not empty"):
        write_twice()
    assert content_of(destination) == ["theirs", "theirs"]
    assert names_in(tmp_path) == ["out"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_overwriting_replaces_the_whole_folder(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(staging_module, "_exchange", lambda first, second: False)
    write_folder(tmp_path / "out", "old")
    (tmp_path / "out" / "c").write_text("old")
    write_folder(tmp_path / "out", "new", overwrite=True)
    assert content_of(tmp_path / "out") == ["new", "new"]
    assert names_in(tmp_path) == ["out"]


def test_linux_exchanges_folders_in_one_step(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", "a")
    write_folder(tmp_path / "b", "b")
    assert staging_module._exchange(tmp_path / "a", tmp_path / "b")
    assert (content_of(tmp_path / "a"), content_of(tmp_path / "b")) == (["b", "b"], ["a", "a"])
    assert not staging_module._exchange(tmp_path / "a", tmp_path / "none")


@pytest.mark.parametrize("number", range(1, 7))
def test_overwriting_gives_up_when_a_file_cannot_be_moved(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the hidden folder: three old ones, the mark that all of them are out, and two new ones.
    write_folder(tmp_path / "out", "old")
    (tmp_path / "out" / "c").write_text("old")
    monkeypatch.setattr(staging_module, "_exchange", lambda first, second: False)
    rename, calls = os.rename, itertools.count()

    def fail(source: Path, destination: Path) -> None:
        if next(calls) == number:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(ExportError, match="Input/output error"):
        write_folder(tmp_path / "out", "new", overwrite=True)
    assert content_of(tmp_path / "out") == ["old"] * 3
    assert names_in(tmp_path) == ["out"]


def test_what_appears_while_files_are_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "out", "old")
    monkeypatch.setattr(staging_module, "_exchange", lambda first, second: False)
    rename = os.rename

    def appear(source: Path, destination: Path) -> None:
        rename(source, destination)
        if Path(destination).name == "replaced":
            (tmp_path / "out" / "b").write_text("theirs")

    monkeypatch.setattr(os, "rename", appear)
    with pytest.raises(ExportError, match=r"File exists \(.*out/b\)"):
        write_folder(tmp_path / "out", "new", overwrite=True)
    assert content_of(tmp_path / "out") == ["old", "theirs"]
    assert names_in(tmp_path) == ["out"]


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert content_of(tmp_path / "real") == ["new", "new"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    write_folder(tmp_path / ("n" * 255), "new")
    assert names_in(tmp_path) == ["n" * 255]


@pytest.mark.parametrize("place", ["n" * 256, "file/out", "file/deep/out", "/proc/none/out"])
def test_a_place_that_cannot_be_written_stays_as_it_was(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(ExportError, match=r"cannot be written: .*nothing was left there") as error:
        write_folder(tmp_path / place, "new")
    assert isinstance(error.value.__cause__, OSError)
    assert names_in(tmp_path) == ["file"]
    with pytest.raises(ExportError, match="cannot be written"):
        atomic_write(tmp_path / place, b"new", is_any)
    assert names_in(tmp_path) == ["file"]


FULL_DISK = """
import os, resource, sys
from pathlib import Path
import torch
from kbitwrap import ExportError
from kbitwrap.export.staging import atomic_write, staged
from kbitwrap.export.writer import write_safetensors

is_any = lambda path: True
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
tensors = {f"t{i}": torch.ones(20_000) for i in range(4)}
for number, write in enumerate([lambda: atomic_write(folder / "file", bytes(200_000), is_any), lambda: in_folder()]):
    def in_folder():
        with staged(folder / "out") as out:
            (out / "small").write_text("1")
            write_safetensors(out / "model.safetensors", tensors)
    try:
        write()
    except ExportError as error:
        print(error)
print(os.listdir(folder))
"""


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    # A limit on the size of files fails writes half-way, as a full disk does, and no privilege lifts it.
    found = forks.run_program(FULL_DISK, str(tmp_path))
    lines = found.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'file'}: cannot be written: File too large")
    assert lines[1].startswith(f"{tmp_path / 'out'}: cannot be written: File too large")
    assert lines[2] == "[]"


# ----------------------------------------------------------------------------------------------------
# Files.
# ----------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    atomic_write(tmp_path / "deep" / "file", b"old", is_any)
    (tmp_path / "link").symlink_to("deep/file")
    atomic_write(tmp_path / "link", b"new", is_any)
    assert (tmp_path / "deep" / "file").read_bytes() == b"new"
    assert names_in(tmp_path / "deep") == ["file"]


def test_an_error_before_the_hidden_folder_is_removed_leaves_no_hidden_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, calls = staging_module.finish, itertools.count()

    def fail_at_first(*arguments: Any) -> None:
        if next(calls) == 0:
            raise MemoryError
        finish(*arguments)

    monkeypatch.setattr(staging_module, "finish", fail_at_first)
    with pytest.raises(MemoryError):
        atomic_write(tmp_path / "file", b"new", is_any)
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_does_not_replace_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(ExportError, match="expected nothing, or a file that a save has written before, found a folder"):
        atomic_write(tmp_path / "file", b"new", is_any)
    assert names_in(tmp_path) == ["file"]


# ----------------------------------------------------------------------------------------------------
# Killed.
# ----------------------------------------------------------------------------------------------------


def leave_behind(destination: Path) -> Path:
    """The hidden folder of a killed process, with what it had written until then."""
    with staged(destination) as folder:
        hidden = folder.parent
    if destination.exists():
        destination.rmdir()
    hidden.mkdir()
    (hidden / "new").mkdir()
    (hidden / "new" / "half").write_text("1")
    return hidden


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    dead, other = leave_behind(destination), leave_behind(tmp_path / "other")
    with staged(destination) as alive:
        assert names_in(tmp_path) == sorted([alive.parent.name, other.name])
        dead.mkdir()
        atomic_write(destination, b"1", is_any)
        assert names_in(tmp_path) == sorted([alive.parent.name, other.name, "out"])
        destination.unlink()
    assert names_in(tmp_path) == sorted([other.name, "out"])


OLD = dict.fromkeys(("config.json", "weights", "merges"), b"old")
NEW = dict.fromkeys(("config.json", "weights", "tokenizer", "folder/file"), b"new")


def files_in(folder: Path) -> dict[str, bytes]:
    """All but hidden files of a folder by their paths in it."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(".")}


def overwrite_until(destination: Path, number: int, stop: Callable[[], None]) -> None:
    """Overwrite a folder file by file, and stop in the place of a rename."""
    rename, calls = os.rename, itertools.count()

    def stopping(source: Path, target: Path) -> None:
        if next(calls) == number:
            stop()
        rename(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging_module, "_exchange", lambda first, second: False)
        patched.setattr(os, "rename", stopping)
        with staged(destination, overwrite=True, owns=is_any) as folder:
            (folder / "folder").mkdir()
            for name, content in NEW.items():
                (folder / name).write_bytes(content)


def die() -> None:
    os._exit(7)


def interrupt() -> None:
    raise KeyboardInterrupt


def old_folder(path: Path) -> Path:
    path.mkdir()
    for name, content in OLD.items():
        (path / name).write_bytes(content)
    return path


def test_a_kill_while_files_are_replaced_leaves_no_mixture_and_the_next_write_makes_it_whole(tmp_path: Path) -> None:
    # Where folders cannot be exchanged in one step.
    found = []
    for number in itertools.count():
        out = old_folder(tmp_path / f"{number}")
        child = fork(lambda path, number=number: overwrite_until(path, number, die), [out])  # type: ignore[misc]
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 7:
            break
        there = files_in(out)
        assert "config.json" not in there or there in (OLD, NEW), number
        with pytest.raises(ExportError, match="exists and is not empty"):
            write_folder(out, "never")
        found.append(files_in(out))
        assert not any(name.startswith(".") for name in os.listdir(out))
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, range(number + 1))), number
    assert files_in(out) == NEW
    # The hidden folder, three old files, the mark that all of them are out, and four new ones.
    assert found == [OLD] * 5 + [NEW] * 4


def test_an_interrupt_while_files_are_replaced_leaves_a_whole_folder(tmp_path: Path) -> None:
    found = []
    for number in range(9):
        out = old_folder(tmp_path / f"{number}")
        with pytest.raises(KeyboardInterrupt):
            overwrite_until(out, number, interrupt)
        found.append(files_in(out))
    assert found == [OLD] * 5 + [NEW] * 4
    assert len(names_in(tmp_path)) == 9


def test_what_others_wrote_after_a_kill_is_not_replaced_by_what_was_there_before(tmp_path: Path) -> None:
    out = old_folder(tmp_path / "out")
    child = fork(lambda path: overwrite_until(path, 3, die), [out])
    os.waitpid(child, 0)
    (out / "config.json").write_bytes(b"theirs")
    with pytest.raises(ExportError, match="exists and is not empty"):
        write_folder(out, "never")
    assert files_in(out) == {**OLD, "config.json": b"theirs"}


def test_an_invalid_path_is_refused() -> None:
    with pytest.raises(ExportError, match="not a valid path"):
        atomic_write("a\0b", b"", is_any)
    with pytest.raises(ExportError, match="not a valid path"), staged("a\0b"):
        pass
    with pytest.raises(ExportError, match="expected a path"), staged("", overwrite=True):
        pass
