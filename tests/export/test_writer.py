"""Safetensors files: byte for byte the library's, with one tensor in memory at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import weakref
from collections.abc import Callable
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

from kbitwrap import ExportError
from kbitwrap.export import writer as writer_module
from kbitwrap.export.writer import write_safetensors
from kbitwrap.tensors.lazy import LazyTensor, materialize

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
    write_safetensors(path, tensors, metadata)
    assert path.read_bytes() == save(tensors, metadata)


@pytest.mark.parametrize("dtype", LIBRARY_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 4), (3, 0, 2), (1, 1, 1, 6)], ids=str)
def test_every_dtype_and_shape_is_written_as_by_the_library(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    if dtype == getattr(torch, "float4_e2m1fn_x2", None) and shape == ():
        return  # two elements take a byte: the library writes no such tensor either
    tensors = {"b": values(dtype, *shape), "a": values(torch.uint8, 3), "c": values(torch.float32, 2)}
    assert_as_the_library(tensors, {"format": "pt"}, tmp_path / "file")


def test_all_dtypes_in_one_file_have_the_librarys_order(tmp_path: Path) -> None:
    tensors = {f"{i % 3}.{dtype}": values(dtype, 3, 2, seed=i) for i, dtype in enumerate(LIBRARY_DTYPES)}
    assert_as_the_library(tensors, None, tmp_path / "file")


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {'é"\\\n\t\x01\x7f\u2028': "😀"}], ids=str)
@pytest.mark.parametrize("names", [[], ["a"], ["ü", "z", "\U0001f600", "\uffff", 'q"\\/\b', "\x1f ", ""]], ids=str)
def test_any_names_and_metadata_are_written_as_by_the_library(
    names: list[str], metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    tensors = {name: values(torch.int16, 3, seed=i) for i, name in enumerate(names)}
    if not names and metadata == {}:
        # What the library writes here is no JSON, and it does not read it again.
        write_safetensors(tmp_path / "file", tensors, metadata)
        assert load_file(tmp_path / "file") == {}
        return
    assert_as_the_library(tensors, metadata, tmp_path / "file")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tensors_are_written_as_by_the_library(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
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
def test_an_unsupported_layout_or_dtype_is_refused(tensor: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.w: safetensors files cannot hold tensors of") as error:
        write_safetensors(tmp_path / "file", {"a": torch.ones(1), "model.w": tensor})
    assert error.value.fqn == "model.w"
    assert names_in(tmp_path) == []


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[int] = []
    tensors = {"a": values(torch.uint8, 5501), "b": values(torch.float32, 7)}
    write_safetensors(tmp_path / "file", tensors, progress=told.append)
    assert (tmp_path / "file").read_bytes() == save(tensors)
    assert sum(told) == 5529


# ----------------------------------------------------------------------------------------------------
# One tensor at a time.
# ----------------------------------------------------------------------------------------------------


def test_one_tensor_is_computed_at_a_time(tmp_path: Path) -> None:
    alive: set[int] = set()

    def compute() -> torch.Tensor:
        assert not alive  # what is computed is written before the next one is computed
        array = numpy.ones(64, dtype=numpy.float32)
        alive.add(id(array))
        weakref.finalize(array, alive.remove, id(array))  # it lives as long as the tensor's storage
        return torch.from_numpy(array)

    tensors = {f"t{i}": LazyTensor((64,), torch.float32, compute) for i in range(5)}
    write_safetensors(tmp_path / "file", tensors)
    assert not alive
    assert len(load_file(tmp_path / "file")) == 5


def test_tensors_cut_from_one_compute_it_once(tmp_path: Path) -> None:
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
    assert (tmp_path / "file").read_bytes() == save({name: materialize(t) for name, t in tensors.items()})


def test_a_lazy_tensor_is_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_error_of_the_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, "pieces", fail)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(tmp_path / "file", {"a": torch.ones(3), "b": torch.ones(5)})
    assert names_in(tmp_path) == []


def test_an_error_while_computing_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_safetensors(tmp_path / "file", {"a": torch.ones(3), "b": LazyTensor((1,), torch.float16, fail)})
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EOPNOTSUPP])
def test_a_full_disk_is_noticed_before_anything_is_computed(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(sys, "platform", "linux")  # blocks are reserved there alone
    monkeypatch.setattr(os, "posix_fallocate", fail, raising=False)
    computed: list[str] = []

    def compute() -> torch.Tensor:
        computed.append("a")
        return torch.ones(3)

    is_full = code == errno.ENOSPC  # the other is a file system that cannot reserve
    with pytest.raises(OSError, match="space") if is_full else contextlib.nullcontext():
        write_safetensors(tmp_path / "file", {"a": LazyTensor((3,), torch.float32, compute)})
    assert (computed, names_in(tmp_path)) == (([], []) if is_full else (["a"], ["file"]))
