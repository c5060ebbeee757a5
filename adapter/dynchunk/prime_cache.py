"""One block in the allocator's cache that every later tile of scores is served from.

Each chunk of a growing prefix asks for a little more than any block left by the chunks before it, so the reserve grows
although the tiles keep their limit (policy/allocator.py has the figures). One block of the limit's size, allocated and
freed before the first of them, serves them all. A long-lived tensor may take a piece of it; the next whole tile then
makes the reserve grow once more, which is the sign to prime again.

A block belongs to the stream it was allocated on, and graph capture has a pool of its own, so priming happens at the
first prefill's launch, inside the model runner's forward. Only local memory is read: a rank's sizes never depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from dynchunk.settings import Settings

MIB = 1 << 20
# Should the block be taken apart again and again, making it anew would be the growth it is there to prevent.
MOST_BLOCKS = 4


class Device(Protocol):
    """What priming needs to know of one device. Bytes."""

    def reserved_peak_bytes(self) -> int:
        """The most the allocator has ever held."""

    def must_not_release(self) -> bool:
        """Graph capture or a paused engine: no allocation of ours then."""

    def allocate_and_free(self, size_bytes: int) -> None:
        """One block, on the current stream. Raises where the device has none left."""


@dataclass
class PrimeCache:
    """One scheduler's primed block and its counters. An observer of forwards (before, after).

    blocks: how many primings of `calls` took new memory from the device; the others found the block in its place. ms:
    what priming has cost. gave_up: why it ended, or empty.
    """

    name: ClassVar[str] = "prime_cache"
    device: Device
    size_bytes: int
    clock: Callable[[], float] = time.perf_counter
    calls: int = 0
    blocks: int = 0
    ms: float = 0.0
    gave_up: str = ""
    _peak_bytes: int = -1

    def before(self, prefill: object | None) -> None:
        """Prime before the launch of a prefill, if that was not done yet or the reserve has grown since."""
        if prefill is None or self.gave_up or self.device.must_not_release():
            return
        before_bytes = self.device.reserved_peak_bytes()
        if before_bytes <= self._peak_bytes:
            return
        if self.blocks == MOST_BLOCKS:
            self.gave_up = f"{MOST_BLOCKS} blocks were taken apart by tensors that stay"
            return
        start = self.clock()
        try:
            self.device.allocate_and_free(self.size_bytes)
        except Exception as error:  # out of memory: the engine may still find room for less
            self.gave_up = f"no block of {self.size_bytes // MIB:,} MiB: {error!r}"
            return
        self.ms += (self.clock() - start) * 1000
        self.calls += 1
        # Priming itself may have made the reserve grow.
        self._peak_bytes = self.device.reserved_peak_bytes()
        self.blocks += self._peak_bytes > before_bytes

    def after(self, prefill: object) -> None:
        """Nothing: the next launch sees what this one has done to the reserve."""

    def state(self) -> dict[str, Any]:
        """For /server_info, as plain JSON values."""
        return {
            "bytes": self.size_bytes,
            "calls": self.calls,
            "blocks": self.blocks,
            "ms": round(self.ms, 1),
            "gave_up": self.gave_up,
        }


@dataclass(frozen=True)
class Remedy:
    """What keeps the reserve from growing: prime_bytes (0: nothing is primed) and the release mode in force."""

    prime_bytes: int
    empty_cache: str
    reason: str


def resolve(settings: Settings, *, score_limit_bytes: int, is_integrated: bool) -> Remedy:
    """Fit DYNCHUNK_PRIME_CACHE and DYNCHUNK_EMPTY_CACHE to each other and to the device.

    score_limit_bytes: the largest score limit in force, 0 where this model has none. is_integrated: GPU memory is host
    memory, where `auto` releases after every chunk. That would give the primed block back: of two `auto` the release
    stays, a size by name turns it into `low`, and both by name are refused by the settings.
    """
    wanted, released = settings.prime_cache, settings.empty_cache
    release = ("always" if is_integrated else "low") if released == "auto" else released
    if wanted == "off":
        return Remedy(0, release, "DYNCHUNK_PRIME_CACHE=off")
    if wanted == "auto" and release == "always":
        return Remedy(0, release, "cached memory is released after every chunk, which would give the block back")
    if wanted == "auto":
        if score_limit_bytes == 0:
            return Remedy(0, release, "no score limit is in force, so there is no size to prime")
        return Remedy(score_limit_bytes, release, f"{score_limit_bytes // MIB:,} MiB, the score limit in force")
    size_bytes = int(wanted) * MIB
    return Remedy(size_bytes, "low" if released == "auto" else release, f"{size_bytes // MIB:,} MiB")
