"""The digest: its formula, and what it tells apart."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.testing._internal.two_tensor import TwoTensor

from kbitwrap.tensors import bits as digest
from kbitwrap.tensors.bits import content_digest, digest_bytes
from support.memory import peak_bytes

MASK = (1 << 64) - 1
BLOCK = 65536  # words
DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16)
DTYPES += (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)


def reference(data: bytes) -> int:
    """The formula, word by word."""

    def arithmetic_shift(x: int, n: int) -> int:
        signed = x - (1 << 64) if x >> 63 else x
        return (signed >> n) & MASK

    whole = len(data) // 8 * 8
    words = [word for (word,) in struct.iter_unpack("<Q", data[:whole])]
    h = 0
    for start in range(0, len(words), BLOCK):
        total = 0
        for i, w in enumerate(words[start : start + BLOCK]):
            x = w ^ ((i + 1) * 0x9E3779B97F4A7C15 & MASK)
            x = (x ^ arithmetic_shift(x, 32)) * 0xC2B2AE3D27D4EB4F & MASK
            total += x ^ arithmetic_shift(x, 29)
        h = (h * 0xC2B2AE3D27D4EB4F + total) & MASK
    if len(data) > whole:
        h = (h * 0xC2B2AE3D27D4EB4F + int.from_bytes(data[whole:], "little")) & MASK
    return (h * 0xC2B2AE3D27D4EB4F + len(data)) & MASK


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def words(*digests: int) -> bytes:
    return struct.pack(f"<{len(digests)}Q", *digests)


# ----------------------------------------------------------------------------------------------------
# The formula.
# ----------------------------------------------------------------------------------------------------


def test_known_tensors_have_known_digests() -> None:
    # Digests are kept in files: no change of both this file and the package may go unseen.
    assert content_digest(tensor_of(b"")) == 0
    assert content_digest(tensor_of(b"a")) == 0xC5B4052C17AD28F0
    assert content_digest(tensor_of(b"kbitwrap manifest")) == 0xE55B53528136074D
    assert content_digest(torch.arange(4)) == 0x41F9C25A601B626E


def test_a_tensor_made_of_others_has_the_digest_of_theirs() -> None:
    first, second = random_bytes(40), random_bytes(40, seed=1)
    digests = reference(first.numpy().tobytes()), reference(second.numpy().tobytes())
    inner = TwoTensor(first, second)
    assert content_digest(inner) == reference(words(*digests))
    assert content_digest(TwoTensor(inner, TwoTensor(second, first))) == reference(words(*digests, *digests[::-1]))
    assert reference(b"kbitwrap manifest") == 0xE55B53528136074D


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_the_digest_follows_the_documented_formula(data: bytes) -> None:
    assert content_digest(tensor_of(data)) == reference(data)


@pytest.mark.parametrize("num_words", [BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("tail", [0, 3])
def test_blocks_and_pieces_follow_the_documented_formula(num_words: int, tail: int) -> None:
    data = random_bytes(8 * num_words + tail)
    assert content_digest(data) == reference(data.numpy().tobytes())


def test_the_digest_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(5 * 8 * BLOCK + 24)
    expected = content_digest(data)
    for blocks in (1, 2, 4, 64):
        monkeypatch.setattr(digest, "_PIECE", blocks * 8 * BLOCK)
        assert content_digest(data) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_digest_does_not_depend_on_the_dtype(dtype: torch.dtype) -> None:
    data = torch.randint(0, 2, (4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert content_digest(data.view(dtype)) == reference(data.numpy().tobytes())


def test_the_digest_depends_on_nan_payloads() -> None:
    quiet, other = (torch.tensor([bits], dtype=torch.int16).view(torch.float16) for bits in (0x7E00, 0x7E01))
    assert quiet.isnan()
    assert other.isnan()
    assert content_digest(quiet) != content_digest(other)


# ----------------------------------------------------------------------------------------------------
# Layouts.
# ----------------------------------------------------------------------------------------------------


def views(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same values in the same order, stored differently."""
    wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
    wide[:, ::2] = tensor
    shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    return {
        "transposed": tensor.t().contiguous().t(),
        "strided": wide[:, ::2],
        "shifted": shifted,
        "parameter": torch.nn.Parameter(tensor.clone()),
        "flat": tensor.reshape(-1),
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["transposed", "strided", "shifted", "parameter", "flat"])
def test_the_digest_does_not_depend_on_the_layout(name: str, dtype: torch.dtype) -> None:
    tensor = torch.randn(300, 301, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert content_digest(views(tensor)[name]) == content_digest(tensor)


def test_lazy_conjugation_and_negation_are_resolved() -> None:
    tensor = torch.complex(torch.arange(5.0), torch.arange(5.0) + 1)
    assert content_digest(tensor.conj()) == content_digest(tensor.conj().resolve_conj())
    assert content_digest(tensor.conj()) != content_digest(tensor)
    assert content_digest(tensor.conj().imag) == content_digest(tensor.conj().imag.resolve_neg())


def test_a_scalar_and_an_empty_tensor() -> None:
    assert content_digest(torch.tensor(3)) == content_digest(torch.tensor([3]))
    assert content_digest(torch.empty(0, 3)) == content_digest(torch.empty(0))


def test_digesting_leaves_the_tensor_unchanged() -> None:
    tensor = torch.randn(70, 1001, requires_grad=True)
    before, version = tensor.detach().clone(), tensor._version
    content_digest(tensor)
    assert torch.equal(tensor, before)
    assert tensor._version == version


# ----------------------------------------------------------------------------------------------------
# What it tells apart.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 29, 64])
def test_every_single_bit_changes_the_digest(num_bytes: int) -> None:
    data = random_bytes(num_bytes)
    found = {content_digest(data)}
    for place in range(num_bytes):
        for bit in range(8):
            flipped = data.clone()
            flipped[place] ^= 1 << bit
            found.add(content_digest(flipped))
    assert len(found) == 1 + 8 * num_bytes


def test_every_pair_of_top_bits_changes_the_digest() -> None:
    # A plain weighted sum collides here: two top bits add up to 2**64, which is nothing.
    words = torch.randint(-(2**62), 2**62, (64,), generator=torch.Generator().manual_seed(0))
    found = {content_digest(words)}
    for i in range(64):
        for j in range(i):
            flipped = words.clone()
            flipped[[i, j]] ^= -(2**63)
            found.add(content_digest(flipped))
    assert len(found) == 1 + 64 * 63 // 2


def test_the_same_pair_in_other_blocks_changes_the_digest() -> None:
    words = torch.zeros(3 * BLOCK, dtype=torch.int64)
    found = {content_digest(words)}
    for i in (5, BLOCK + 5, 2 * BLOCK + 5):
        changed = words.clone()
        changed[i] = -(2**63)
        found.add(content_digest(changed))
    assert len(found) == 4


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_digest_depends_on_the_order(words: list[int], random: object) -> None:
    shuffled = list(words)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    same = content_digest(torch.tensor(words)) == content_digest(torch.tensor(shuffled))
    assert same == (words == shuffled)


def test_swapped_blocks_change_the_digest() -> None:
    first, second = random_bytes(8 * BLOCK, 1), random_bytes(8 * BLOCK, 2)
    assert content_digest(torch.cat([first, second])) != content_digest(torch.cat([second, first]))


def test_the_digest_depends_on_the_length() -> None:
    digests = {content_digest(torch.zeros(n, dtype=torch.uint8)) for n in range(40)}
    assert len(digests) == 40


# ----------------------------------------------------------------------------------------------------
# Memory.
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [8 << 10, 600_000, 1 << 20, 7 << 20, 32 << 20])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_digest_needs_little_memory_beside_the_tensor(num_bytes: int, is_transposed: bool) -> None:
    tensor = torch.zeros(num_bytes, dtype=torch.uint8).view(1 << 5, -1)
    tensor = tensor.t() if is_transposed else tensor
    # Two pieces, and the factors of a block; beside these the sums, of 8 bytes a block.
    assert digest_bytes(tensor) <= peak_bytes(lambda: content_digest(tensor)) <= digest_bytes(tensor) + (16 << 10)
    assert digest_bytes(tensor) <= num_bytes * is_transposed + (9 << 20)
