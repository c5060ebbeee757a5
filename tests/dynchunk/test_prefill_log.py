"""The long prefill in flight, and the line when it has finished."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dynchunk.policy.budget import Budget
from dynchunk.prefill_log import BUDGET, FLOOR, LARGEST, TIME, PrefillLog, bound_of

LIMITS = Budget(200_000_000, "prefix", 64, 256, 2048)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def log(said: list[str], clock: Clock) -> PrefillLog:
    return PrefillLog(said.append, clock)


def ran(*reqs: tuple[str, int, int]) -> SimpleNamespace:
    return SimpleNamespace(reqs=list(reqs))


def test_one_line_for_a_long_prefill(log: PrefillLog, said: list[str], clock: Clock) -> None:
    """Said when the last chunk has run, not when it was launched; sizes, time, rate and what bounded it are in it."""
    log.chunk("r1", 1_000, 8_000, 20_000, LARGEST)
    clock.now_s += 4
    log.chunk("r1", 9_000, 6_000, 20_000, BUDGET)
    assert log.running is not None
    assert (log.running.done, log.running.total, log.running.cached) == (15_000, 20_000, 1_000)
    assert log.elapsed_s() == 4
    log.chunk("r1", 15_000, 5_000, 20_000, "")
    assert log.running is None
    log.ran(ran(("r1", 9_000, 6_000)), 1.0)
    assert said == []
    clock.now_s += 6
    log.ran(ran(("r1", 15_000, 5_000), ("r2", 0, 7)), 1.0)
    [line] = said
    assert line == (
        "request r1: prefill of 20,000 tokens, 1,000 of them cached, in 3 chunks of 5,000 to 8,000, 10.0 s, "
        "1,900 tokens/s; bounded by the largest chunk 1x, the budget 1x"
    )
    log.when_idle()
    assert len(said) == 1


def test_whole_requests_are_not_followed(log: PrefillLog, said: list[str]) -> None:
    """A request that runs in one piece is none of ours, also beside one that is open."""
    log.chunk("short", 0, 9_000, 9_000, "")
    assert log.running is None
    log.chunk("long", 0, 9_000, 30_000, LARGEST)
    log.chunk("short", 0, 100, 100, "")
    assert log.running is not None
    assert log.running.rid == "long"
    assert said == []


def test_short_ones_get_no_line(log: PrefillLog, said: list[str]) -> None:
    """A busy server would drown in lines for prompts of two chunks."""
    log.chunk("r", 0, 2_048, 4_000, LARGEST)
    log.chunk("r", 2_048, 1_952, 4_000, "")
    log.when_idle()
    assert said == []


def test_an_aborted_prefill(log: PrefillLog, said: list[str], clock: Clock) -> None:
    """It ends when the engine has nothing to run, or when another is cut; the line says where it stood."""
    log.chunk("r1", 0, 10_000, 90_000, LARGEST)
    clock.now_s += 2
    log.chunk("r1", 10_000, 10_000, 90_000, BUDGET)
    log.when_idle()
    assert said == ["request r1: prefill ended at 20,000 of 90,000 tokens, after 2 chunks and 2.0 s"]
    assert log.running is None
    log.chunk("r2", 0, 10_000, 90_000, LARGEST)
    log.chunk("r3", 0, 10_000, 90_000, LARGEST)
    assert said[1].startswith("request r2: prefill ended at 10,000")
    assert log.running is not None
    assert log.running.rid == "r3"


def test_a_prefill_that_begins_anew(log: PrefillLog, said: list[str]) -> None:
    """After a retraction the same request starts from what is cached: what ran before does not count twice."""
    log.chunk("r1", 0, 10_000, 90_000, LARGEST)
    log.chunk("r1", 4_096, 10_000, 90_000, LARGEST)
    assert log.running is not None
    assert (log.running.chunks, log.running.cached, log.running.done) == (1, 4_096, 14_096)
    assert said == []


def test_ranks_that_do_not_report_say_nothing() -> None:
    """They still know the progress."""
    log = PrefillLog(None)
    log.chunk("r1", 0, 10_000, 20_000, LARGEST)
    log.chunk("r1", 10_000, 10_000, 20_000, "")
    log.ran(ran(("r1", 10_000, 10_000)), 1.0)
    log.chunk("r2", 0, 10_000, 20_000, LARGEST)
    log.when_idle()
    assert log.running is None


@pytest.mark.parametrize(
    ("cap", "new", "remaining", "at_floor", "bound"),
    [
        (None, 2_048, 9_000, False, LARGEST),
        (None, 1_024, 9_000, False, BUDGET),
        (None, 256, 9_000, True, FLOOR),
        (None, 700, 700, False, ""),
        (1_000, 960, 9_000, False, TIME),
        (1_000, 512, 9_000, False, BUDGET),
        (5_000, 2_048, 9_000, False, LARGEST),
    ],
)
def test_what_bounded_a_chunk(cap: int | None, new: int, remaining: int, at_floor: bool, bound: str) -> None:
    """Time only where the chunk is all that time allowed; the end of a prompt is no bound."""
    assert bound_of(LIMITS, cap, new=new, remaining=remaining, at_floor=at_floor) == bound
