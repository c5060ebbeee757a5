"""What one batch may hold: the budget applied to many requests at once.

The rule bounds (new tokens of the batch) x (longest prefix in it); under the sequence rule, x (longest prefix + own new
tokens). A request changes both factors, so what fits is found from both, in exact integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from dynchunk.policy.budget import SEQUENCE, Budget, end_aligned


@dataclass(slots=True)
class Load:
    """A batch so far. rows: its new tokens. longest: its longest prefix, or prefix + new tokens, as the rule counts.

    ticks: what it takes by the latency model; 0 without one.
    """

    rows: int = 0
    longest: int = 0
    ticks: int = 0

    def add(self, limits: Budget, prefix_tokens: int, new_tokens: int, extra_rows: int = 0) -> None:
        """Take a request in. extra_rows: rows that run beside its new tokens (replays of a sliding window)."""
        self.rows += new_tokens + extra_rows
        self.longest = max(self.longest, prefix_tokens + (new_tokens if limits.rule == SEQUENCE else 0))

    def within(self, limits: Budget) -> bool:
        """Whether the batch keeps the budget."""
        return self.rows * self.longest <= limits.budget


def rows_that_fit(limits: Budget, load: Load, prefix_tokens: int, wanted: int) -> int:
    """The most new tokens, 0 to `wanted`, that a request with `prefix_tokens` may add to the batch. Rounds down."""
    rows, longest, budget = load.rows, max(load.longest, prefix_tokens), limits.budget
    if limits.rule == SEQUENCE:
        # x new tokens make the product (rows + x) * max(longest, prefix + x). Where prefix + x decides, the largest x
        # is a root of x^2 + (rows + prefix) x + rows * prefix - budget; its discriminant is the one below.
        root = (isqrt((rows - prefix_tokens) ** 2 + 4 * budget) - rows - prefix_tokens) // 2
        fits = root if prefix_tokens + root >= longest else budget // longest - rows
    elif longest:
        fits = budget // longest - rows
    else:
        return wanted
    return max(0, min(wanted, fits))


@dataclass(frozen=True)
class Cut:
    """Where a request may be cut. align: its new tokens are a multiple of this. floor: never fewer than these.

    Both in tokens, the floor a multiple of align.
    """

    align: int
    floor: int


@dataclass(slots=True)  # not frozen: one is made for every candidate, and freezing doubles its cost
class Ask:
    """A waiting request. Tokens.

    remaining: what it still has to compute. charge: what the engine takes off its chunk for all of it (whole pages).
    room: what is left of that chunk. may_cut: whether it may run in part. alone: nothing else prefills in this batch.
    """

    prefix: int
    remaining: int
    charge: int
    room: int
    may_cut: bool
    alone: bool


@dataclass(slots=True)
class Admission:
    """How much of a request may run. tokens: its new tokens at most. at_floor: they are the floor, not what fits."""

    tokens: int
    at_floor: bool = False


def admit(limits: Budget, load: Load, ask: Ask, cut: Cut) -> Admission | None:
    """How much of a waiting request may join the batch now; None if it has to wait.

    A request that is alone always gets at least the floor, or nobody would ever progress.
    """
    fits = min(rows_that_fit(limits, load, ask.prefix, ask.remaining), limits.chunk_max)
    if fits >= ask.remaining and ask.charge <= ask.room:
        return Admission(ask.remaining)
    if not ask.may_cut:
        return None
    room = ask.room // cut.align * cut.align
    tokens = min(fits // cut.align * cut.align, room)
    # Where the engine's own chunk is what limits, its cut stands, however small.
    least = min(cut.floor, room) if fits >= min(ask.room, ask.remaining) else cut.floor
    if tokens >= max(least, cut.align):
        return Admission(tokens)
    if not ask.alone:
        return None
    # Decoding rows may leave less of the engine's chunk than one step; its own cut stands then, however small.
    return Admission(min(cut.floor, room or ask.room, ask.remaining), at_floor=True)


def continue_chunk(limits: Budget, load: Load, prefix_tokens: int, remaining: int, cut: Cut) -> Admission:
    """How much of the request that is being prefilled may run next. The cut is aligned on its absolute end."""
    fits = min(rows_that_fit(limits, load, prefix_tokens, remaining), limits.chunk_max)
    if fits >= remaining:
        return Admission(remaining)
    tokens = end_aligned(fits, prefix_tokens, cut.align)
    if tokens >= cut.floor:
        return Admission(tokens)
    return Admission(min(aligned_floor(cut, prefix_tokens), remaining), at_floor=True)


def aligned_floor(cut: Cut, prefix_tokens: int) -> int:
    """The smallest chunk on this prefix that is no smaller than the floor and ends on a boundary."""
    floor = end_aligned(cut.floor, prefix_tokens, cut.align)
    return floor if floor >= cut.floor else floor + cut.align
