"""Files and folders: byte for byte the library's, one tensor in memory at a time, whole or not there."""

from __future__ import annotations

import os
import shutil
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import _SIZE as LIBRARY_SIZES
from safetensors.torch import load_file, save

import forks
from kbitwrap import ExportError
from kbitwrap import stream as stream_module
from kbitwrap.lazy import LazyTensor
from kbitwrap.stream import DTYPES, atomic_write, staged, write_safetensors
from killing import kill_at_random

LIBRARY_DTYPES = [dtype for dtype in LIBRARY_SIZES if dtype is not None]


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    return torch.randint(high, (size,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ----------------------------------------------------------------------------------------------------
# Byte for byte.
# ----------------------------------------------------------------------------------------------------


def assert_as_the_library(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None, path: Path) -> None:
    num_bytes = write_safetensors(path, tensors, metadata)
    assert path.read_bytes() == save(tensors, metadata)
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_it_knows_the_dtypes_that_the_library_knows() -> None:
    assert set(DTYPES.values()) == set(LIBRARY_DTYPES)


@pytest.mark.parametrize("dtype", LIBRARY_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 4), (3, 0, 2), (1, 1, 1, 6)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    if dtype == getattr(torch, "float4_e2m1fn_x2", None) and shape == ():
        with pytest.raises(ExportError, match=r"b: .*no tensors of shape"):
            write_safetensors(tmp_path / "file", {"b": values(dtype)})
        return
    tensors = {"b": values(dtype, *shape), "a": values(torch.uint8, 3), "c": values(torch.float32, 2)}
    assert_as_the_library(tensors, {"format": "pt"}, tmp_path / "file")


def test_all_dtypes_in_one_file(tmp_path: Path) -> None:
    tensors = {f"{i % 3}.{dtype}": values(dtype, 3, 2, seed=i) for i, dtype in enumerate(LIBRARY_DTYPES)}
    assert_as_the_library(tensors, None, tmp_path / "file")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'é"\\\n\t\x01\x7f\u2028': "😀"}], ids=str)
@pytest.mark.parametrize("names", [[], ["a"], ["ü", "z", "\U0001f600", "\uffff", 'q"\\/\b', "\x1f ", ""]], ids=str)
def test_names_and_metadata(names: list[str], metadata: dict[str, str] | None, tmp_path: Path) -> None:
    tensors = {name: values(torch.int16, 3, seed=i) for i, name in enumerate(names)}
    if not names and metadata == {}:
        # What the library writes here is no JSON, and it does not read it again.
        write_safetensors(tmp_path / "file", tensors, metadata)
        assert load_file(tmp_path / "file") == {}
        return
    assert_as_the_library(tensors, metadata, tmp_path / "file")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tensors(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    shapes = st.lists(st.integers(0, 4), max_size=3)
    dtypes = st.sampled_from([dtype for dtype in LIBRARY_DTYPES if "float4" not in str(dtype)])
    entries = data.draw(st.dictionaries(text.filter(lambda n: n != "__metadata__"), st.tuples(dtypes, shapes)))
    tensors = {name: values(dtype, *shape) for name, (dtype, shape) in entries.items()}
    metadata = data.draw(st.none() | st.dictionaries(text, text, min_size=1, max_size=1))
    assert_as_the_library(tensors, metadata, tmp_path_factory.getbasetemp() / "any")


def test_metadata_is_sorted_so_that_a_file_is_the_same_each_time(tmp_path: Path) -> None:
    for i, names in enumerate(["abc", "cba"]):
        write_safetensors(tmp_path / str(i), {"t": torch.ones(1)}, dict.fromkeys(names, "1"))
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    with safe_open(tmp_path / "0", "pt") as file:
        assert file.metadata() == {"a": "1", "b": "1", "c": "1"}


def test_tensors_of_other_layouts_are_made_contiguous(tmp_path: Path) -> None:
    whole = values(torch.float32, 4, 6)
    tensors = {"t": whole.t(), "step": whole[::2, 1::3], "part": whole[1], "grad": whole.clone().requires_grad_()}
    write_safetensors(tmp_path / "file", tensors)
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)], ids=repr)
def test_what_the_format_does_not_hold_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.w: safetensors files hold no tensors of") as error:
        write_safetensors(tmp_path / "file", {"a": torch.ones(1), "model.w": tensor})
    assert error.value.fqn == "model.w"
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("small", [1, 1 << 20], ids=["in the background", "at once"])
def test_a_big_tensor_is_written_in_pieces_and_progress_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(stream_module, "_PIECE", 1000)
    monkeypatch.setattr(stream_module, "_SMALL", small)
    told: list[int] = []
    tensors = {"a": values(torch.uint8, 5501), "b": values(torch.float32, 7)}
    write_safetensors(tmp_path / "file", tensors, progress=told.append)
    assert (tmp_path / "file").read_bytes() == save(tensors)
    assert sum(told) == 5529
    assert max(told) == 1000


