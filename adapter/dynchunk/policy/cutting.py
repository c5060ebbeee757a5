"""How a prompt is cut: the smaller of what memory and latency allow, chunk by chunk or in bands of one size.

Exact integers: every rank cuts alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from dynchunk.policy import latency
from dynchunk.policy.budget import SEQUENCE, Budget, chunk_tokens, rows_within
from dynchunk.policy.latency import Model, Sizes

# A remainder below the least chunk, or no more than this part of the chunk before it, is no chunk of its own: the one
# before takes it, where memory allows, and may take as much longer, unless its time is a promise.
SMALL_PART = 8


@dataclass(frozen=True)
class Choice:
    """What latency asks of the chunks of one prompt.

    most: the largest chunk, in tokens. ceiling: the longest, in ticks; None for any. promised: the ceiling holds for
    merged remainders too. base: where above 0, chunks take as long as a first one of so many tokens (smooth as in
    latency.equal_chunk), and ceiling is what that takes.
    """

    most: int
    ceiling: int | None = None
    promised: bool = False
    base: int = 0
    smooth: Fraction = Fraction(1)


def by_memory_alone(most: int) -> Choice:
    """Latency asks for nothing."""
    return Choice(most)


def promise(most: int, ceiling: int) -> Choice:
    """No chunk takes longer than `ceiling` ticks."""
    return Choice(most, ceiling, promised=True)


def equal(model: Model, most: int, base: int, smooth: Fraction = Fraction(1)) -> Choice:
    """Chunks take as long as a first one of `base` tokens."""
    return Choice(most, latency.predict(model, 0, base), base=base, smooth=smooth)


@dataclass(frozen=True)
class Rules:
    """What a prompt is cut by: the memory rule, the model, and the sizes that latency may choose among."""

    limits: Budget
    model: Model
    allowed: Sizes


def wanted(rules: Rules, choice: Choice, prefix: int, remaining: int) -> int:
    """The most new tokens that latency wants on `prefix`; all `remaining` ones where they may run in one chunk.

    Memory has its say afterwards: what runs is the smaller of both. A remainder is merged only where memory allows it.
    """
    model, allowed = rules.model, rules.allowed
    size = min(_by_latency(model, allowed, choice, prefix), choice.most)
    remainder = remaining - size
    if remainder <= 0:
        return remaining
    small = remainder < allowed.least or remainder <= size // SMALL_PART
    merges = small and remaining <= _fits(rules.limits, prefix) and _in_time(model, choice, prefix, remaining)
    return remaining if merges else size


def _fits(limits: Budget, prefix: int) -> int:
    """The most new tokens that memory allows on `prefix`, in whatever steps."""
    rows = rows_within(limits, prefix)
    return limits.chunk_max if rows is None else min(rows, limits.chunk_max)


def _by_latency(model: Model, allowed: Sizes, choice: Choice, prefix: int) -> int:
    if choice.base:
        solved = latency.equal_chunk(model, allowed, choice.base, prefix, choice.smooth)
        return choice.most if solved is None else solved
    return choice.most if choice.ceiling is None else latency.ceiling_chunk(model, allowed, prefix, choice.ceiling)


def _in_time(model: Model, choice: Choice, prefix: int, tokens: int) -> bool:
    if choice.ceiling is None:
        return True
    slack = 0 if choice.promised else choice.ceiling // SMALL_PART
    return latency.predict(model, prefix, tokens) <= choice.ceiling + slack


def chunk(rules: Rules, choice: Choice, prefix: int, remaining: int) -> int:
    """The next chunk of a prompt that runs alone, with `prefix` tokens computed and `remaining` to go."""
    tokens = wanted(rules, choice, prefix, remaining)
    if tokens == remaining <= _fits(rules.limits, prefix):
        return remaining
    return min(tokens, chunk_tokens(rules.limits, prefix))


class Band(NamedTuple):
    """Successive chunks of one size: where the first begins, how many tokens each has, how many there are."""

    prefix: int
    tokens: int
    chunks: int


def bands(rules: Rules, choice: Choice, prefix: int, total: int) -> Iterator[Band]:
    """The chunks of a prompt of `total` tokens with `prefix` already computed, as `chunk` cuts it. Not with a base.

    Sizes only shrink, so it goes from size to size, not from chunk to chunk: a million tokens are a few dozen steps.
    """
    while prefix < total:
        size = chunk(rules, choice, prefix, total - prefix)
        last = _last_prefix(rules, choice, size)
        count = (total - prefix) // size
        if last is not None:
            count = min(count, (last - prefix) // size + 1)
        # The last of these may have a remainder to take, and the very last chunk of a prompt has a size of its own.
        before_last = prefix + (count - 1) * size
        if count > 1 and chunk(rules, choice, before_last, total - before_last) != size:
            count -= 1
        count = max(count, 1)
        yield Band(prefix, size, count)
        prefix += count * size


def _last_prefix(rules: Rules, choice: Choice, tokens: int) -> int | None:
    """The longest prefix on which both limits allow this size, given that some prefix has it; None for any."""
    limits, last = rules.limits, None
    if tokens > limits.chunk_min:
        last = limits.budget // tokens - (tokens if limits.rule == SEQUENCE else 0)
    if choice.ceiling is not None and tokens > rules.allowed.least:
        by_time = latency.prefix_within(rules.model, tokens, choice.ceiling)
        last = by_time if last is None else min(last, by_time)
    return last
