"""The sweep that the latency model is learned from: what every rank knows of it. Integers and counts only.

While calibrating, every other long request runs in a quarter of the chunks that the memory rule allows: one size cannot
tell the coefficients apart. Which request runs in which is decided here, from what all ranks know alike: how many long
requests have begun, and the updates that came down the request stream. What is measured, and what follows from it, is
the entry rank's (learner.py); it reaches the ranks, its own included, as an Update.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynchunk.policy.latency import Model

LONG_CHUNKS = 2
PARTS = (4, 2)


def is_long(remaining: int, chunk: int) -> bool:
    """Whether a request takes part in the sweep: it has several chunks of the allowed size before it."""
    return remaining >= LONG_CHUNKS * chunk


def arm(ordinal: int, chunk: int, floor: int, align: int) -> int:
    """The chunk that the ordinal-th long request runs while calibrating, where the memory rule allows `chunk`. Tokens.

    Even ones run what is allowed, odd ones a quarter of it; half where a quarter is below the floor, and the whole
    where half is. Never more than `chunk`, and so always within the memory rule.
    """
    if ordinal % 2 == 0:
        return chunk
    for parts in PARTS:
        part = chunk // parts // align * align
        if part >= max(floor, 1):
            return part
    return chunk


def why_no_sweep(chunk_max: int, floor: int, align: int) -> str | None:
    """Why these sizes leave nothing to learn from; None if they do. The same on every rank: no update is needed."""
    if arm(1, chunk_max, floor, align) < chunk_max:
        return None
    return f"half of the largest chunk ({chunk_max:,}) is below the smallest ({floor:,}), so there is only one size"


@dataclass(frozen=True)
class Update:
    """What the entry rank concluded, for all ranks.

    model: to be used from now on, or None. calibrating: whether the sweep goes on; never with a model, and with
    neither chunks are sized by memory alone. reason: one sentence for the log.
    """

    model: Model | None
    calibrating: bool
    reason: str


@dataclass
class Shared:
    """The state of the sweep. All ranks call the same methods in the same order."""

    calibrating: bool = True
    model: Model | None = None
    long_requests: int = 0

    def begin(self) -> int:
        """A long request begins: its ordinal."""
        self.long_requests += 1
        return self.long_requests - 1

    def adopt(self, update: Update) -> None:
        """An update has arrived in the request stream."""
        self.calibrating, self.model = update.calibrating, update.model
