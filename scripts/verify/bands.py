"""Tokens per second by prefix: a chunk's speed depends on what it finds, and a mean over the prompt hides the slope."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from scripts.verify.results import Chunk

MOST_BANDS = 8


def width_tokens(largest_prompt_tokens: int) -> int:
    """The band width that cuts the largest prompt into 4 to 8 bands (fewer below 4,000 tokens): 1,000 doubled."""
    width = 1_000
    while largest_prompt_tokens > MOST_BANDS * width:
        width *= 2
    return width


def tokens_per_s(chunks: Iterable[Chunk], band_tokens: int) -> dict[int, float]:
    """Band (0 is the first) -> tokens per second in it.

    A chunk that crosses a border counts on both sides, by its tokens.
    """
    tokens: dict[int, int] = defaultdict(int)
    seconds: dict[int, float] = defaultdict(float)
    for chunk in chunks:
        start, end = chunk.prefix_tokens, chunk.prefix_tokens + chunk.tokens
        while start < end:
            band = start // band_tokens
            inside = min(end, (band + 1) * band_tokens) - start
            tokens[band] += inside
            seconds[band] += (chunk.end_s - chunk.start_s) * inside / chunk.tokens
            start += inside
    return {band: tokens[band] / seconds[band] for band in sorted(tokens) if seconds[band] > 0}


def name(band: int, band_tokens: int) -> str:
    """'64k to 128k'."""
    return f"{thousands(band * band_tokens)} to {thousands((band + 1) * band_tokens)}"


def thousands(tokens: int) -> str:
    """64,000 -> '64k', 1,500,000 -> '1.5m', 1,234 -> '1,234'."""
    if tokens and tokens % 100_000 == 0 and tokens >= 1_000_000:
        return f"{tokens / 1_000_000:g}m"
    return f"{tokens // 1_000}k" if tokens and tokens % 1_000 == 0 else f"{tokens:,}"


def chunk_sizes(chunks: Iterable[Chunk]) -> Mapping[int, int]:
    """Chunk size -> how many chunks had it, largest first."""
    counts: dict[int, int] = defaultdict(int)
    for chunk in chunks:
        counts[chunk.tokens] += 1
    return dict(sorted(counts.items(), reverse=True))
