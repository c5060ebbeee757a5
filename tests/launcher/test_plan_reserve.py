"""The allocator's reserve is never below what is live at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy import paths
from dynchunk.settings import Settings
from launcher import plan_reserve

MIB = 1 << 20
SHAPES = st.lists(st.tuples(st.integers(1, 16_384), st.integers(1, 2_000_000)), min_size=1, max_size=12)


@given(
    st.sampled_from(sorted(paths.PATHS)),
    st.integers(0, 512),
    SHAPES,
    st.sampled_from(["auto", "always", "low", "off"]),
    st.sampled_from(["auto", "off", 64]),
    st.integers(0, 1 << 32),
)
def test_the_reserve_holds_what_is_live(
    path: str, score_mib: int, shapes: list[tuple[int, int]], empty_cache: str, prime_cache: str | int, base: int
) -> None:
    """On every path, for every remedy, whatever the chunks."""
    shapes = [(rows, max(rows, keys)) for rows, keys in shapes]
    limit = score_mib * MIB
    cost = paths.of_path(path, limit)
    chosen = plan_reserve.remedies(Settings(empty_cache=empty_cache, prime_cache=prime_cache), limit)
    live = base + max(paths.transient_bytes(cost, rows, keys) for rows, keys in shapes)
    found = plan_reserve.reserved(cost, limit, shapes, chosen, base)
    assert set(found) == set(chosen)
    assert all(reserved >= live for reserved in found.values())


def test_what_would_not_end_is_left_out() -> None:
    """The work is that of buffers times chunks."""
    chosen = plan_reserve.remedies(Settings(), 0)
    cost = paths.of_path("v4", 0)
    assert plan_reserve.reserved(cost, 0, [(256, 10_000_000)] * 20_000, chosen, 0) == {}
    tiled = paths.of_path("v4", MIB)
    assert plan_reserve.reserved(tiled, MIB, [(2048, 10_000_000)] * 500, chosen, 0) == {}
    assert plan_reserve.reserved(tiled, MIB, [(2048, 10_000_000)] * 5, chosen, 0)
