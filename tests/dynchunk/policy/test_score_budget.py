"""The arithmetic of score limits: figures of known GPUs, and laws that hold for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy import score_budget as rule
from dynchunk.policy.score_budget import MIB

HEADS = st.sampled_from([8, 16, 32, 64, 128])
KEYS = st.integers(1, 1 << 21)
PROCESSORS = st.integers(1, 200)


@pytest.mark.parametrize(
    ("processors", "heads", "keys", "mib"),
    [
        (148, 32, 262_144, 592),
        (148, 32, 1 << 20, 2368),
        (132, 32, 262_144, 528),
        (132, 64, 262_144, 264),
        (48, 32, 262_144, 192),
    ],
)
def test_known_gpus(processors: int, heads: int, keys: int, mib: int) -> None:
    """B200, H100 and GB10: the bytes that give every multiprocessor its 128 / heads rows."""
    assert rule.busy_limit_bytes(keys, heads, processors) == mib * MIB
    assert rule.auto_limit_bytes(keys, heads, processors) == max(256, mib) * MIB


@given(KEYS, HEADS, PROCESSORS)
def test_the_busy_limit_is_the_smallest(keys: int, heads: int, processors: int) -> None:
    """At the limit all multiprocessors have rows; a row less, and one has none."""
    limit = rule.busy_limit_bytes(keys, heads, processors)
    assert rule.busy_percent(rule.rows_per_tile(limit, keys, heads), heads, processors) == 100
    if processors > 1:
        less = rule.rows_per_tile(limit - 1, keys, heads)
        assert rule.busy_percent(less, heads, processors) < 100


@given(st.integers(1, 1 << 33), KEYS, HEADS)
def test_tiles_stay_within_the_limit(limit: int, keys: int, heads: int) -> None:
    """A tile is whole steps of rows and within the limit, or the single step that cannot be cut."""
    rows = rule.rows_per_tile(limit, keys, heads)
    step = rule.rows_step(heads)
    assert rows % step == 0
    assert rows == step or rows * rule.row_bytes(keys) <= limit
    assert (rows + step) * rule.row_bytes(keys) > limit


@given(st.integers(1 << 20, 1 << 33), st.integers(1, 1 << 15))
def test_key_blocks_fit(limit: int, rows: int) -> None:
    """Blocks are powers of two from 4,096 to 32,768, and within the limit unless they are the smallest."""
    block = rule.key_block(limit, rows)
    assert block in (4_096, 8_192, 16_384, 32_768)
    assert block == rule.SMALLEST_KEY_BLOCK or rows * block * rule.SCORE_BYTES <= limit
    assert block == rule.KEY_BLOCK or rows * 2 * block * rule.SCORE_BYTES > limit


@given(st.integers(1, 1 << 21), st.integers(0, 1 << 21))
def test_doubling_holds_what_is_asked(tokens: int, longest: int) -> None:
    """Never less than asked, never twice as much, and not above what can be needed."""
    held = rule.doubled(tokens, longest)
    assert tokens <= held < 2 * tokens or tokens == held
    if longest >= tokens:
        assert held <= longest
    elif longest:
        assert held == tokens


@given(st.integers(1, 1 << 33), KEYS, HEADS)
def test_torch_rows_fit(limit: int, keys: int, heads: int) -> None:
    """Rows scored in plain torch fit the limit, unless it is the single row that cannot be cut."""
    rows = rule.torch_rows(limit, keys, heads)
    assert rows == 1 or rows * keys * (560 + 6 * heads) <= limit
