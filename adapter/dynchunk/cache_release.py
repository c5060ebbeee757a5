"""When the caching allocator's unused memory goes back to the device.

After a chunk the allocator keeps the chunk's score buffers. The next chunk's are a little larger, so none of the kept
blocks serves them and the reserve grows. Releasing is not free (the next chunk allocates anew; it has cost 20 % of a
50k prefill), so it follows a policy, and it happens just before the next launch rather than after the chunk: right
after a launch it would wait for the GPU. A prefill that nothing follows is released from the idle loop.

The decision reads local memory and may differ from rank to rank: it changes when a rank launches, never what.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

GIB = 1 << 30
# Below this there is nothing worth a device synchronisation to give back.
WORTH_RELEASING_BYTES = 64 << 20


class Device(Protocol):
    """What the policy needs to know of one device. Bytes."""

    def available_bytes(self) -> int:
        """Memory that could still be allocated: MemAvailable where host and GPU share it."""

    def unused_reserved_bytes(self) -> int:
        """What the allocator holds and nothing uses: the most that a release can give back."""

    def must_not_release(self) -> bool:
        """Whether the device is in a state that a release would break: graph capture, a paused engine."""

    def empty_cache(self) -> None:
        """Give the allocator's unused memory back."""


@dataclass
class CacheRelease:
    """One scheduler's release policy and its counters.

    mode: `always` or `low`. min_tokens: the longest sequence of a prefill from which on it counts. below_bytes: what
    `low` means. calls, ms: what releasing has cost so far.
    """

    device: Device
    mode: str
    min_tokens: int
    below_bytes: int
    clock: Callable[[], float] = time.perf_counter
    calls: int = 0
    ms: float = 0.0
    _due: bool = False

    def after_forward(self, longest_tokens: int) -> None:
        """Note a launched prefill. longest_tokens: the longest sequence in it, prefix and new tokens."""
        if longest_tokens >= self.min_tokens:
            self._due = True

    def before_launch(self) -> None:
        """Release if a long prefill went before. Called before each launch, and over and over while idle."""
        if not self._due or self.device.must_not_release():
            return
        self._due = False
        if self.device.unused_reserved_bytes() < WORTH_RELEASING_BYTES:
            return
        if self.mode == "low" and self.device.available_bytes() >= self.below_bytes:
            return
        start = self.clock()
        self.device.empty_cache()
        self.ms += (self.clock() - start) * 1000
        self.calls += 1
