"""A model of torch's caching allocator: what a long prompt's chunks leave reserved, for each remedy.

A free block serves a request that is not larger; of several, the smallest does. Where none fits, the device is asked
for a new segment, and only when the device refuses are whole free segments given back. Each chunk of a growing prefix
asks for a little more than any block left by the chunks before it, so the reserve grows with the square of the prefix
while what is live stays small.

From the open source of the allocator (torch 2.14). The model has no other traffic, so its figures are upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dynchunk.policy import score_budget

MIB = 1 << 20
SMALL_BYTES = MIB  # up to here a request comes from the small pool, and a leftover is not split off a large block
OWN_SEGMENT_BYTES = 10 * MIB  # from here on a request gets a segment of its own size
SHARED_SEGMENT_BYTES = 20 * MIB
SMALL_SEGMENT_BYTES = 2 * MIB
SEGMENT_STEP_BYTES = 2 * MIB
SMALLEST_BLOCK_BYTES = 512

NONE = "none"
EMPTY_CACHE = "empty_cache"
PRIME = "prime"
REMEDIES = (NONE, EMPTY_CACHE, PRIME)


class DeviceFullError(MemoryError):
    """The device refuses a segment although everything free was given back."""


@dataclass(eq=False)
class Block:
    """A piece of a segment. freed_at: the number of requests before it was freed, which gives its age."""

    segment: list[Block]
    size_bytes: int
    small: bool
    free: bool = False
    freed_at: int = 0

    @property
    def whole(self) -> bool:
        """Whether it is its segment: only such blocks can go back to the device."""
        return len(self.segment) == 1


class Allocator:
    """One device's allocator. limit_bytes: the most it may reserve (a memory fraction, or what the device has).

    gc_threshold: garbage_collection_threshold, a share of the limit. Without a limit it does nothing, as in torch.
    """

    def __init__(self, limit_bytes: int | None = None, gc_threshold: float = 0.0) -> None:
        self.limit_bytes = limit_bytes
        self.gc_bytes = int(gc_threshold * limit_bytes) if limit_bytes else 0
        self.allocated_bytes = self.reserved_bytes = 0
        self.allocated_peak_bytes = self.reserved_peak_bytes = 0
        self.segments_made = 0  # cudaMalloc calls
        self.flushes = 0  # times the device refused and all that was free went back
        self._free: list[Block] = []
        self._searches = 0

    def allocate(self, size_bytes: int) -> Block:
        """Take a block. Raises DeviceFullError."""
        size = max(SMALLEST_BLOCK_BYTES, _up(size_bytes, SMALLEST_BLOCK_BYTES))
        small = size <= SMALL_BYTES
        self._searches += 1
        fitting = [b for b in self._free if b.small == small and b.size_bytes >= size]
        if fitting:
            block = min(fitting, key=lambda b: b.size_bytes)
            self._free.remove(block)
        else:
            block = self._new_segment(_segment_bytes(size), small=small)
        rest = block.size_bytes - size
        if rest >= SMALLEST_BLOCK_BYTES if small else rest > SMALL_BYTES:
            place = block.segment.index(block) + 1
            remainder = Block(block.segment, rest, small, free=True, freed_at=self._searches)
            block.segment.insert(place, remainder)
            self._free.append(remainder)
            block.size_bytes = size
        block.free = False
        self.allocated_bytes += block.size_bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache; it joins free neighbours of its segment."""
        self.allocated_bytes -= block.size_bytes
        place = block.segment.index(block)
        for neighbour in block.segment[max(0, place - 1) : place + 2]:
            if neighbour.free:
                block.size_bytes += neighbour.size_bytes
                block.segment.remove(neighbour)
                self._free.remove(neighbour)
        block.free, block.freed_at = True, self._searches
        self._free.append(block)

    def empty_cache(self) -> None:
        """Give every whole free segment back to the device."""
        for block in [b for b in self._free if b.whole]:
            self._release(block)

    def _new_segment(self, size_bytes: int, *, small: bool) -> Block:
        if self.gc_bytes:
            self._collect_garbage()
        if not self._fits(size_bytes):
            self.flushes += 1
            self.empty_cache()
            if not self._fits(size_bytes):
                raise DeviceFullError(
                    f"a segment of {size_bytes:,} bytes on top of {self.reserved_bytes:,} reserved exceeds "
                    f"the limit of {self.limit_bytes:,}"
                )
        self.segments_made += 1
        self.reserved_bytes += size_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)
        block = Block([], size_bytes, small)
        block.segment.append(block)
        return block

    def _fits(self, size_bytes: int) -> bool:
        return self.limit_bytes is None or self.reserved_bytes + size_bytes <= self.limit_bytes

    def _collect_garbage(self) -> None:
        """Above the threshold, give back what has lain free for longer than the average."""
        excess = self.reserved_bytes - self.gc_bytes
        while excess > 0:
            whole = [b for b in self._free if b.whole and not b.small]
            if not whole:
                return
            mean_age = sum(self._searches - b.freed_at for b in whole) / len(whole)
            for block in [b for b in whole if self._searches - b.freed_at >= mean_age]:
                excess -= block.size_bytes
                self._release(block)

    def _release(self, block: Block) -> None:
        self._free.remove(block)
        self.reserved_bytes -= block.size_bytes


