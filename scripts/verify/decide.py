"""Whether the host is in danger: a pure function of memory readings and limits, so that any record can be replayed.

MemAvailable decides. MemFree is recorded, but a page cache that fills it is no danger, so it never aborts.

- **The line.** Below the guard: abort.
- **The fall.** An abort takes effect only when the chunk in flight ends, so memory that falls too fast for the line to
  be in time aborts above it. A chunk's own transient falls fast as well and comes back; what tells them apart is that
  a transient is either over at once or smaller than `fall_bytes`.
- **The votes.** Close to the guard, two of three signs of distress abort: out-of-memory lines of the kernel, tasks that
  wait for memory, pages that come back from swap. Each of them is seen on healthy machines too, so one is not enough,
  and far from the guard none counts.
- **The escalation.** Below the guard for `escalate_s` although requests were aborted: the engine itself has to go.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

GIB = 2**30
ORDINARY_GUARD_BYTES = 3 * GIB // 2  # of a host that serves, where nobody says otherwise
WARN_MARGIN_BYTES = GIB // 2
# While an engine starts, its KV cache takes tens of GiB in seconds as a matter of course. What is left after that
# differs from machine to machine; above this much a fall does not count yet.
START_FALL_BELOW_BYTES = 16 * GIB
START, LOAD, RAMP, IDLE = PHASES = ("start", "load", "ramp", "idle")
_STARTING = (START, LOAD)

# What is judged, in words: the host's, or what it would be without the other programs on it (own_memory.py).
HOST_FIGURE = "MemAvailable"
OWN_FIGURE = "MemAvailable (engine alone)"

ESCALATE_S = 5.0
VOTES_S = 10.0
VOTES_NEEDED = 2
VOTE_PSI_FULL_PERCENT = 20.0
VOTE_SWAP_IN_PAGES_PER_S = 1_000

_PARTS = 4  # a fall is steady if it goes on in each quarter of the time looked at
_SLACK = 0.05  # samples do not come to the millisecond


class Action(enum.Enum):
    """What to do about the newest reading, mildest first."""

    CONTINUE = "continue"
    WARN = "warn"
    ABORT = "abort"
    ESCALATE = "escalate"

    @property
    def severity(self) -> int:
        """0 is the mildest."""
        return list(Action).index(self)


class Sample(NamedTuple):
    """One reading of the host. t_s: seconds on any clock that only goes forward.

    swap_in_pages, kernel_oom: pages swapped in, and out-of-memory kills and lines of the kernel, since some time before
    the first sample. psi_full_avg10: percent of the last 10 s in which every task waited for memory. running: requests
    that the engine was working on. host_available_bytes: where another figure than the host's MemAvailable is judged
    (own_memory.py), the host's as well; `available_bytes` is the one that is judged. None: not known.
    """

    t_s: float
    available_bytes: int
    free_bytes: int
    swap_in_pages: int = 0
    psi_full_avg10: float | None = None
    kernel_oom: int = 0
    running: int | None = None
    phase: str = RAMP
    host_available_bytes: int | None = None

    @property
    def figure(self) -> str:
        """What `available_bytes` is."""
        host = self.host_available_bytes
        in_danger_itself = host is not None and host == self.available_bytes < ORDINARY_GUARD_BYTES
        return HOST_FIGURE if host is None or in_danger_itself else OWN_FIGURE


@dataclass(frozen=True)
class Limits:
    """The lines of one phase. A fall counts when `fall_bytes` went in `fall_s`, less than `horizon_s` are left to the
    guard, and MemAvailable is below `fall_below_bytes` (None: wherever it is).

    The default of fall_bytes is above what one chunk takes under the default budget (2.5 to 3 GB were measured).
    escalate_s: how long an abort is given; 0 where there is nothing to abort.
    """

    guard_bytes: int
    warn_bytes: int
    horizon_s: float = 3.0
    fall_s: float = 2.0
    fall_bytes: int = 4 * GIB
    fall_below_bytes: int | None = None
    escalate_s: float = ESCALATE_S

    @classmethod
    def at(cls, guard_bytes: int) -> Limits:
        """For an engine that serves: a guard with the usual margin of warning above it."""
        return cls(guard_bytes, guard_bytes + WARN_MARGIN_BYTES)

    @classmethod
    def starting(cls, guard_bytes: int) -> Limits:
        """For an engine that starts: there is no request yet that could be aborted."""
        return cls(
            guard_bytes,
            guard_bytes + WARN_MARGIN_BYTES,
            fall_below_bytes=max(START_FALL_BELOW_BYTES, guard_bytes),
            escalate_s=0.0,
        )


def by_phase(guard_bytes: int, start_guard_bytes: int, escalate_s: float = ESCALATE_S) -> dict[str, Limits]:
    """The limits of every phase."""
    starting = Limits.starting(start_guard_bytes)
    serving = dataclasses.replace(Limits.at(guard_bytes), escalate_s=escalate_s)
    return {START: starting, LOAD: starting, RAMP: serving, IDLE: serving}


class Decision(NamedTuple):
    """What to do, and why in words for the report."""

    action: Action
    reason: str


def decide(samples: Sequence[Sample], limits: Limits | Mapping[str, Limits]) -> Decision:
    """The verdict on the newest of `samples` (oldest first). limits: of all phases, or of the newest sample's."""
    if not samples:
        return Decision(Action.CONTINUE, "nothing read yet")
    if not isinstance(limits, Limits):
        limits = limits[samples[-1].phase]
    now = samples[-1]
    danger = _below_the_line(now, limits) or _falling(samples, limits) or _voted(samples, limits)
    if danger:
        unheard = _unheard(samples, limits)
        return Decision(Action.ABORT, danger) if unheard is None else Decision(Action.ESCALATE, danger + unheard)
    if now.available_bytes < limits.warn_bytes:
        return Decision(Action.WARN, f"{_said(now)} is close to the guard of {gib(limits.guard_bytes)}")
    return Decision(Action.CONTINUE, "")