# ----------------------------------------------------------------------------------------------------
# One tensor at a time.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("small", "others"), [(1, 1), (1 << 20, 0)], ids=["in the background", "at once"])
def test_one_tensor_is_computed_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, others: int
) -> None:
    monkeypatch.setattr(stream_module, "_SMALL", small)
    alive: set[int] = set()

    def compute() -> torch.Tensor:
        assert len(alive) <= others  # which are being written
        array = numpy.ones(64, dtype=numpy.float32)
        alive.add(id(array))
        weakref.finalize(array, alive.remove, id(array))  # it lives as long as the tensor's storage
        return torch.from_numpy(array)

    set_result = Future.set_result

    def dawdle(future: Future[Any], result: Any) -> None:
        set_result(future, result)
        time.sleep(0.01)  # the writing thread is not done with what it was told to write

    monkeypatch.setattr(Future, "set_result", dawdle)
    tensors = {f"t{i}": LazyTensor((64,), torch.float32, compute) for i in range(5)}
    write_safetensors(tmp_path / "file", tensors)
    assert not alive
    assert len(load_file(tmp_path / "file")) == 5


def test_what_is_cut_from_one_tensor_computes_it_once(tmp_path: Path) -> None:
    computed: list[str] = []

    def fused(name: str) -> LazyTensor:
        def compute() -> torch.Tensor:
            computed.append(name)
            return values(torch.bfloat16, 6, 4, 2, seed=len(name))

        return LazyTensor((6, 4, 2), torch.bfloat16, compute)

    # As experts are named in a checkpoint: in the file's order, the pieces of the two alternate.
    tensors = {
        f"experts.{i}.{name}": expert.squeeze(0)
        for name in ("down", "gate_up")
        for i, expert in enumerate(fused(name).chunk(6))
    }
    write_safetensors(tmp_path / "file", tensors)
    assert sorted(computed) == ["down", "gate_up"]
    assert (tmp_path / "file").read_bytes() == save({name: t.materialize() for name, t in tensors.items()})


def test_a_lazy_tensor_is_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_SMALL", 100)
    whole = values(torch.bfloat16, 40, 25)
    lazy = LazyTensor((40, 25), torch.bfloat16, whole.clone, lambda: iter(whole.view(-1).split(33)))
    write_safetensors(tmp_path / "file", {"a": lazy, "b": torch.ones(3)})
    assert (tmp_path / "file").read_bytes() == save({"a": whole, "b": torch.ones(3)})


@pytest.mark.parametrize(
    "piece", [torch.ones(0).half(), torch.ones(5).half(), torch.ones(7).half(), torch.ones(6).bfloat16(), torch.ones(3)]
)
def test_pieces_that_are_not_the_whole_are_refused(tmp_path: Path, piece: torch.Tensor) -> None:
    lazy = LazyTensor((6,), torch.float16, lambda: torch.ones(6), lambda: iter([piece]))
    with pytest.raises(ExportError, match=r"a: expected 6 values of torch\.float16 in the shape \(6,\)") as caught:
        write_safetensors(tmp_path / "file", {"a": lazy, "b": torch.ones(3).half()})
    assert caught.value.fqn == "a"
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("become", [lambda data: data.to(torch.bfloat16), lambda data: data.t()])
def test_a_tensor_that_becomes_another_is_refused(
    tmp_path: Path, become: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    later = torch.ones(2, 3).half()

    def compute() -> torch.Tensor:
        later.data = become(later.data)
        return torch.ones(4).half()

    with pytest.raises(ExportError, match=r"b: expected 6 values of torch\.float16 in the shape \(2, 3\)"):
        write_safetensors(tmp_path / "file", {"a": LazyTensor((4,), torch.float16, compute), "b": later})
    assert names_in(tmp_path) == []


def test_an_error_of_the_disk_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_SMALL", 1)

    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream_module._Background, "_write_piece", fail)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(tmp_path / "file", {"a": torch.ones(3), "b": torch.ones(5)})
    assert names_in(tmp_path) == []


