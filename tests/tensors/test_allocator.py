"""The model of the caching allocator: sequences whose outcome torch documents, and any, against its invariants."""

from __future__ import annotations

import random

import pytest

from kbitwrap.errors import ConfigError
from kbitwrap.tensors.allocator import Allocator
from support.thorough import few

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True"


def segments(allocator: Allocator) -> list[tuple[bool, list[tuple[int, bool]]]]:
    """Whether each segment is of the small pool, with the sizes of its blocks and whether they are in use."""
    found: list[tuple[bool, list[tuple[int, bool]]]] = []
    end = None
    for address in sorted([*allocator.blocks, *allocator.free_blocks]):
        assert end is None or address >= end  # nothing overlaps
        if address != end:
            found.append((address < 0, []))
        size = allocator.blocks.get(address) or allocator.free_blocks[address]
        found[-1][1].append((size, address in allocator.blocks))
        end = address + size
    return found


@pytest.mark.parametrize(
    ("num_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 1, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # up to a mebibyte of a large block is not split off
    ],
)
def test_a_request_gets_a_block_of_a_segment(num_bytes: int, block: int, segment: int) -> None:
    allocator = Allocator()
    allocator.allocate(num_bytes)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (block, segment)


def test_small_requests_share_a_segment_and_large_ones_share_another() -> None:
    allocator = Allocator()
    for num_bytes in (MIB, MIB, 3 * MIB, 9 * MIB, 8 * MIB):
        allocator.allocate(num_bytes)
    assert segments(allocator) == [
        (True, [(MIB, True), (MIB, True)]),
        (False, [(3 * MIB, True), (9 * MIB, True), (8 * MIB, True)]),
    ]


def test_the_smallest_free_block_that_suffices_is_taken_and_of_equal_ones_the_first() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 30, 50)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(29 * MIB) == blocks[1]
    assert allocator.allocate(30 * MIB) == blocks[2]
    assert allocator.allocate(30 * MIB) == blocks[0]
    assert allocator.allocate(20 * MIB) == blocks[3]
    assert allocator.reserved_bytes == 150 * MIB


def test_free_neighbors_become_one_block() -> None:
    allocator = Allocator()
    one, two, three = (allocator.allocate(4 * MIB) for _ in range(3))
    for block in (one, three, two):
        allocator.free(block)
    assert segments(allocator) == [(False, [(20 * MIB, False)])]


def test_emptying_the_cache_leaves_segments_that_are_in_use() -> None:
    allocator = Allocator()
    one, two, three = (allocator.allocate(size * MIB) for size in (4, 4, 30))
    allocator.free(one)
    allocator.free(three)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(two)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.peak_reserved_bytes) == (0, 50 * MIB)


