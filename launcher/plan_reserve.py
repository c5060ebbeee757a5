"""What torch's allocator keeps reserved beside what a prompt's chunks hold, by its model (policy/allocator.py).

On a GPU the driver's free memory is what is left of the reserve, not of what is live: where each chunk asks for a
little more than any block that is kept, the reserve grows although no chunk does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dynchunk.policy import allocator, paths
from dynchunk.prime_cache import resolve
from dynchunk.settings import Settings

# Each buffer is looked for among what the chunks before have left: so many steps take a few seconds.
MOST_STEPS = 3 * 10**8
WITHOUT = "without_a_remedy"
HOST_MEMORY, OWN_MEMORY = "gpu_memory_is_host_memory", "gpu_with_memory_of_its_own"


class Remedy(NamedTuple):
    """One of the allocator model's remedies, the bytes that it primes, and what it is called."""

    name: str
    prime_bytes: int
    words: str


def remedies(settings: Settings, score_limit_bytes: int) -> dict[str, Remedy]:
    """By kind of GPU: what DYNCHUNK_EMPTY_CACHE and DYNCHUNK_PRIME_CACHE come to there."""
    found = {WITHOUT: Remedy(allocator.NONE, 0, "kept")}
    for kind in (HOST_MEMORY, OWN_MEMORY):
        chosen = resolve(settings, score_limit_bytes=score_limit_bytes, is_integrated=kind == HOST_MEMORY)
        if chosen.prime_bytes:
            found[kind] = Remedy(allocator.PRIME, chosen.prime_bytes, "primed")
        elif chosen.empty_cache == "always":
            found[kind] = Remedy(allocator.EMPTY_CACHE, 0, "released after every chunk")
        else:
            when = "released when memory is low" if chosen.empty_cache == "low" else "kept"
            found[kind] = Remedy(allocator.NONE, 0, when)
    return found


def reserved(
    cost: paths.Cost, score_limit_bytes: int, cut: Sequence[tuple[int, int]], chosen: dict[str, Remedy], base_bytes: int
) -> dict[str, int]:
    """The most that is reserved, in bytes, by the names of `remedies`; never below the most that is live.

    Empty where there are so many chunks that working it out would not end in seconds.
    cut: (rows, keys) of each chunk on one rank. base_bytes: held however small the chunk. What is live beside the
    buffers that follow one another (masks, page tables, tiles that overlap) is held throughout at its most: it is many
    small tensors, which leave less behind than one that grows would. Nothing else allocates.
    """
    buffers = sum(paths.ceil_div(rows, _tile(cost, score_limit_bytes, rows, keys)) for rows, keys in cut)
    if buffers * len(cut) > MOST_STEPS:
        return {}
    sizes = [list(_buffers(cost, score_limit_bytes, rows, keys)) for rows, keys in cut]
    beside = max(
        (paths.transient_bytes(cost, rows, keys) - max(each) for (rows, keys), each in zip(cut, sizes, strict=True)),
        default=0,
    )
    return {
        kind: allocator.ramp(
            sizes, remedy=remedy.name, prime_bytes=remedy.prime_bytes, held_bytes=base_bytes + max(beside, 0)
        ).reserved_bytes
        for kind, remedy in chosen.items()
    }


def _buffers(cost: paths.Cost, score_limit_bytes: int, rows: int, keys: int) -> Iterator[int]:
    """The buffers of one chunk that follow one another: one for all of it, or one for each tile of scores."""
    if cost.bound_bytes is None:
        yield paths.transient_bytes(cost, rows, keys)
        return
    tile = _tile(cost, score_limit_bytes, rows, keys)
    for start in range(0, rows, tile):
        yield paths.part_bytes(_scores(cost), min(tile, rows - start), keys)


def _tile(cost: paths.Cost, score_limit_bytes: int, rows: int, keys: int) -> int:
    """How many rows of a chunk are scored at once."""
    if cost.bound_bytes is None:
        return rows
    return max(1, score_limit_bytes // paths.part_bytes(_scores(cost), 1, keys))


def _scores(cost: paths.Cost) -> paths.Part:
    return cost.parts[0] if cost.parts else paths.SCORES
