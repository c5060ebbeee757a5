"""The allocator's model: figures that are known, and the laws every allocator keeps."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy import allocator
from dynchunk.policy.allocator import MIB, Allocator, Block, DeviceFullError, Reserve, ramp, static_chunks, tiles
from dynchunk.policy.budget import Budget, chunk_tokens

GIB = 1 << 30


def tile_ramp(limit_bytes: int, remedy: str = allocator.NONE) -> Reserve:
    """A prompt of 262,144 keys in chunks of 2,048 rows."""
    chunks = (tiles(rows, keys, limit_bytes) for rows, keys in static_chunks(2048, 262_144))
    return ramp(chunks, remedy=remedy, prime_bytes=limit_bytes)


def dense_ramp(device: Allocator, *, empty_cache: bool = False) -> Allocator:
    """131,072 keys on a path that holds 6 bytes for each row and key: the scores and two more buffers."""
    for rows, keys in static_chunks(2048, 131_072):
        live = [device.allocate(size * rows * keys) for size in (4, 1, 1)]
        for block in live:
            device.free(block)
        if empty_cache:
            device.empty_cache()
    return device


@pytest.mark.parametrize(
    ("limit_mib", "remedy", "reserved_gib", "segments"),
    [
        (2048, allocator.NONE, 129.0, 128),
        (2048, allocator.PRIME, 2.0, 1),
        (2048, allocator.EMPTY_CACHE, 2.0, 128),
        (256, allocator.NONE, 2.125, 16),
        (256, allocator.PRIME, 0.25, 1),
        (256, allocator.EMPTY_CACHE, 0.25, 128),
    ],
)
def test_a_ramp_of_tiles(limit_mib: int, remedy: str, reserved_gib: float, segments: int) -> None:
    """What is live never exceeds the limit; without a remedy far more is reserved, with a primed block exactly that."""
    reserve = tile_ramp(limit_mib * MIB, remedy)
    assert reserve.allocated_bytes == limit_mib * MIB
    assert reserve.reserved_bytes == reserved_gib * GIB
    assert reserve.segments_made == segments


def test_a_ramp_without_tiles() -> None:
    """32.5 GiB reserved for 1.5 GiB live; releasing after each chunk keeps 1.5 and asks the device 190 times."""
    plain = dense_ramp(Allocator())
    assert plain.allocated_peak_bytes == 1.5 * GIB
    assert plain.reserved_peak_bytes / GIB == pytest.approx(32.5, abs=0.05)
    released = dense_ramp(Allocator(), empty_cache=True)
    assert (released.reserved_peak_bytes, released.segments_made) == (1.5 * GIB, 190)


def test_what_is_held_beside() -> None:
    """A block that lives throughout adds its own size, and what the tiles come to stays as it is."""
    cut = [tiles(2048, keys, 256 * MIB) for _, keys in static_chunks(2048, 65_536)]
    alone, beside = ramp(cut), ramp(cut, held_bytes=500 * MIB)
    assert beside.reserved_bytes == alone.reserved_bytes + 500 * MIB
    assert beside.allocated_bytes == alone.allocated_bytes + 500 * MIB


def test_a_memory_fraction_turns_growth_into_flushes() -> None:
    """Capped at 8 GiB the same ramp goes through, at the cap; a threshold of one half keeps it well below, no flush."""
    capped = dense_ramp(Allocator(8 * GIB))
    assert 7.9 * GIB < capped.reserved_peak_bytes <= 8 * GIB
    assert capped.flushes > 0
    collected = dense_ramp(Allocator(8 * GIB, gc_threshold=0.5))
    assert 4 * GIB < collected.reserved_peak_bytes < 5 * GIB
    assert collected.flushes == 0


def test_the_threshold_does_nothing_without_a_limit() -> None:
    """As in torch: without a memory fraction there is nothing to take a share of."""
    assert dense_ramp(Allocator(gc_threshold=0.5)).reserved_peak_bytes == dense_ramp(Allocator()).reserved_peak_bytes


def test_a_chunk_that_follows_the_budget_reserves_less() -> None:
    """DynChunk's sizes stop the growth of untiled scores where the budget begins to bind."""
    limits = Budget(200_000_000, "prefix", page=64, chunk_min=256, chunk_max=2048)

    def untiled() -> Reserve:
        prefix, chunks = 0, []
        while prefix < 262_144:
            rows = chunk_tokens(limits, prefix)
            prefix += rows
            chunks.append([4 * rows * prefix])
        return ramp(chunks)

    static = ramp([4 * rows * keys] for rows, keys in static_chunks(2048, 262_144))
    assert static.reserved_bytes == 129 * GIB
    assert untiled().allocated_bytes < 0.8 * GIB
    assert untiled().reserved_bytes < static.reserved_bytes / 5


