"""Whether the ramp may go on: a pure function of memory readings and limits.

MemAvailable alone decides. MemFree is recorded, but a page cache that fills it is no danger, so it never aborts.

Two rules. The line: below the guard, abort. The fall: memory that falls too fast for the line to be in time (an abort
takes effect only when the chunk in flight ends) aborts above it. A chunk's own transient falls fast as well and comes
back; what tells them apart is that a transient is either over at once or smaller than `fall_bytes`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30
WARN_MARGIN_BYTES = GIB // 2
_PARTS = 4  # a fall is steady if it goes on in each quarter of the time looked at
_SLACK = 0.05  # samples do not come to the millisecond


class Action(enum.Enum):
    """What the guard does about the newest reading."""

    CONTINUE = "continue"
    WARN = "warn"
    ABORT = "abort"


class Sample(NamedTuple):
    """One reading of /proc/meminfo. t_s: unix seconds."""

    t_s: float
    available_bytes: int
    free_bytes: int
    swap_free_bytes: int


@dataclass(frozen=True)
class Limits:
    """The lines. A fall counts when `fall_bytes` went in `fall_s` and the guard is less than `horizon_s` away.

    The default of fall_bytes is above what one chunk takes under the default budget (2.5 to 3 GB were measured).
    """

    guard_bytes: int
    warn_bytes: int
    horizon_s: float = 3.0
    fall_s: float = 2.0
    fall_bytes: int = 4 * GIB

    @classmethod
    def at(cls, guard_bytes: int) -> Limits:
        """A guard with the usual margin of warning above it."""
        return cls(guard_bytes, guard_bytes + WARN_MARGIN_BYTES)


class Decision(NamedTuple):
    """What to do, and why in words for the report."""

    action: Action
    reason: str


def decide(samples: Sequence[Sample], limits: Limits) -> Decision:
    """The verdict on the newest of `samples` (oldest first; older ones matter only for the fall)."""
    if not samples:
        return Decision(Action.CONTINUE, "nothing read yet")
    now = samples[-1].available_bytes
    if now < limits.guard_bytes:
        return Decision(Action.ABORT, f"MemAvailable {gib(now)} is below the guard of {gib(limits.guard_bytes)}")
    fall_bytes, slowest_bytes_per_s = _steady_fall(samples, limits.fall_s)
    if fall_bytes >= limits.fall_bytes and slowest_bytes_per_s > 0:
        left_s = (now - limits.guard_bytes) / slowest_bytes_per_s
        if left_s < limits.horizon_s:
            return Decision(
                Action.ABORT,
                f"MemAvailable {gib(now)} fell by {gib(fall_bytes)} in {limits.fall_s:g} s: "
                f"{left_s:.1f} s to the guard of {gib(limits.guard_bytes)}",
            )
    if now < limits.warn_bytes:
        return Decision(Action.WARN, f"MemAvailable {gib(now)} is close to the guard of {gib(limits.guard_bytes)}")
    return Decision(Action.CONTINUE, "")


def projected_low_bytes(taken: Sequence[tuple[int, int]], next_tokens: int, available_bytes: int) -> int | None:
    """MemAvailable at the worst moment of the next size, on the line through the two sizes before it.

    taken: (size in tokens, bytes that MemAvailable fell by) of the sizes that passed, smallest first. None: too few.
    """
    if len(taken) < 2:
        return None
    (size_a, bytes_a), (size_b, bytes_b) = taken[-2:]
    slope = max(0.0, (bytes_b - bytes_a) / (size_b - size_a))
    return available_bytes - round(bytes_b + slope * (next_tokens - size_b))


def gib(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / GIB:.2f} GiB"


def _steady_fall(samples: Sequence[Sample], fall_s: float) -> tuple[int, float]:
    """(bytes fallen in the last fall_s, bytes per second in its slowest quarter); zeros where too little is known."""
    newest_s = samples[-1].t_s
    first = len(samples) - 1
    while first > 0 and newest_s - samples[first - 1].t_s <= fall_s * (1 + _SLACK):
        first -= 1
    window = samples[first:]
    span_s = newest_s - window[0].t_s
    if span_s < fall_s * (1 - _SLACK):
        return 0, 0.0
    marks = [_available_at(window, window[0].t_s + span_s * part / _PARTS) for part in range(_PARTS + 1)]
    slowest = min(earlier - later for earlier, later in itertools.pairwise(marks))
    return round(marks[0] - marks[-1]), slowest / (span_s / _PARTS)


def _available_at(window: Sequence[Sample], t_s: float) -> float:
    """MemAvailable at t_s, on the straight line between the readings around it."""
    for before, after in itertools.pairwise(window):
        if before.t_s <= t_s <= after.t_s and after.t_s > before.t_s:
            share = (t_s - before.t_s) / (after.t_s - before.t_s)
            return before.available_bytes + share * (after.available_bytes - before.available_bytes)
    return float(window[-1].available_bytes)
