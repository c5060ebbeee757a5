"""The chunks of one whole prompt, what they hold at their peak, and which fixed chunk or which budget holds as much.

For planning: the server itself decides chunk by chunk (cutting.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from dynchunk.policy.auto_budget import LARGEST, QUANTUM
from dynchunk.policy.budget import last_prefix_within
from dynchunk.policy.cutting import Band, Choice, Rules, bands, by_memory_alone, chunk


class Chunk(NamedTuple):
    """`tokens` new ones on `prefix` computed ones."""

    prefix: int
    tokens: int

    @property
    def pairs(self) -> int:
        """Rows x keys, its own rows included: what its buffers follow."""
        return self.tokens * (self.prefix + self.tokens)


def chunks(rules: Rules, choice: Choice, prefix: int, total: int) -> Iterator[Chunk]:
    """A prompt of `total` tokens with `prefix` of them cached, as the server cuts it when nothing else runs."""
    while prefix < total:
        tokens = chunk(rules, choice, prefix, total - prefix)
        yield Chunk(prefix, tokens)
        prefix += tokens


def fixed(tokens: int, prefix: int, total: int) -> list[Chunk]:
    """The same prompt in chunks of one size."""
    return [Chunk(start, min(tokens, total - start)) for start in range(prefix, total, tokens)]


def peak(cut: Iterable[Chunk]) -> Chunk:
    """The chunk that holds most. There is at least one."""
    return max(cut, key=lambda one: one.pairs)


def fixed_with_peak(pairs: int, page: int, most: int, prefix: int, total: int) -> int:
    """The largest fixed chunk, in pages up to `most`, that never holds more than `pairs`; a page if even that does."""
    for tokens in range(most // page * page, page, -page):
        # The last whole chunk of a prompt has the most keys; what is left of the prompt may see more, with fewer rows.
        whole = (total - prefix) // tokens
        last = prefix + whole * tokens
        if max(tokens * last if whole else 0, (total - last) * total) <= pairs:
            return tokens
    return page


def floor_exceeds_from(rules: Rules, cut: Iterable[Chunk]) -> int | None:
    """The prefix from which on the smallest chunk is above the budget, if this prompt gets there."""
    first = max(last_prefix_within(rules.limits) + 1, 0)
    return first if any(one.prefix >= first for one in cut) else None


def largest_budget(rules: Rules, pairs: int, prefix: int, total: int) -> int | None:
    """The largest budget, in whole millions of token^2, under which no chunk holds more than `pairs`.

    By memory alone: latency only makes chunks smaller. None where even the smallest chunks hold more.
    """

    def holds(millions: int) -> bool:
        limited = replace(rules, limits=replace(rules.limits, budget=millions * QUANTUM))
        cut = bands(limited, by_memory_alone(rules.limits.chunk_max), prefix, total)
        return all(_most_pairs(band) <= pairs for band in cut)

    # No chunk is larger than the largest, so more than this changes nothing.
    high = min(-(-rules.limits.chunk_max * total // QUANTUM) + 1, LARGEST // QUANTUM)
    if holds(high):
        return high * QUANTUM
    if not holds(1):
        return None
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low * QUANTUM


def _most_pairs(band: Band) -> int:
    return Chunk(band.prefix + (band.chunks - 1) * band.tokens, band.tokens).pairs