@pytest.mark.parametrize("settings", ["", EXPANDABLE])
def test_at_the_limit_what_is_free_is_released_before_memory_runs_out(settings: str) -> None:
    allocator = Allocator(settings, limit=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(MemoryError):
        allocator.allocate(40 * MIB)


def test_blocks_above_max_split_size_mb_are_left_to_requests_of_about_their_size() -> None:
    allocator = Allocator("max_split_size_mb:40")
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(30 * MIB)  # is below it
    assert allocator.reserved_bytes == 130 * MIB
    allocator.allocate(80 * MIB)  # would leave 20 MiB
    assert allocator.reserved_bytes == 210 * MIB
    allocator.allocate(82 * MIB)
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (210 * MIB, 210 * MIB)


def test_an_expandable_segment_grows_at_its_end_and_gives_whole_granules_back() -> None:
    allocator = Allocator(EXPANDABLE)
    blocks = [allocator.allocate(15 * MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 60 * MIB
    assert segments(allocator)[0][1][-1] == (15 * MIB, False)
    allocator.free(blocks[0])
    allocator.free(blocks[1])
    allocator.empty_cache()  # of 30 free bytes at its beginning, and 15 at its end, one granule of 20
    assert allocator.reserved_bytes == 40 * MIB
    allocator.allocate(25 * MIB)  # the granule is mapped again
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(MIB)
    assert allocator.reserved_bytes == 62 * MIB


def test_granules_that_were_given_back_one_after_the_other_are_one_range() -> None:
    allocator = Allocator(EXPANDABLE)
    first, second, third, _, large, _ = (allocator.allocate(size * MIB) for size in (20, 20, 20, 20, 50, 10))
    for block in (second, third):
        allocator.free(block)
        allocator.empty_cache()
    allocator.free(large)
    allocator.free(first)
    assert allocator.allocate(15 * MIB) == large  # the first can grow to 60


def test_at_the_limit_an_expandable_segment_grows_by_what_its_end_lacks() -> None:
    allocator = Allocator(EXPANDABLE, limit=100 * MIB)
    allocator.allocate(30 * MIB)
    allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


@pytest.mark.parametrize(
    ("cached", "wanted", "left"),
    [
        ([60, 100], 30, 130),  # the smallest that suffices is released, and not the other
        ([70, 60, 50], 90, 140),  # or the largest ones
    ],
)
def test_at_the_limit_no_more_is_released_of_what_is_never_split_than_a_request_needs(
    cached: list[int], wanted: int, left: int
) -> None:
    allocator = Allocator("max_split_size_mb:40", limit=180 * MIB)
    for block in [allocator.allocate(size * MIB) for size in cached]:
        allocator.free(block)
    allocator.allocate(wanted * MIB)
    assert allocator.reserved_bytes == left * MIB


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ("roundup_power2_divisions:[256:1,>:2]", "roundup_power2_divisions:[256:1"),
        ("garbage_collection_threshold:0.8,backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("max_split_size_mb:x", "max_split_size_mb:x"),
        ("max_split_size_mb", "max_split_size_mb"),
        ("max_split_size_mb:64.5", "max_split_size_mb:64.5"),
        ("max_split_size_mb:٣٠", "max_split_size_mb:٣٠"),
        ("max_split_size_mb:19", "max_split_size_mb:19"),  # torch refuses it
        ("expandable_segments:true", "expandable_segments:true"),  # and these
        ("expandable_segment:True", "expandable_segment:True"),
        ("large_segment_size_mb:40", "large_segment_size_mb:40"),
        ("max_non_split_rounding_mb:64", "max_non_split_rounding_mb:64"),
        ("per_process_memory_fraction:0.5", "per_process_memory_fraction:0.5"),
    ],
)
def test_a_setting_that_is_not_followed_is_refused(settings: str, found: str) -> None:
    with pytest.raises(ConfigError, match="expected the native backend") as caught:
        Allocator(settings)
    assert f"found '{found}'" in str(caught.value)


def test_settings_are_read_as_torch_reads_them() -> None:
    harmless = "backend:native,garbage_collection_threshold:0.8,pinned_use_background_threads:True,"
    for settings in ("expandable_segments: True", " expandable_segments:False,\texpandable_segments:True,\n"):
        allocator = Allocator(harmless + settings)
        allocator.allocate(15 * MIB)
        assert allocator.reserved_bytes == 20 * MIB
    for settings in ("", harmless, "expandable_segments:False"):
        allocator = Allocator(settings)
        allocator.allocate(15 * MIB)
        assert allocator.reserved_bytes == 16 * MIB


@pytest.mark.parametrize("numbers", few([range(150), range(150, 10_000)], [range(150)]), ids=str)
def test_blocks_tile_segments_whatever_is_asked_for(numbers: range) -> None:
    for number in numbers:
        check(random.Random(number))


def check(draw: random.Random) -> None:
    settings = draw.choice(["", EXPANDABLE, "max_split_size_mb:32", f"{EXPANDABLE},max_split_size_mb:64"])
    allocator = Allocator(settings, draw.choice([1 << 60, 400 * MIB]))
    live: list[int] = []
    for _ in range(draw.choice([30, 300])):
        action = draw.random()
        if action < 0.02:
            allocator.empty_cache()
        elif live and action < 0.5:
            allocator.free(live.pop(draw.randrange(len(live))))
        else:
            size = int(2 ** draw.uniform(0, 26))
            try:
                live.append(allocator.allocate(size))
            except MemoryError:
                continue
            assert allocator.blocks[live[-1]] >= size
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
    found = segments(allocator)
    assert sum(size for _, blocks in found for size, _ in blocks) == allocator.reserved_bytes
    assert sum(allocator.blocks.values()) == allocator.allocated_bytes
    assert sorted(allocator.blocks) == sorted(live)
    for is_small, blocks in found:
        assert any(is_used for _, is_used in blocks) or len(blocks) == 1  # free neighbors are one
        assert sum(size for size, _ in blocks) % (2 * MIB) == 0 or not is_small
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.blocks, allocator.free_blocks) == (0, {}, {})
