"""DYNCHUNK_BUDGET=auto: known values, the laws of the arithmetic, and what the derivation says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy.auto_budget import PATHS, Coefficient, NoHeadroomError, advice, derive, headroom_bytes, of_path
from dynchunk.policy.budget import Budget, chunk_tokens, own_rows
from dynchunk.policy.coefficient import LINE, STEPS, Fit

GIB = 1 << 30
MIB = 1 << 20


def measured(bytes_per_pair: float, base_bytes: int = 0, kind: str = LINE) -> Fit:
    return Fit(kind, 40, 5, bytes_per_pair=bytes_per_pair, base_bytes=base_bytes)


def test_the_platform_this_began_on() -> None:
    """3.2 GiB of headroom at 14.5 B come to 2.01e8: the 2.0e8 that was found by hand there."""
    derived = derive({"tp0": int(3.2 * GIB)}, {"tp0": of_path("v41-dev", 256 * MIB)})
    assert derived.budget == 201_000_000
    for part in ("3,435,973,836 bytes free on tp0", "less 15 %", "14.5 B", "201,000,000 token^2", "GB10"):
        assert part in derived.text


def test_tiles_leave_only_the_tables() -> None:
    """Under a score limit the scores are held whole and do not grow, so the same headroom allows far more."""
    c = of_path("v41", 256 * MIB)
    assert (c.millibytes, c.base_bytes) == (300, 640 * MIB)
    derived = derive({"tp0": 3 * GIB}, {"tp0": c})
    assert derived.budget == ((3 * GIB * 85 // 100 - 640 * MIB) * 1000 // 300) // 10**6 * 10**6
    assert derived.budget > 30 * derive({"tp0": 3 * GIB}, {"tp0": of_path("v41-dev", 0)}).budget


def test_without_a_limit_the_whole_coefficient_counts() -> None:
    """A limit of 0 leaves the engine's own, which may be far away."""
    assert of_path("v41", 0).millibytes == 6_030
    assert of_path("v4-torch", 0).millibytes == 230_000


def test_the_dearest_of_all_coefficients_counts() -> None:
    """A large base can leave less than a larger c: the smaller of the two budgets is the one that fits everywhere."""
    headrooms = {"a": 6 * GIB, "b": 6 * GIB}
    large_base, large_c = Coefficient(1000, 5 * GIB, "a"), Coefficient(1100, 0, "b")
    alone = derive({"a": 6 * GIB}, {"a": large_base}).budget
    assert derive(headrooms, {"a": large_base, "b": large_c}).budget == alone


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4),
        st.tuples(st.integers(GIB, 200 * GIB), st.integers(1, 50_000)),
        min_size=1,
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_every_rank_comes_to_the_same_budget(reports: dict[str, tuple[int, int]], chance: random.Random) -> None:
    """The order in which reports arrive changes nothing, and the budget fits on the rank that has least."""
    order = list(reports)
    chance.shuffle(order)
    both = [
        derive(
            {rank: reports[rank][0] for rank in names},
            {rank: Coefficient(reports[rank][1], 0, "a table") for rank in names},
        )
        for names in (list(reports), order)
    ]
    assert both[0] == both[1]
    least, most = min(h for h, _ in reports.values()), max(c for _, c in reports.values())
    assert both[0].budget % 1_000_000 == 0
    assert both[0].budget * most <= least * 85 * 10


@given(st.integers(GIB, 200 * GIB), st.integers(0, 10 * GIB), st.integers(100, 300_000))
def test_more_memory_never_means_a_smaller_budget(headroom: int, more: int, millibytes: int) -> None:
    """Monotone in headroom, and against it in c."""
    c, dearer = Coefficient(millibytes, 0, ""), Coefficient(millibytes + 50, 0, "")
    budget = derive({"r": headroom}, {"r": c}).budget
    assert derive({"r": headroom + more}, {"r": c}).budget >= budget
    assert derive({"r": headroom}, {"r": dearer}).budget <= budget


