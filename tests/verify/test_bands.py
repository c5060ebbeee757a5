"""Tokens per second by prefix, and the words for numbers of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.verify import bands, prompts
from scripts.verify.results import Chunk


@given(st.integers(4_000, 10_000_000))
def test_a_ramp_has_four_to_eight_bands(largest_tokens: int) -> None:
    """From 4,000 tokens up, the largest prompt is cut into 4 to 8 bands."""
    width = bands.width_tokens(largest_tokens)
    assert 4 <= -(-largest_tokens // width) <= 8


def test_the_default_ramp_has_bands_of_64k() -> None:
    """500,000 tokens make eight bands of 64,000."""
    assert bands.width_tokens(500_000) == 64_000


@given(st.lists(st.tuples(st.integers(1, 5_000), st.floats(0.01, 10)), min_size=1, max_size=30))
def test_no_token_and_no_second_is_lost(parts: list[tuple[int, float]]) -> None:
    """Over all bands, tokens divided by speed add up to the time of the chunks, whatever borders they cross."""
    chunks = []
    prefix, at_s = 0, 0.0
    for tokens, seconds in parts:
        chunks.append(Chunk(prefix, tokens, at_s, at_s + seconds))
        prefix, at_s = prefix + tokens, at_s + seconds
    rates = bands.tokens_per_s(chunks, 1_000)
    in_band = {band: min(prefix, (band + 1) * 1_000) - band * 1_000 for band in rates}
    assert sum(in_band.values()) == prefix
    assert sum(in_band[band] / rates[band] for band in rates) == pytest.approx(at_s)


def test_a_chunk_across_a_border_counts_on_both_sides() -> None:
    """Half a chunk's tokens take half its time."""
    assert bands.tokens_per_s([Chunk(500, 1_000, 0.0, 2.0)], 1_000) == {0: 500.0, 1: 500.0}


def test_names_are_short() -> None:
    """Thousands are k, round millions m, everything else is written out."""
    assert bands.name(1, 64_000) == "64k to 128k"
    assert [bands.thousands(n) for n in (0, 1_234, 1_500_000, 500_000)] == ["0", "1,234", "1.5m", "500k"]


@given(st.one_of(st.none(), st.integers(300, 300_000)))
def test_token_ids_are_of_the_vocabulary(vocab_size: int | None) -> None:
    """Ids stay inside the vocabulary, above the special tokens and below 10,000."""
    ids = prompts.id_range(vocab_size)
    assert len(ids) > 50
    assert ids[0] >= 100
    assert ids[-1] < min(10_000, vocab_size or 10_000)


def test_a_tiny_vocabulary_is_still_used() -> None:
    """A test model with 64 tokens has no id 100."""
    ids = prompts.id_range(64)
    assert ids[0] > 0
    assert ids[-1] == 63