def test_an_error_while_computing_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_safetensors(tmp_path / "file", {"a": torch.ones(3), "b": LazyTensor((1,), torch.float16, fail)})
    assert names_in(tmp_path) == []


# ----------------------------------------------------------------------------------------------------
# Folders.
# ----------------------------------------------------------------------------------------------------


def write_folder(destination: Path, content: str, **options: Any) -> None:
    with staged(destination, **options) as folder:
        (folder / "a").write_text(content)
        (folder / "b").write_text(content)


def content_of(destination: Path) -> list[str]:
    return [(destination / name).read_text() for name in names_in(destination)]


def test_a_folder_is_there_when_the_body_ends_and_not_before(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    with staged(destination) as folder:
        (folder / "a").write_text("1")
        assert folder.parent == tmp_path
        assert folder.name.startswith(".")
        assert not destination.exists()
    assert names_in(tmp_path) == ["out"]
    assert content_of(destination) == ["1"]


def test_its_mode_is_that_of_any_folder(tmp_path: Path) -> None:
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
        with staged(destination, overwrite=overwrite) as folder:
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
def test_an_empty_folder_is_used(tmp_path: Path, overwrite: bool) -> None:
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
        monkeypatch.setattr(stream_module, "_exchange", lambda first, second: False)
    write_folder(tmp_path / "out", "old")
    (tmp_path / "out" / "c").write_text("old")
    write_folder(tmp_path / "out", "new", overwrite=True)
    assert content_of(tmp_path / "out") == ["new", "new"]
    assert names_in(tmp_path) == ["out"]


def test_linux_exchanges_folders_in_one_step(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", "a")
    write_folder(tmp_path / "b", "b")
    assert stream_module._exchange(tmp_path / "a", tmp_path / "b")
    assert (content_of(tmp_path / "a"), content_of(tmp_path / "b")) == (["b", "b"], ["a", "a"])
    assert not stream_module._exchange(tmp_path / "a", tmp_path / "none")


def test_overwriting_gives_up_when_the_second_rename_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "out", "old")
    monkeypatch.setattr(stream_module, "_exchange", lambda first, second: False)
    rename = os.rename

    def fail(source: Path, destination: Path) -> None:
        if Path(destination) == tmp_path / "out" and not str(source).endswith("-moved"):
            raise OSError(5, "Input/output error")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(ExportError, match="Input/output error"):
        write_folder(tmp_path / "out", "new", overwrite=True)
    assert content_of(tmp_path / "out") == ["old", "old"]
    assert names_in(tmp_path) == ["out"]


def test_a_folder_with_folders_is_not_replaced(tmp_path: Path) -> None:
    write_folder(tmp_path / "out", "old")
    (tmp_path / "out" / "checkpoint-500").mkdir()
    with pytest.raises(ExportError, match=r"holds the folder 'checkpoint-500'.*remove it yourself"):
        write_folder(tmp_path / "out", "new", overwrite=True)
    assert "checkpoint-500" in names_in(tmp_path / "out")


def test_a_symbolic_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write_folder(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert content_of(tmp_path / "real") == ["new", "new"]


def test_the_longest_name_there_is(tmp_path: Path) -> None:
    write_folder(tmp_path / ("n" * 255), "new")
    assert names_in(tmp_path) == ["n" * 255]


@pytest.mark.parametrize("place", ["n" * 256, "file/out", "file/deep/out", "/proc/none/out"])
def test_where_nothing_can_be_written(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("1")
    with pytest.raises(ExportError, match=r"cannot be written: .*nothing was left there") as error:
        write_folder(tmp_path / place, "new")
    assert isinstance(error.value.__cause__, OSError)
    assert names_in(tmp_path) == ["file"]
    with pytest.raises(ExportError, match="cannot be written"):
        atomic_write(tmp_path / place, b"new")
    assert names_in(tmp_path) == ["file"]


FULL_DISK = """
import os, resource, sys
from pathlib import Path
import torch
from kbitwrap import ExportError
from kbitwrap.stream import atomic_write, staged, write_safetensors

folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
tensors = {f"t{i}": torch.ones(20_000) for i in range(4)}
for number, write in enumerate([lambda: atomic_write(folder / "file", bytes(200_000)), lambda: in_folder()]):
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


def test_a_full_disk(tmp_path: Path) -> None:
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
    atomic_write(tmp_path / "deep" / "file", b"old")
    (tmp_path / "link").symlink_to("deep/file")
    atomic_write(tmp_path / "link", b"new")
    assert (tmp_path / "deep" / "file").read_bytes() == b"new"
    assert names_in(tmp_path / "deep") == ["file"]


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(ExportError, match="Is a directory"):
        atomic_write(tmp_path / "file", b"new")
    assert names_in(tmp_path) == ["file"]


# ----------------------------------------------------------------------------------------------------
# Killed.
# ----------------------------------------------------------------------------------------------------

STAGED = """
import torch
from kbitwrap.stream import staged, write_safetensors
tensors = {f"t{i}": torch.full((1000, 100), float(i)) for i in range(10)}
def write(destination):
    with staged(destination) as out:
        (out / "config.json").write_text("{}")
        write_safetensors(out / "model.safetensors", tensors)
"""


def test_killed_while_it_writes_a_folder(tmp_path: Path) -> None:
    expected = {f"t{i}": torch.full((1000, 100), float(i)) for i in range(10)}

    def check(destination: Path) -> None:
        assert names_in(destination) == ["config.json", "model.safetensors"]
        found = load_file(destination / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        shutil.rmtree(destination)

    # Some kills must have hit a write, or nothing was tested.
    assert kill_at_random(STAGED, tmp_path, 50, check) > 5


OVERWRITTEN = """
from kbitwrap.stream import staged
target = folder / "target"
def write(destination):
    with staged(target, overwrite=True) as out:
        for name in "abcdef":
            (out / name).write_text(destination.name)
"""


def test_killed_while_it_overwrites_a_folder(tmp_path: Path) -> None:
    seen = []

    def check(destination: Path) -> None:
        found = content_of(destination)
        assert len(found) == 6
        assert len(set(found)) == 1
        seen.append(found[0])

    kill_at_random(OVERWRITTEN, tmp_path, 50, check)
    # It was there after every kill, and what killed runs left behind was cleaned up by later ones.
    assert len(seen) == 50
    assert len(set(seen)) > 5
    write_folder(tmp_path / "target", "last", overwrite=True)
    assert names_in(tmp_path) == ["target"]


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    destination = tmp_path / "out"
    with staged(destination) as alive:
        dead = tmp_path / f"{stream_module._prefix(destination)}0123"
        dead.mkdir()
        (dead / "half").write_text("1")
        other = tmp_path / f"{stream_module._prefix(tmp_path / 'other')}0123"
        other.mkdir()
        atomic_write(destination, b"1")
        assert names_in(tmp_path) == sorted([alive.name, other.name, "out"])
        destination.unlink()
    assert names_in(tmp_path) == sorted([other.name, "out"])


def test_what_was_moved_out_of_the_way_comes_back(tmp_path: Path) -> None:
    # Killed between the two renames, where folders cannot be exchanged.
    destination = tmp_path / "out"
    write_folder(tmp_path / f"{stream_module._prefix(destination)}0123-moved", "old")
    with pytest.raises(ExportError, match="exists and is not empty"):
        write_folder(destination, "new")
    assert content_of(destination) == ["old", "old"]
    assert names_in(tmp_path) == ["out"]


def test_what_cannot_be_a_path() -> None:
    with pytest.raises(ExportError, match="cannot be a path"):
        atomic_write("a\0b", b"")
    with pytest.raises(ExportError, match="cannot be a path"), staged("a\0b"):
        pass
    with pytest.raises(ExportError, match="expected a path"), staged("", overwrite=True):
        pass
