"""The budget rule: known values and the laws that hold for all of them."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy import budget as rule
from dynchunk.policy.budget import Budget


def limits(budget: int, kind: str = rule.PREFIX) -> Budget:
    return Budget(budget, kind, page=256, chunk_min=256, chunk_max=2048)


@pytest.mark.parametrize(
    ("budget", "prefix", "chunk"),
    [
        (200_000_000, 0, 2048),
        (200_000_000, 97_656, 2048),
        (200_000_000, 97_657, 1792),
        (200_000_000, 131_072, 1280),
        (200_000_000, 195_312, 1024),
        (200_000_000, 200_000, 768),
        (200_000_000, 262_144, 512),
        (200_000_000, 390_626, 256),
        (200_000_000, 500_000, 256),
        (220_000_000, 107_421, 2048),
        (220_000_000, 107_422, 1792),
        (220_000_000, 131_072, 1536),
        (220_000_000, 156_250, 1280),
        (220_000_000, 200_000, 1024),
        (220_000_000, 262_144, 768),
        (220_000_000, 390_625, 512),
        (220_000_000, 500_000, 256),
        (260_000_000, 111_608, 2048),
        (260_000_000, 131_072, 1792),
        (260_000_000, 195_312, 1280),
        (260_000_000, 500_000, 512),
        (260_000_000, 524_288, 256),
    ],
)
def test_prefix_rule(budget: int, prefix: int, chunk: int) -> None:
    """The steps of the ladder stand exactly where budget // prefix crosses a page."""
    assert rule.chunk_tokens(limits(budget), prefix) == chunk


@pytest.mark.parametrize(
    ("prefix", "chunk"),
    [(95_608, 2048), (95_609, 1792), (131_072, 1280), (200_000, 768), (262_144, 512), (400_000, 256)],
)
def test_sequence_rule(prefix: int, chunk: int) -> None:
    """With the chunk's own rows counted the ladder steps down a little earlier."""
    assert rule.chunk_tokens(limits(200_000_000, rule.SEQUENCE), prefix) == chunk


budgets = st.integers(1, 10**13)
prefixes = st.integers(0, 2_000_000)


@st.composite
def any_limits(draw: st.DrawFn) -> Budget:
    page = draw(st.sampled_from([1, 16, 64, 96, 256]))
    low = draw(st.integers(1, 64))
    return Budget(
        draw(budgets),
        draw(st.sampled_from([rule.PREFIX, rule.SEQUENCE])),
        page,
        low * page,
        (low + draw(st.integers(0, 256))) * page,
    )


@given(any_limits(), prefixes)
def test_within_the_limits_and_on_the_page(b: Budget, prefix: int) -> None:
    """A chunk is never above the maximum, never below the minimum, always whole pages."""
    chunk = rule.chunk_tokens(b, prefix)
    assert b.chunk_min <= chunk <= b.chunk_max
    assert chunk % b.page == 0


@given(any_limits(), prefixes)
def test_the_budget_holds_above_the_minimum(b: Budget, prefix: int) -> None:
    """Whenever the chunk is above the minimum, what the rule counts is within the budget."""
    chunk = rule.chunk_tokens(b, prefix)
    if chunk > b.chunk_min:
        assert rule.cost(b, prefix, chunk) <= b.budget


@given(any_limits(), prefixes)
def test_no_smaller_than_it_has_to_be(b: Budget, prefix: int) -> None:
    """One page more would break the budget or the maximum: the rule gives no memory away."""
    chunk = rule.chunk_tokens(b, prefix)
    assert chunk == b.chunk_max or rule.cost(b, prefix, chunk + b.page) > b.budget


@given(any_limits(), prefixes, prefixes)
def test_a_longer_prefix_never_gets_a_larger_chunk(b: Budget, one: int, other: int) -> None:
    """Monotone in the prefix."""
    assert rule.chunk_tokens(b, max(one, other)) <= rule.chunk_tokens(b, min(one, other))


