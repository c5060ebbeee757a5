"""How much memory a long prefill takes for a moment: its peak less what is live when it has been launched.

What stays is not counted: the KV cache, weights, the answer. On CUDA the allocator's own counters say it; they move
when work is launched, so nothing waits for the device. Without a device the process's high-water mark does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import log2
from pathlib import Path
from typing import Protocol

from dynchunk.policy.coefficient import Fit, Forward, fit

# Forwards are kept by rows and by keys (four stretches for each doubling), so that the last long prompt does not push
# out the shapes that a line needs.
KEPT_OF_A_SHAPE = 4
SHAPES_KEPT = 256
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_HIGH_WATER = "5"  # proc(5): sets the peak to what is resident now, and nothing else


class Memory(Protocol):
    """One device's memory."""

    def mark(self) -> None:
        """From here on a new peak counts."""

    def transient_bytes(self) -> int:
        """The peak since the mark less what is live now."""


class Prefill(Protocol):
    """What is needed of a prefill. reqs: (request id, prefix, new tokens)."""

    @property
    def reqs(self) -> Sequence[tuple[str, int, int]]:
        """The rows of its batch."""


class ProcessMemory:
    """The process's resident memory, for engines without a GPU. Linux."""

    def mark(self) -> None:
        """Reset the high-water mark. Raises OSError where the kernel has no such switch."""
        _CLEAR_REFS.write_text(_RESET_HIGH_WATER, encoding="ascii")

    def transient_bytes(self) -> int:
        """VmHWM less VmRSS."""
        found = {}
        with _STATUS.open(encoding="ascii", errors="replace") as status:
            for line in status:
                name, _, rest = line.partition(":")
                if name in ("VmHWM", "VmRSS"):
                    found[name] = int(rest.split()[0]) * 1024
        return max(0, found["VmHWM"] - found["VmRSS"])


class PeakMeter:
    """Watches prefills of one request whose sequence is at least min_tokens long, and keeps the last of each shape.

    An observer of forwards (before, after). A memory that cannot be read raises, which takes the observer out.
    """

    name = "peak"

    def __init__(self, memory: Memory, min_tokens: int) -> None:
        self.memory = memory
        self.min_tokens = min_tokens
        self._by_shape: dict[tuple[int, int], deque[Forward]] = {}
        self._marked = False
        self.measured = 0  # prefills so far

    def before(self, prefill: Prefill | None) -> None:
        """Mark, if this is one to be measured."""
        self._marked = prefill is not None and self._counts(prefill)
        if self._marked:
            self.memory.mark()

    def after(self, prefill: Prefill) -> None:
        """Read the peak."""
        if not self._marked:
            return
        self._marked = False
        self.measured += 1
        [(_, prefix, rows)] = prefill.reqs
        shape = rows, round(4 * log2(prefix + rows))
        if shape not in self._by_shape and len(self._by_shape) == SHAPES_KEPT:
            del self._by_shape[next(iter(self._by_shape))]
        kept = self._by_shape.setdefault(shape, deque(maxlen=KEPT_OF_A_SHAPE))
        kept.append(Forward(rows, prefix + rows, self.memory.transient_bytes()))

    def fit(self) -> Fit:
        """What one row and key costs, from what is kept."""
        return fit(forward for kept in self._by_shape.values() for forward in kept)

    def _counts(self, prefill: Prefill) -> bool:
        # Several requests have no one number of keys; and a short prefill's peak is something else than its scores.
        return len(prefill.reqs) == 1 and prefill.reqs[0][1] + prefill.reqs[0][2] >= self.min_tokens