@given(
    st.integers(8 * GIB, 200 * GIB),
    st.sampled_from([1024, 2048, 8192, 16_384]),
    st.sampled_from(["prefix", "sequence"]),
)
def test_a_chunks_own_rows_fit_too(headroom: int, largest: int, rule: str) -> None:
    """Under the prefix rule the worst chunk sees budget / T tokens and its own T: that fits into 85 % as well."""
    limits = Budget(1, rule, 64, 64, largest)
    try:
        derived = derive({"r": headroom}, {"r": Coefficient(24_000, 0, "")}, own_rows(limits, largest))
    except NoHeadroomError:
        assert headroom * 85 // 100 < 24 * (largest**2 + 1_000_000)
        return
    limits = replace(limits, budget=derived.budget)
    for prefix in (0, derived.budget // largest, derived.budget // 1024, derived.budget // 512):
        rows = chunk_tokens(limits, prefix)
        assert rows == 64 or rows * (prefix + rows) * 24 <= headroom * 85 // 100


def test_no_headroom_is_refused_with_the_numbers() -> None:
    """A budget of nothing would run every chunk at the floor, above the budget; better not to start."""
    with pytest.raises(NoHeadroomError, match=r"536,870,912 bytes free on tp1, the least of 2 ranks.*MEM_FRACTION"):
        derive({"tp0": 4 * GIB, "tp1": GIB // 2}, {"tp0": of_path("v41", 256 * MIB)})


def test_headroom_counts_what_the_allocator_holds_unused() -> None:
    """2 GiB free and 6 GiB reserved but unused are 8 GiB; what is allocated is not free."""
    assert headroom_bytes(driver_free=2 * GIB, reserved=10 * GIB, allocated=4 * GIB) == 8 * GIB


def test_headroom_on_unified_memory() -> None:
    """MemAvailable less the guard: the driver's figure there takes the page cache for used memory."""
    given_bytes = {"driver_free": GIB, "reserved": 3 * GIB, "allocated": 3 * GIB}
    assert headroom_bytes(**given_bytes, mem_available=50 * GIB, guard=2 * GIB) == 48 * GIB
    assert headroom_bytes(**given_bytes, mem_available=GIB, guard=2 * GIB) == 0


def test_a_better_measured_c_is_advice() -> None:
    """12 B measured where 14.5 were assumed: a larger budget, from the headroom at start and not from today's."""
    found = advice(201_000_000, {"tp0": int(3.2 * GIB)}, measured(12.0))
    assert found is not None
    assert found.budget == 243_000_000
    assert "allows a budget of 243,000,000 instead of 201,000,000" in found.text


def test_a_raise_holds_for_the_dearest_forwards() -> None:
    """A third of the forwards at twice the line: the median does not see them, a raise must."""
    fit = Fit(LINE, 40, 5, bytes_per_pair=6.0, worst_bytes_per_pair=12.0)
    found = advice(201_000_000, {"tp0": int(3.2 * GIB)}, fit)
    assert found is not None
    assert found.budget == 243_000_000
    assert advice(243_000_000, {"tp0": int(3.2 * GIB)}, fit) is None


def test_a_worse_measured_c_is_advice_too() -> None:
    """20 B measured call for less; a platform without room for anything is said to be one."""
    found = advice(201_000_000, {"tp0": int(3.2 * GIB)}, measured(20.0))
    assert found is not None
    assert "calls for a budget of 146,000,000" in found.text
    none_left = advice(201_000_000, {"tp0": GIB}, measured(20.0, base_bytes=2 * GIB))
    assert none_left is not None
    assert "nothing is left for a chunk" in none_left.text


def test_no_advice_without_need() -> None:
    """About the same budget, or a fit that is not to be trusted: nothing is said."""
    assert advice(201_000_000, {"tp0": int(3.2 * GIB)}, measured(14.0)) is None
    assert advice(201_000_000, {"tp0": int(3.2 * GIB)}, measured(2.0, kind=STEPS)) is None


@pytest.mark.parametrize("name", sorted(PATHS))
def test_every_path_gives_a_budget(name: str) -> None:
    """No entry of the table is left without a source, and a limit never makes a path dearer."""
    assert PATHS[name].source
    assert of_path(name, 256 * MIB).millibytes <= of_path(name, 0).millibytes
    assert derive({"r": 16 * GIB}, {"r": of_path(name, 256 * MIB)}).budget >= 10**6
