"""The budget rule: how many new tokens may run on top of how long a prefix.

One prefill forward of T new tokens on L cached ones holds about c * T * L bytes for a moment (the sparse indexer
scores every new row against every key), so T * L is bounded by a budget in token^2. All arithmetic is exact integers:
every rank of a fleet must come to the same size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

PREFIX = "prefix"  # T * L <= budget: the keys a chunk finds
SEQUENCE = "sequence"  # T * (L + T) <= budget: the chunk's own rows as well


@dataclass(frozen=True)
class Budget:
    """The rule's parameters, already checked: `page` divides `chunk_min` and `chunk_max`, and neither is below it.

    budget: token^2. page, chunk_min, chunk_max: tokens. rule: PREFIX or SEQUENCE.
    """

    budget: int
    rule: str
    page: int
    chunk_min: int
    chunk_max: int


def rows_within(limits: Budget, prefix_tokens: int) -> int | None:
    """The most rows the budget itself allows on `prefix_tokens`; None where it does not limit. Rounds down."""
    if limits.rule == SEQUENCE:
        # Largest T with T * (L + T) <= B, from T = (sqrt(L^2 + 4B) - L) / 2. With s = isqrt of the discriminant,
        # (s - L) // 2 is exact: the real root lies in [(s - L) / 2, (s + 1 - L) / 2).
        return (isqrt(prefix_tokens * prefix_tokens + 4 * limits.budget) - prefix_tokens) // 2
    return limits.budget // prefix_tokens if prefix_tokens else None


def chunk_tokens(limits: Budget, prefix_tokens: int) -> int:
    """New tokens for the next chunk of a request with `prefix_tokens` already computed: a whole number of pages."""
    rows = rows_within(limits, prefix_tokens)
    if rows is None:
        return limits.chunk_max
    return min(max(rows // limits.page * limits.page, limits.chunk_min), limits.chunk_max)


def end_aligned(chunk: int, prefix_tokens: int, align: int) -> int:
    """`chunk` shortened so that prefix + chunk is a multiple of `align`; at least 1 when chunk >= align."""
    return (prefix_tokens + chunk) // align * align - prefix_tokens


def cost(limits: Budget, prefix_tokens: int, rows: int) -> int:
    """What the rule compares with the budget, in token^2."""
    keys = prefix_tokens + rows if limits.rule == SEQUENCE else prefix_tokens
    return rows * keys


def last_prefix_within(limits: Budget) -> int:
    """The longest prefix on which the floor still keeps the budget; negative where it never does."""
    longest = limits.budget // limits.chunk_min
    return longest - limits.chunk_min if limits.rule == SEQUENCE else longest


def most_pairs(chunk: Callable[[int], int], prompt_tokens: int) -> int:
    """The most new tokens x (prefix and new tokens) of any chunk of a prompt. chunk: prefix -> tokens of its chunk."""
    most = prefix = 0
    while prefix < prompt_tokens:
        tokens = min(max(1, chunk(prefix)), prompt_tokens - prefix)
        prefix += tokens
        most = max(most, tokens * prefix)
    return most


def own_rows(limits: Budget, static_tokens: int) -> int:
    """token^2 by which a batch's rows x (prefix + own rows) can exceed the budget under the prefix rule.

    A batch of several requests has up to static_tokens rows, each of which sees at most chunk_max of its own request's.
    """
    return 0 if limits.rule == SEQUENCE else static_tokens * limits.chunk_max


def worst_overshoot(limits: Budget) -> Fraction:
    """How far rows x (prefix + rows) can exceed the budget under the prefix rule, floor left out, as a share of it.

    For a size T the worst prefix is the longest on which T is chosen, budget // T, which gives B + T^2 at the most;
    that grows with T, so the largest size decides.
    """
    if limits.rule == SEQUENCE:
        return Fraction(0)
    rows = limits.chunk_max
    return max(Fraction(0), Fraction(rows * (limits.budget // rows + rows), limits.budget) - 1)