def gib(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / GIB:.2f} GiB"


def _said(sample: Sample) -> str:
    return f"{sample.figure} {gib(sample.available_bytes)}"


def _below_the_line(now: Sample, limits: Limits) -> str:
    if now.available_bytes >= limits.guard_bytes:
        return ""
    return f"{_said(now)} is below the guard of {gib(limits.guard_bytes)}"


def _falling(samples: Sequence[Sample], limits: Limits) -> str:
    now = samples[-1].available_bytes
    if limits.fall_below_bytes is not None and now >= limits.fall_below_bytes:
        return ""
    fall_bytes, slowest_bytes_per_s = _steady_fall(samples, limits.fall_s)
    if fall_bytes < limits.fall_bytes or slowest_bytes_per_s <= 0:
        return ""
    left_s = (now - limits.guard_bytes) / slowest_bytes_per_s
    if left_s >= limits.horizon_s:
        return ""
    return (
        f"{_said(samples[-1])} fell by {gib(fall_bytes)} in {limits.fall_s:g} s: "
        f"{left_s:.1f} s to the guard of {gib(limits.guard_bytes)}"
    )


def _voted(samples: Sequence[Sample], limits: Limits) -> str:
    now = samples[-1]
    if now.available_bytes >= limits.warn_bytes:
        return ""
    window = _since(samples, now.t_s - VOTES_S)
    before, span_s = window[0], now.t_s - window[0].t_s
    votes = []
    if now.kernel_oom > before.kernel_oom:
        votes.append("the kernel reports that it is out of memory")
    if now.psi_full_avg10 is not None and now.psi_full_avg10 >= VOTE_PSI_FULL_PERCENT:
        votes.append(f"all tasks waited for memory in {now.psi_full_avg10:.0f} % of the last 10 s")
    if span_s > 0 and (now.swap_in_pages - before.swap_in_pages) / span_s >= VOTE_SWAP_IN_PAGES_PER_S:
        votes.append(f"{(now.swap_in_pages - before.swap_in_pages) / span_s:,.0f} pages a second come back from swap")
    if len(votes) < VOTES_NEEDED:
        return ""
    return f"{_said(now)} is close to the guard of {gib(limits.guard_bytes)}, " + " and ".join(votes)


def _unheard(samples: Sequence[Sample], limits: Limits) -> str | None:
    """Why an abort is not enough any more; None while it may be."""
    if limits.escalate_s == 0:
        return "; there is no request to abort"
    now = samples[-1]
    since_s = now.t_s - limits.escalate_s * (1 - _SLACK)
    window = _reaching_back(samples, since_s)
    if window[0].t_s > since_s:
        return None
    if any(sample.available_bytes >= limits.guard_bytes for sample in window):
        return None
    before = window[0].running
    if now.running == 0 or (now.running is not None and before is not None and now.running < before):
        return None  # it was heard, and memory needs its time
    return f" for {limits.escalate_s:g} s, and no request ended"


def _since(samples: Sequence[Sample], t_s: float) -> Sequence[Sample]:
    """The newest samples, from t_s on; at least one."""
    first = len(samples) - 1
    while first > 0 and samples[first - 1].t_s >= t_s:
        first -= 1
    return samples[first:]


def _reaching_back(samples: Sequence[Sample], t_s: float) -> Sequence[Sample]:
    """The newest samples, back to the last one at or before t_s; all where there is none.

    On a host that is about to freeze readings come late: none need be within a span of t_s.
    """
    window = _since(samples, t_s)
    return window if window[0].t_s == t_s else samples[-len(window) - 1 :]


def _steady_fall(samples: Sequence[Sample], fall_s: float) -> tuple[int, float]:
    """(bytes fallen in the last fall_s, bytes per second in its slowest quarter); zeros where too little is known."""
    now_s = samples[-1].t_s
    window = _since(samples, now_s - fall_s * (1 + _SLACK))
    if now_s - window[0].t_s < fall_s * (1 - _SLACK):
        window = _reaching_back(samples, now_s - fall_s)
    # What an engine took while it started is not falling any more once it serves.
    serving = window[-1].phase not in _STARTING
    window = [sample for sample in window if (sample.phase not in _STARTING) == serving]
    from_s = max(window[0].t_s, now_s - fall_s * (1 + _SLACK))
    span_s = now_s - from_s
    if span_s < fall_s * (1 - _SLACK):
        return 0, 0.0
    marks = [_available_at(window, from_s + span_s * part / _PARTS) for part in range(_PARTS + 1)]
    slowest = min(earlier - later for earlier, later in itertools.pairwise(marks))
    return round(marks[0] - marks[-1]), slowest / (span_s / _PARTS)


def _available_at(window: Sequence[Sample], t_s: float) -> float:
    """MemAvailable at t_s, on the straight line between the readings around it."""
    for before, after in itertools.pairwise(window):
        if before.t_s <= t_s <= after.t_s and after.t_s > before.t_s:
            share = (t_s - before.t_s) / (after.t_s - before.t_s)
            return before.available_bytes + share * (after.available_bytes - before.available_bytes)
    return float(window[-1].available_bytes)