@dataclass(frozen=True)
class Reserve:
    """What a ramp took at its peak, in bytes, and what it cost: segments_made are calls to the device."""

    allocated_bytes: int
    reserved_bytes: int
    segments_made: int
    flushes: int


def ramp(
    chunks: Iterable[Iterable[int]],
    *,
    remedy: str = NONE,
    prime_bytes: int = 0,
    held_bytes: int = 0,
    limit_bytes: int | None = None,
    gc_threshold: float = 0.0,
) -> Reserve:
    """Run a prompt's chunks: each is the sizes in bytes of buffers that follow one another, as `tiles` gives them.

    remedy: NONE; EMPTY_CACHE after each chunk; PRIME with one block of prime_bytes before the first. held_bytes: live
    beside the buffers throughout. limit_bytes and gc_threshold as in Allocator. Raises DeviceFullError where even one
    buffer does not fit.
    """
    device = Allocator(limit_bytes, gc_threshold)
    if held_bytes:
        device.allocate(held_bytes)
    if remedy == PRIME:
        device.free(device.allocate(prime_bytes))
    for sizes in chunks:
        for size_bytes in sizes:
            device.free(device.allocate(size_bytes))
        if remedy == EMPTY_CACHE:
            device.empty_cache()
    return Reserve(device.allocated_peak_bytes, device.reserved_peak_bytes, device.segments_made, device.flushes)


def tiles(rows: int, keys: int, score_limit_bytes: int, *, heads: int = 32) -> list[int]:
    """The bytes of each tile of scores of a chunk of `rows` against `keys`, as SGLang 0.5.21 and later cuts them.

    A tile has whole groups of 128 / heads rows, one group at least, and otherwise fits the limit.
    """
    row_bytes = score_budget.row_bytes(keys)
    tile = score_budget.rows_per_tile(score_limit_bytes, keys, heads)
    return [min(tile, rows - start) * row_bytes for start in range(0, rows, tile)]


def static_chunks(rows: int, last_keys: int) -> Iterator[tuple[int, int]]:
    """(rows, visible keys) of each chunk of a prompt of last_keys tokens in chunks of one size."""
    for start in range(0, last_keys, rows):
        new = min(rows, last_keys - start)
        yield new, start + new


def _segment_bytes(size_bytes: int) -> int:
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < OWN_SEGMENT_BYTES:
        return SHARED_SEGMENT_BYTES
    return _up(size_bytes, SEGMENT_STEP_BYTES)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
