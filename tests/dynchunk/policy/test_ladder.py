"""Whole prompts: the fixed chunk and the budget that hold as much, and what a path's tensors come to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynchunk.policy import auto_budget, ladder, paths
from dynchunk.policy.budget import PREFIX, SEQUENCE, Budget
from dynchunk.policy.cutting import Rules, by_memory_alone
from dynchunk.policy.ladder import Chunk
from dynchunk.policy.latency import Model, Sizes

GIB = 1 << 30
MODEL = Model(1, 0, 0, 0)


def rules(budget: int, *, rule: str = PREFIX, page: int = 64, low: int = 256, high: int = 2048) -> Rules:
    return Rules(Budget(budget, rule, page, low, high), MODEL, Sizes(low, high, page))


def test_the_dense_v41_path() -> None:
    """16,384 rows that see 487,936 tokens: 29.78 GiB of logits, 7.45 GiB of each mask, 44.67 GiB in all."""
    cost = paths.of_path(paths.DENSE_V41, 0)
    assert [round(paths.part_bytes(part, 16_384, 487_936) / GIB, 2) for part in cost.parts] == [29.78, 7.45, 7.45]
    assert paths.transient_bytes(cost, 16_384, 487_936) == 6 * 16_384 * 487_936


@pytest.mark.parametrize(("rows", "keys", "gib"), [(4096, 372_000, 1.42), (4096, 800_000, 3.05), (8192, 1 << 20, 8.0)])
def test_the_v4_path(rows: int, keys: int, gib: float) -> None:
    """4 B for each compressed key, of which there is one for four tokens."""
    cost = paths.of_path("v4", 0)
    assert round(paths.part_bytes(cost.parts[0], rows, keys) / GIB, 2) == gib
    assert paths.transient_bytes(cost, rows, keys) / GIB == pytest.approx(gib, abs=0.005)


def test_parts_come_to_the_path() -> None:
    """Where the tensors of a path are listed, they are what the path's total says, for a row and token."""
    for name, parts in paths.PARTS.items():
        assert sum(1000 * part.key_bytes // part.tokens_per_key for part in parts) == paths.PATHS[name].millibytes


def test_plan_and_auto_budget_know_the_same_paths() -> None:
    """Every path that a budget can be derived for can be planned, with the same bytes."""
    for name, path in auto_budget.PATHS.items():
        assert paths.PATHS[name] == path


pairs = st.integers(1, 10**12)


@given(st.sampled_from(sorted(paths.PATHS)), st.sampled_from([0, 64 << 20, 1 << 30]), st.integers(0, 10**11))
def test_pairs_within_is_the_inverse(name: str, score_limit: int, limit_bytes: int) -> None:
    """What is said to fit fits, and a hundredth more does not."""
    cost = paths.of_path(name, score_limit)
    fits = paths.pairs_within(cost, limit_bytes)
    assert paths.transient_bytes(cost, 1, fits) <= limit_bytes
    assert paths.transient_bytes(cost, 1, fits + fits // 100 + 8) > limit_bytes


@given(st.sampled_from(sorted(paths.PATHS)), st.sampled_from([0, 64 << 20, 1 << 30]), pairs, pairs)
def test_more_pairs_never_hold_less(name: str, score_limit: int, one: int, other: int) -> None:
    """And a limit on the scores never makes a path hold more."""
    cost, free = paths.of_path(name, score_limit), paths.of_path(name, 0)
    low, high = sorted((one, other))
    assert paths.transient_bytes(cost, 1, low) <= paths.transient_bytes(cost, 1, high)
    assert paths.transient_bytes(cost, 1, high) <= paths.transient_bytes(free, 1, high)


def test_known_ladder() -> None:
    """The default setting: the steps of the README's table."""
    cut = list(ladder.chunks(rules(200_000_000), by_memory_alone(2048), 0, 500_000))
    by_prefix = {one.prefix: one.tokens for one in cut}
    assert cut[0] == Chunk(0, 2048)
    assert by_prefix[96_256] == 2048
    assert by_prefix[98_304] == 1984
    assert sum(one.tokens for one in cut) == 500_000
    assert ladder.peak(cut).pairs <= 200_000_000 + 2048 * 2048


@pytest.mark.parametrize(
    ("budget", "total", "first"), [(200_000_000, 1_000_000, 781_251), (200_000_000, 781_000, None), (1000, 9000, 4)]
)
def test_where_the_floor_exceeds_the_budget(budget: int, total: int, first: int | None) -> None:
    """The first such prefix, if this prompt gets there."""
    r = rules(budget)
    assert ladder.floor_exceeds_from(r, ladder.chunks(r, by_memory_alone(2048), 0, total)) == first


@settings(deadline=None)
@given(st.integers(1, 10**10), st.sampled_from([16, 64, 256]), st.integers(0, 100_000), st.integers(1, 300_000))
def test_the_fixed_chunk_with_the_same_peak(limit: int, page: int, prefix: int, length: int) -> None:
    """It keeps the peak, unless even a page does not, and a page more would not."""
    total = prefix + length
    tokens = ladder.fixed_with_peak(limit, page, 2048, prefix, total)
    assert tokens % page == 0
    assert page <= tokens <= 2048
    if tokens > page:
        assert ladder.peak(ladder.fixed(tokens, prefix, total)).pairs <= limit
    if tokens < 2048:
        assert ladder.peak(ladder.fixed(tokens + page, prefix, total)).pairs > limit


@settings(deadline=None)
@given(
    st.integers(10**4, 10**11), st.sampled_from([PREFIX, SEQUENCE]), st.integers(0, 100_000), st.integers(1, 500_000)
)
def test_the_largest_budget(limit: int, rule: str, prefix: int, length: int) -> None:
    """Under it no chunk holds more; a tenth more (and two quanta) would, unless nothing is left to enlarge."""
    total = prefix + length
    r = rules(1, rule=rule)
    found = ladder.largest_budget(r, limit, prefix, total)

    def most(budget: int) -> int:
        limited = replace(r, limits=replace(r.limits, budget=budget))
        return ladder.peak(ladder.chunks(limited, by_memory_alone(2048), prefix, total)).pairs

    if found is None:
        assert most(auto_budget.QUANTUM) > limit
        return
    assert most(found) <= limit
    if found < 2048 * total:
        assert most(found + auto_budget.QUANTUM) > limit
