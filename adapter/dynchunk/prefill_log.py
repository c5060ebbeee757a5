"""How long prefills go: where the one in flight stands, and one line in the log when it has finished.

Fed by the admission of each chunk, and told when prefills have run:

    log = PrefillLog(journal.say)
    log.chunk("r1", prefix=0, new=2048, total=4000, bound="the largest chunk")
    log.chunk("r1", prefix=2048, new=1952, total=4000, bound="")
    log.ran(prefill, ms)       # a listener (in_force.listeners); says the line once the last chunk has run
    log.when_idle()            # in_force.when_idle; a prefill that was aborted ends here at the latest

It decides nothing. The engine has one unfinished request at a time, so there is one to follow.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynchunk.policy.budget import Budget

# What can set a chunk's size, in words for the log.
LARGEST = "the largest chunk"
BUDGET = "the budget"
FLOOR = "the floor"
TIME = "time"
# Shorter ones are not worth a line.
LONG_TOKENS = 8192


class Prefill(Protocol):
    """What is needed of a prefill that has run. reqs: (request id, prefix, new tokens)."""

    @property
    def reqs(self) -> Sequence[tuple[str, int, int]]:
        """The rows of its batch."""


@dataclass
class Running:
    """A prefill of several chunks. Tokens; start_s and last_s: the clock's time of the first and the newest chunk."""

    rid: str
    cached: int
    done: int
    total: int
    start_s: float
    last_s: float
    chunks: int = 0
    smallest: int = 0
    largest: int = 0
    bounds: Counter[str] = field(default_factory=Counter)

    def add(self, new: int, bound: str) -> None:
        """One more chunk."""
        self.done += new
        self.chunks += 1
        self.smallest = min(self.smallest, new) if self.smallest else new
        self.largest = max(self.largest, new)
        if bound:
            self.bounds[bound] += 1


def bound_of(limits: Budget, cap: int | None, *, new: int, remaining: int, at_floor: bool) -> str:
    """What set the size of a chunk; empty where the prompt ended there.

    cap: the most that time allowed, None without a latency model. new, remaining: tokens. at_floor: the floor ran.
    """
    if new >= remaining:
        return ""
    if at_floor:
        return FLOOR
    if cap is not None and cap < limits.chunk_max and new >= cap // limits.page * limits.page:
        return TIME
    return LARGEST if new >= limits.chunk_max else BUDGET


class PrefillLog:
    """Follows the long prefill in flight. say: gets the line; None on ranks that do not report."""

    def __init__(self, say: Callable[[str], None] | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.running: Running | None = None
        self._say = say
        self._clock = clock
        # The last chunk is launched, but has not been seen to have run.
        self._ending: Running | None = None

    def chunk(self, rid: str, prefix: int, new: int, total: int, bound: str) -> None:
        """A chunk of a request was admitted: `new` tokens on `prefix` of `total`; bound: see bound_of."""
        now_s = self._clock()
        running = self.running
        if running is None or running.rid != rid or running.done != prefix:
            if prefix + new >= total:
                return  # whole
            if running is not None and running.rid != rid:
                self._say_ended(running)
            running = self.running = Running(rid, prefix, prefix, total, now_s, now_s)
        running.add(new, bound)
        running.last_s = now_s
        if running.done >= total:
            self.running, self._ending = None, running

    def ran(self, prefill: Prefill, _ms: float) -> None:
        """A prefill has run on the device."""
        ending = self._ending
        if ending is None:
            return
        if any(rid == ending.rid and prefix + new >= ending.total for rid, prefix, new in prefill.reqs):
            self._end()

    def when_idle(self) -> None:
        """Nothing runs: what has not finished never will."""
        if self._ending is not None:
            self._end()
        if self.running is not None:
            self._say_ended(self.running)
            self.running = None

    def elapsed_s(self) -> float:
        """Since the first chunk of the prefill in flight; 0 without one."""
        return self._clock() - self.running.start_s if self.running is not None else 0.0

    def _end(self) -> None:
        ended, self._ending = self._ending, None
        if ended is not None and self._say is not None and ended.done - ended.cached >= LONG_TOKENS:
            self._say(finished(ended, self._clock() - ended.start_s))

    def _say_ended(self, running: Running) -> None:
        if self._say is not None and running.done - running.cached >= LONG_TOKENS:
            self._say(
                f"request {running.rid}: prefill ended at {running.done:,} of {running.total:,} tokens, after "
                f"{running.chunks:,} chunks and {running.last_s - running.start_s:.1f} s"
            )


def finished(ended: Running, seconds: float) -> str:
    """The line for a prefill that has run to its end."""
    computed = ended.total - ended.cached
    sizes = f"{ended.smallest:,}" if ended.smallest == ended.largest else f"{ended.smallest:,} to {ended.largest:,}"
    rate = f", {computed / seconds:,.0f} tokens/s" if seconds > 0 else ""
    why = ", ".join(f"{bound} {count:,}x" for bound, count in ended.bounds.most_common())
    return (
        f"request {ended.rid}: prefill of {ended.total:,} tokens, {ended.cached:,} of them cached, in {ended.chunks:,} "
        f"chunks of {sizes}, {seconds:.1f} s{rate}" + (f"; bounded by {why}" if why else "")
    )