@pytest.mark.parametrize(
    ("asked_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segment_sizes(asked_bytes: int, segment_bytes: int) -> None:
    """Small requests share segments of 2 MiB, middle ones of 20; from 10 MiB on it is the own size in steps of 2."""
    device = Allocator()
    device.allocate(asked_bytes)
    assert device.reserved_bytes == segment_bytes


def test_the_smallest_block_that_fits_is_taken_and_split() -> None:
    """Best fit; a leftover of more than 1 MiB is a block of its own and joins again when its neighbour is free."""
    device = Allocator()
    large, middle = device.allocate(64 * MIB), device.allocate(32 * MIB)
    device.free(large)
    device.free(middle)
    taken = device.allocate(30 * MIB)
    assert taken.segment is middle.segment
    assert [b.size_bytes for b in taken.segment] == [30 * MIB, 2 * MIB]
    device.free(taken)
    assert [b.size_bytes for b in taken.segment] == [32 * MIB]
    assert device.allocate(31 * MIB).segment[0].size_bytes == 32 * MIB
    assert device.segments_made == 2


def test_a_split_segment_does_not_go_back() -> None:
    """One long-lived tensor inside a large block keeps all of it: why a primed block may have to be made again."""
    device = Allocator()
    primed = device.allocate(256 * MIB)
    device.free(primed)
    device.allocate(4 * MIB)
    device.empty_cache()
    assert device.reserved_bytes == 256 * MIB
    device.allocate(256 * MIB)
    assert device.reserved_bytes == 512 * MIB


def test_a_full_device_says_so() -> None:
    """Where even giving everything back is not enough, the message has both numbers."""
    device = Allocator(limit_bytes=64 * MIB)
    device.free(device.allocate(32 * MIB))
    with pytest.raises(DeviceFullError, match="67,108,864"):
        device.allocate(100 * MIB)
    assert (device.flushes, device.reserved_bytes) == (1, 0)


@pytest.mark.parametrize(
    ("keys", "limit_mib", "rows"), [(262_144, 2048, 2048), (262_144, 256, 256), (262_144, 64, 64), (262_144, 1, 4)]
)
def test_rows_of_a_tile(keys: int, limit_mib: int, rows: int) -> None:
    """The engine's own tile heights at 32 heads; a limit below one group of rows is exceeded, not kept."""
    assert tiles(2048, keys, limit_mib * MIB)[0] == rows * keys * 4
    assert sum(tiles(2048, keys, limit_mib * MIB)) == 2048 * keys * 4


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 100 * MIB)), max_size=60))
def test_nothing_is_lost_and_nothing_overlaps(steps: list[tuple[bool, int]]) -> None:
    """Whatever is taken and given back: blocks tile their segments, counters match, neighbours never both lie free."""
    device = Allocator()
    live: list[Block] = []
    segments: dict[int, list[Block]] = {}
    for give_back, size in steps:
        if give_back and live:
            device.free(live.pop(size % len(live)))
        else:
            block = device.allocate(size)
            assert size <= block.size_bytes
            live.append(block)
            segments[id(block.segment)] = block.segment
    assert device.allocated_bytes == sum(b.size_bytes for b in live)
    assert device.reserved_bytes == sum(b.size_bytes for segment in segments.values() for b in segment)
    for segment in segments.values():
        assert not any(a.free and b.free for a, b in itertools.pairwise(segment))
    for block in live:
        device.free(block)
    device.empty_cache()
    assert (device.reserved_bytes, device.allocated_bytes) == (0, 0)
