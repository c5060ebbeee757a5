"""What time allows a chunk, as every rank works it out."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dynchunk.latency_sizing import LatencySizing
from dynchunk.policy import latency
from dynchunk.policy.admission import Cut
from dynchunk.policy.budget import Budget, chunk_tokens
from dynchunk.policy.calibration import Update
from dynchunk.policy.latency import from_ms, parse_mode, predict

LIMITS = Budget(10**12, "prefix", page=64, chunk_min=64, chunk_max=2048)
CUT = Cut(64, 64)
MODEL = from_ms(2.5e-5, 0.015, 3, 0.002)


def sizing(mode: str, *, model: latency.Model | None = MODEL, stages: int = 1, smooth: str = "1") -> LatencySizing:
    made = LatencySizing(parse_mode(mode), Fraction(smooth), 64, stages)
    made.start(LIMITS, CUT)
    if model is not None:
        made.adopt(Update(model, calibrating=False, reason="given"))
    return made


def walk(made: LatencySizing, total: int, *, rid: str = "r", limits: Budget = LIMITS) -> list[tuple[int, int]]:
    """(prefix, tokens) of each chunk of a prompt."""
    chunks, prefix = [], 0
    while prefix < total:
        cap = made.cap(limits, CUT, rid, prefix, total - prefix, first=prefix == 0)
        allowed = min(chunk_tokens(limits, prefix), limits.chunk_max)
        tokens = min(allowed if cap is None else min(cap, allowed), total - prefix)
        assert tokens > 0
        chunks.append((prefix, tokens))
        prefix += tokens
    return chunks


def test_off_is_no_limit_and_remembers_nobody() -> None:
    made = sizing("off", model=None)
    assert walk(made, 10_000)[0] == (0, 2048)
    assert not made.requests


def test_equal_chunks_cost_what_the_first_did() -> None:
    """Within what one alignment step costs; and past exhaustion the fixed chunk."""
    chunks = walk(sizing("equal"), 60_000)
    base = predict(MODEL, 0, 2048)
    for prefix, tokens in chunks[:-1]:
        if tokens > 128:  # smaller ones are rounded to the nearest step
            assert predict(MODEL, prefix, tokens) <= base
            assert predict(MODEL, prefix, tokens + 64) > base
    assert sizing("equal").cap(LIMITS, CUT, "r", 70_000, 20_000, first=True) == 2048


def test_no_chunk_takes_longer_than_was_asked_for() -> None:
    made = sizing("100ms")
    for prefix, tokens in walk(made, 20_000):
        assert predict(MODEL, prefix, tokens) <= 100 * latency.TICKS_PER_MS or tokens == 64


def test_a_batch_takes_no_longer_than_was_asked_for() -> None:
    """Who joins a batch adds to its time; c is paid once."""
    made = sizing("100ms")
    ticks = made.ticks(0, 512, 0)
    assert ticks == predict(MODEL, 0, 512)
    room = made.room_in_company(ticks, 1000)
    assert room is not None
    assert made.ticks(1000, room, ticks) <= 100 * latency.TICKS_PER_MS < made.ticks(1000, room + 1, ticks)
    assert sizing("equal").room_in_company(ticks, 1000) is None
    # In a pass for waiting requests the first of them is held to it too.
    alone = made.room_in_company(0, 1000)
    assert alone is not None
    assert made.ticks(1000, alone, 0) <= 100 * latency.TICKS_PER_MS < made.ticks(1000, alone + 1, 0)


def test_the_sweep_alternates_between_requests_and_obeys_the_memory_rule() -> None:
    tight = Budget(8_000_000, "prefix", page=64, chunk_min=64, chunk_max=2048)
    made = sizing("equal", model=None)
    full, quarter = walk(made, 20_000, rid="a", limits=tight), walk(made, 20_000, rid="b", limits=tight)
    assert [tokens for _, tokens in full[:-1]] == [chunk_tokens(tight, prefix) for prefix, _ in full[:-1]]
    for prefix, tokens in quarter[:-1]:
        assert tokens == chunk_tokens(tight, prefix) // 4 // 64 * 64
    assert walk(made, 20_000, rid="c", limits=tight) == full
    assert made.cap(LIMITS, CUT, "short", 0, 4000, first=True) is None, "no long request"


def test_giving_up_leaves_nothing_of_the_sweep_behind() -> None:
    made = sizing("equal", model=None)
    made.cap(LIMITS, CUT, "a", 0, 20_000, first=True)
    made.adopt(Update(None, calibrating=False, reason="enough"))
    assert made.cap(LIMITS, CUT, "a", 2048, 18_000, first=False) is None
    assert made.state()["state"] == "fixed"
    assert made.state()["reason"] == "enough"


def test_where_only_one_size_exists_there_is_no_sweep() -> None:
    made = LatencySizing(parse_mode("equal"), least=64)
    made.start(Budget(10**9, "prefix", page=64, chunk_min=64, chunk_max=64), Cut(64, 64))
    assert not made.active
    assert "only one size" in made.state()["reason"]


def test_with_one_stage_pipeline_is_what_memory_allows() -> None:
    made = sizing("pipeline", model=None)
    assert not made.active
    assert walk(made, 10_000)[1] == (2048, 2048)


def test_pipeline_stands_down_while_others_prefill() -> None:
    """Another long prompt waits: the memory rule alone, for this chunk and the window after it; then again."""
    made = sizing("pipeline", stages=4)
    alone = made.cap(LIMITS, CUT, "r", 0, 8_000, first=True)
    assert alone is not None
    assert alone < 2048
    made.long_waiting = lambda: 1
    assert made.cap(LIMITS, CUT, "s", 0, 8_000, first=True) is not None, "it counts itself"
    assert made.cap(LIMITS, CUT, "r", 2048, 6_000, first=False) is None
    made.long_waiting = lambda: 0
    caps = [made.cap(LIMITS, CUT, "r", 2048, 6_000, first=False) for _ in range(9)]
    assert caps[0] is None
    assert caps[-1] is not None


def test_another_request_under_the_same_name_is_another_one() -> None:
    """Of another length, or after the last chunk of the one before; the same one, retracted, stays itself."""
    made = sizing("pipeline", stages=4)
    made.cap(LIMITS, CUT, "r", 0, 20_000, first=True)
    made.cap(LIMITS, CUT, "r", 4096, 15_904, first=False)
    made.cap(LIMITS, CUT, "r", 0, 20_000, first=True)
    assert made.requests["r"].ordinal == 0
    made.cap(LIMITS, CUT, "r", 0, 21_000, first=True)
    assert made.requests["r"].ordinal == 1
    made.admitted("r", 21_000)
    made.cap(LIMITS, CUT, "r", 1_000, 20_000, first=True)
    assert made.requests["r"].ordinal == 2


@pytest.mark.parametrize("count", [256, 600])
def test_requests_are_not_remembered_for_ever(count: int) -> None:
    made = sizing("equal")
    for number in range(count):
        made.cap(LIMITS, CUT, f"r{number}", 0, 20_000, first=True)
    assert len(made.requests) == 256
