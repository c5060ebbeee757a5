"""Hypothesis drives the real PrefillAdder; test_versions.py runs this once for each engine version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynchunk.patches import facts
from dynchunk.policy.budget import PREFIX, SEQUENCE, Budget
from scripts.bench.admission_world import Setting, World

PAGES = st.sampled_from([1, 16, 64, 256])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    engine_page = draw(PAGES)
    page = engine_page * draw(st.sampled_from([1, 4])) if engine_page > 1 else draw(PAGES)
    align = draw(st.sampled_from([None, None, engine_page * 2, 4096]))
    static = page * draw(st.integers(1, 64))
    if align is not None:
        static = max(static, -(-align // page) * page)
    low = page * draw(st.integers(1, max(1, static // page)))
    budget = draw(st.one_of(st.integers(1, 10**10), st.integers(10**6, 10**9)))
    limits = Budget(budget, draw(st.sampled_from([PREFIX, SEQUENCE])), page, low, static // page * page)
    floor = draw(st.sampled_from([1, 128 + engine_page, 8]))
    setting = Setting(
        limits, engine_page, static, align, min(floor, static), draw(st.integers(0, 5)), draw(st.booleans())
    )
    running = [
        SimpleNamespace(
            seqlen=length,
            sampling_params=SimpleNamespace(max_new_tokens=8, ignore_eos=False),
            output_ids=[],
            rid="d",
            origin_input_ids=range(10),
        )
        for length in draw(st.lists(st.integers(1, 400_000), max_size=40))
    ]
    world = World(setting, running)
    longest = min(1_000_000, low * 200)
    for number in range(draw(st.integers(1, 6))):
        total = draw(st.integers(1, longest))
        prefix = draw(st.integers(0, total - 1)) if setting.radix else 0
        host = draw(st.sampled_from([0, total // 3])) if setting.radix else 0
        loaded = draw(st.sampled_from([None, 0, host * 2])) if host else None
        world.request(f"r{number}", total, prefix, host, loaded)
    return world


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds())
def test_every_pass_keeps_the_promises(world: World) -> None:
    """Budget or floor, one unfinished request that is tracked, progress in every pass, page-aligned cuts."""
    world.run()


def test_a_load_that_fails_in_company_keeps_the_budget() -> None:
    """One token seemed to be missing; the cache on the host fails, and the engine takes a whole page instead."""
    limits = Budget(765_956, PREFIX, 64, 960, 960)
    world = World(Setting(limits, 16, 960, None, 1, 0, True), [])
    for number in range(3):
        world.request(f"r{number}", 1, 0, 0, None)
    total = 191_489
    world.request("r3", total, 127_664, 63_824, 0)
    world.run()


@pytest.mark.parametrize("loaded", [4864, 6000])
def test_a_load_that_brings_more_than_promised_keeps_the_budget(loaded: int) -> None:
    """Its first chunk was to be cut; with the longer prefix it is the whole rest, and over the budget."""
    world = World(Setting(Budget(5_898_240, PREFIX, 256, 256, 2560), 256, 2560, None, 1, 0, True), [])
    world.request("r0", 7296, 0, 2304, loaded)
    world.run()


class Replaying(World):
    """Cached rows run again beside the new ones, and count."""

    def _judge(self, ran: list[Any], *, hide: bool) -> None:
        ends = [facts.prefix_tokens(req) + facts.new_tokens(req) for req in ran]
        rows = sum(facts.new_tokens(req) + replayed(None, req, facts.prefix_tokens(req)) for req in ran)
        assert len(ran) < 2 or rows * max(ends) <= self.setting.limits.budget, f"{rows:,} x {max(ends):,}"
        self.seen["batches"] += bool(ran)


def replayed(_: Any, req: Any, prefix: int) -> int:
    return min(128, prefix)


def test_replayed_rows_count_where_chunks_are_filled_to_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine then takes no whole pages off its chunk: 321 and 768 new tokens, 128 replayed are over the budget."""
    world = Replaying(Setting(Budget(1_000_000, SEQUENCE, 256, 256, 8192), 256, 8192, None, 1, 0, True), [])
    if not hasattr(world.engine.PrefillAdder, "_replay_len"):
        return  # 0.5.20 replays nothing
    monkeypatch.setattr(world.engine, "_use_exact_chunk_fill", lambda: True)
    monkeypatch.setattr(world.engine.PrefillAdder, "_replay_len", replayed)
    world.request("a", 833, 512)
    world.request("b", 768, 0)
    world.run()
    assert world.seen["batches"] == 2