@given(any_limits(), budgets, prefixes)
def test_a_larger_budget_never_gets_a_smaller_chunk(b: Budget, more: int, prefix: int) -> None:
    """Monotone in the budget."""
    larger = Budget(max(b.budget, more), b.rule, b.page, b.chunk_min, b.chunk_max)
    assert rule.chunk_tokens(larger, prefix) >= rule.chunk_tokens(b, prefix)


@given(any_limits(), prefixes)
def test_the_sequence_rule_is_never_more_generous(b: Budget, prefix: int) -> None:
    """Counting more keys cannot allow more rows."""
    sequence = Budget(b.budget, rule.SEQUENCE, b.page, b.chunk_min, b.chunk_max)
    plain = Budget(b.budget, rule.PREFIX, b.page, b.chunk_min, b.chunk_max)
    assert rule.chunk_tokens(sequence, prefix) <= rule.chunk_tokens(plain, prefix)


@given(st.integers(1, 10**30), st.integers(0, 10**15))
def test_the_sequence_root_is_exact(budget: int, prefix: int) -> None:
    """The integer square root gives the largest row count exactly, far beyond what floats could hold."""
    rows = rule.rows_within(Budget(budget, rule.SEQUENCE, 1, 1, 1), prefix)
    assert rows is not None
    assert rows * (prefix + rows) <= budget < (rows + 1) * (prefix + rows + 1)


@given(any_limits())
def test_where_the_floor_starts_to_exceed(b: Budget) -> None:
    """`last_prefix_within` is the last prefix on which the smallest chunk keeps the budget."""
    last = rule.last_prefix_within(b)
    assert last < 0 or rule.cost(b, last, b.chunk_min) <= b.budget
    assert rule.cost(b, max(last + 1, 0), b.chunk_min) > b.budget or last + 1 < 0


@given(any_limits(), prefixes)
def test_no_overshoot_is_worse_than_the_one_announced(b: Budget, prefix: int) -> None:
    """Above the floor, rows x (prefix + rows) never exceeds the budget by more than `worst_overshoot` says."""
    chunk = rule.chunk_tokens(b, prefix)
    if chunk > b.chunk_min:
        assert chunk * (prefix + chunk) <= b.budget * (1 + rule.worst_overshoot(b))


def test_overshoot_at_the_default_line() -> None:
    """2 % at 2048 rows; with a large static chunk it is more than double the budget."""
    assert float(rule.worst_overshoot(limits(200_000_000))) == pytest.approx(0.021, abs=0.001)
    large = Budget(200_000_000, rule.PREFIX, 256, 256, 16_384)
    assert float(rule.worst_overshoot(large)) == pytest.approx(1.342, abs=0.001)


@given(st.integers(1, 10**6), prefixes, st.integers(1, 4096))
def test_aligned_ends(chunk: int, prefix: int, align: int) -> None:
    """Shortening to an aligned end takes away less than one alignment and lands on a multiple of it."""
    short = rule.end_aligned(chunk, prefix, align)
    assert (prefix + short) % align == 0
    assert chunk - align < short <= chunk


def test_the_largest_chunk_in_pairs() -> None:
    """Own rows count: the budget and what the prefix rule leaves out, or the floor on a very long prompt."""

    def most(kind: str, largest: int, prompt_tokens: int) -> int:
        given_limits = Budget(200_000_000, kind, page=64, chunk_min=256, chunk_max=largest)
        return rule.most_pairs(partial(rule.chunk_tokens, given_limits), prompt_tokens)

    assert most(rule.PREFIX, 2048, 10_000) == 1808 * 10_000
    assert most(rule.PREFIX, 2048, 512_000) == 202_997_760
    assert most(rule.PREFIX, 16_384, 512_000) == 347_095_040
    assert most(rule.SEQUENCE, 2048, 512_000) == 199_929_856
    assert most(rule.PREFIX, 2048, 1_000_000) == 256 * 999_936
