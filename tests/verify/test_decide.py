"""The guard's decision, on readings of MemAvailable that were reported from real machines and on laws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.verify.decide import (
    GIB,
    IDLE,
    LOAD,
    PHASES,
    RAMP,
    START,
    Action,
    Limits,
    Sample,
    by_phase,
    decide,
)

MIB = 2**20


def readings(available_gib: Iterable[float], every_s: float = 1.0, free_bytes: int = GIB, **more: Any) -> list[Sample]:
    return [Sample(index * every_s, round(gib * GIB), free_bytes, **more) for index, gib in enumerate(available_gib)]


def actions(samples: Sequence[Sample], limits: Limits) -> set[Action]:
    """Every decision on the way, as the sampler takes them."""
    return {decide(samples[: count + 1], limits).action for count in range(len(samples))}


def test_below_the_guard_aborts_at_once() -> None:
    """One reading below the guard is enough, and the reason says both numbers."""
    decision = decide(readings([8, 8, 1.49]), Limits.at(GIB * 3 // 2))
    assert decision.action is Action.ABORT
    assert "1.49 GiB" in decision.reason
    assert "1.50 GiB" in decision.reason


def test_at_the_guard_warns() -> None:
    """The guard itself is still allowed; close to it is said."""
    limits = Limits.at(2 * GIB)
    assert decide(readings([2.0]), limits).action is Action.WARN
    assert decide(readings([2.49]), limits).action is Action.WARN
    assert decide(readings([2.5]), limits).action is Action.CONTINUE


def test_a_collapse_aborts_before_the_guard() -> None:
    """22, 18, 13 GiB at one reading a second, a guard of 2 GiB: under 3 s are left, so it aborts at 13, not before."""
    samples = readings([22, 18, 13])
    limits = Limits.at(2 * GIB)
    assert [decide(samples[:n], limits).action for n in (1, 2, 3)] == [Action.CONTINUE, Action.CONTINUE, Action.ABORT]
    assert "2.8 s to the guard" in decide(samples, limits).reason


def test_a_collapse_aborts_at_any_rate_of_sampling() -> None:
    """The same fall read ten or twenty times a second aborts as well, with gigabytes to spare."""
    for rate in (4, 10, 20):
        falling = readings([22 - 4.5 * index / rate for index in range(5 * rate)], 1 / rate)
        limits = Limits.at(2 * GIB)
        aborted = next(s for n, s in enumerate(falling) if decide(falling[: n + 1], limits).action is Action.ABORT)
        assert aborted.available_bytes > 10 * GIB


def test_a_healthy_server_with_little_memfree_is_left_alone() -> None:
    """MemFree of 1,222 to 1,466 MiB for 5 s beside a steady MemAvailable of 7,040 MiB killed a healthy server once."""
    samples = [
        Sample(float(index), 7_040 * MIB, free * MIB, 0)
        for index, free in enumerate((1_222, 1_310, 1_290, 1_400, 1_466))
    ]
    assert actions(samples, Limits.at(2 * GIB)) == {Action.CONTINUE}


def test_the_dip_of_every_chunk_is_left_alone() -> None:
    """A budget's chunks take 2.5 GiB within a tenth of a second and give it back, all the way through a prompt."""
    dips = readings([5.9 - 2.5 * (index % 8 in (3, 4, 5)) for index in range(400)], 0.1)
    assert actions(dips, Limits.at(GIB * 3 // 2)) == {Action.CONTINUE}


def test_a_slow_cpu_filling_its_scores_is_left_alone() -> None:
    """On a slow machine a chunk's 3 GiB take 2.5 s to be written; that ends above the guard and must not abort."""
    falling = [6.0 - 3.0 * index / 25 for index in range(26)]
    assert Action.ABORT not in actions(readings([6.0] * 20 + falling + [6.0] * 10, 0.1), Limits.at(2 * GIB))


def test_a_step_is_no_fall() -> None:
    """10 GiB that go at once and then stay gone are no trend, however little time the step seems to leave."""
    for position in range(10, 40):
        steps = [18.0] * position + [13.0] + [8.0] * 40
        assert actions(readings(steps, 0.1), Limits.at(2 * GIB)) == {Action.CONTINUE}


def test_nothing_read_yet_continues() -> None:
    """No reading, no verdict."""
    assert decide([], Limits.at(GIB)).action is Action.CONTINUE


memory_bytes = st.integers(0, 200 * GIB)
series = st.lists(st.tuples(st.floats(0.01, 2.0), memory_bytes, memory_bytes), min_size=1, max_size=40)


def as_samples(
    rows: Sequence[tuple[float, int, int]], more_bytes: int = 0, free_bytes: int | None = None
) -> list[Sample]:
    at_s = 0.0
    samples = []
    for gap_s, available, free in rows:
        at_s += gap_s
        samples.append(Sample(at_s, available + more_bytes, free if free_bytes is None else free_bytes, 0))
    return samples


SEVERITY = list(Action)


def test_a_collapse_aborts_in_every_phase() -> None:
    """The collapse was reported of an engine that started: its phase does not hide it, but nothing can be aborted."""
    for phase in PHASES:
        samples = readings([22, 18, 13], phase=phase)
        action = decide(samples, by_phase(2 * GIB, 2 * GIB)).action
        assert action is (Action.ESCALATE if phase in (START, LOAD) else Action.ABORT)


def test_a_healthy_start_is_left_alone() -> None:
    """119 GiB: weights at 2 GiB/s, then 38 GiB of KV cache in 2.5 s, read at 1 and at 10 Hz. What is left is 20 GiB."""
    limits = by_phase(2 * GIB, 2 * GIB)
    for rate in (1, 10):
        weights = [115 - 2 * second / rate for second in range(28 * rate)]
        cache = [weights[-1] - 38 * step / (2.5 * rate) for step in range(1, int(2.5 * rate) + 1)]
        start = readings([117.0] * 5 * rate, 1 / rate, phase=START)
        load = readings([*weights, *cache, *[weights[-1] - 38] * 10 * rate], 1 / rate, phase=LOAD)
        samples = [*start, *(sample._replace(t_s=sample.t_s + 5) for sample in load)]
        assert {decide(samples[: n + 1], limits).action for n in range(len(samples))} == {Action.CONTINUE}


def test_each_phase_has_its_own_guard() -> None:
    """While the engine starts a lower guard may count than while it serves."""
    limits = by_phase(8 * GIB, 2 * GIB)
    at = {phase: decide(readings([6.0], phase=phase), limits).action for phase in PHASES}
    assert at == {START: Action.CONTINUE, LOAD: Action.CONTINUE, RAMP: Action.ABORT, IDLE: Action.ABORT}


def test_the_kernels_lines_alone_do_not_abort() -> None:
    """Healthy starts log one line each and a host at rest had 55: far from the guard none counts, close to it one is
    not enough.
    """
    limits = Limits.at(2 * GIB)
    for available, expected in ((20.0, Action.CONTINUE), (2.3, Action.WARN)):
        samples = [s._replace(kernel_oom=55 * n) for n, s in enumerate(readings([available] * 5))]
        assert decide(samples, limits).action is expected


@pytest.mark.parametrize(
    ("oom", "psi", "swap_ins", "expected"),
    [
        (1, 0.0, 0, Action.WARN),
        (0, 40.0, 0, Action.WARN),
        (0, None, 3_000, Action.WARN),
        (1, 40.0, 0, Action.ABORT),
        (1, None, 3_000, Action.ABORT),
        (0, 40.0, 3_000, Action.ABORT),
        (1, 40.0, 3_000, Action.ABORT),
        (1, 5.0, 100, Action.WARN),
    ],
)
def test_close_to_the_guard_two_signs_of_distress_abort(
    oom: int, psi: float | None, swap_ins: int, expected: Action
) -> None:
    """Kernel lines, pressure and swap-ins are one vote each; 3,000 swap-ins a second were seen before a freeze."""
    samples = [Sample(float(n), round(2.3 * GIB), GIB, swap_ins * n, psi, oom if n > 2 else 0) for n in range(6)]
    assert decide(samples, Limits.at(2 * GIB)).action is expected
    far = [sample._replace(available_bytes=3 * GIB) for sample in samples]
    assert decide(far, Limits.at(2 * GIB)).action is Action.CONTINUE


def test_below_the_guard_for_five_seconds_escalates() -> None:
    """An abort that frees nothing and ends nothing is followed by harder means, not before 5 s have gone."""
    samples = readings([8, *[1.5] * 60], 0.1, running=1)
    limits = Limits.at(2 * GIB)
    first = next(s for n, s in enumerate(samples) if decide(samples[: n + 1], limits).action is Action.ESCALATE)
    assert 4.7 < first.t_s - samples[1].t_s < 5.3
    assert "no request ended" in decide(samples, limits).reason
    assert {decide(samples[: n + 1], limits).action for n in range(1, 45)} == {Action.ABORT}


@pytest.mark.parametrize("every_s", [0.7, 1.9, 6.0])
def test_readings_that_come_late_escalate_too(every_s: float) -> None:
    """On a host that freezes they come seconds apart, and none just 5 s ago: the one before that counts."""
    samples = readings([8, *[1.5] * 12], every_s, running=1)
    limits = Limits.at(2 * GIB)
    first = next(s for n, s in enumerate(samples) if decide(samples[: n + 1], limits).action is Action.ESCALATE)
    assert 4.7 < first.t_s - samples[1].t_s < 5.3 + every_s
    back = [*samples[:8], samples[8]._replace(available_bytes=3 * GIB), *samples[9:]]
    assert decide(back[:10], limits).action is Action.ABORT


@pytest.mark.parametrize("every_s", [0.45, 0.7, 1.8])
def test_a_collapse_aborts_where_readings_come_late(every_s: float) -> None:
    """The fall is looked at over 2 s, whether or not a reading is just 2 s old."""
    samples = readings([22 - 4.5 * index * every_s for index in range(9)], every_s)
    limits = Limits.at(2 * GIB)
    aborted = next(s for n, s in enumerate(samples) if decide(samples[: n + 1], limits).action is Action.ABORT)
    assert aborted.available_bytes > 2 * GIB
    assert "fell by 9." in decide(samples[: samples.index(aborted) + 1], limits).reason


def test_memory_that_came_back_does_not_escalate() -> None:
    """A dip of every chunk below the guard is no 5 s below it."""
    samples = readings([3.0 if index % 20 == 0 else 1.5 for index in range(200)], 0.1, running=1)
    assert actions(samples, Limits.at(2 * GIB)) == {Action.ABORT, Action.CONTINUE}


def test_a_request_that_ended_was_heard() -> None:
    """Fewer requests than 5 s ago, or none at all: memory gets its time. Where nobody knows, 5 s are enough."""
    limits = Limits.at(2 * GIB)
    low = [1.5] * 60
    assert decide(readings(low, 0.1, running=0), limits).action is Action.ABORT
    fell = [s._replace(running=3 if s.t_s < 3 else 2) for s in readings(low, 0.1)]
    assert decide(fell, limits).action is Action.ABORT
    assert decide(readings(low, 0.1, running=2), limits).action is Action.ESCALATE
    assert decide(readings(low, 0.1), limits).action is Action.ESCALATE


@given(series, memory_bytes, memory_bytes)
def test_memfree_never_matters(rows: list[tuple[float, int, int]], free_bytes: int, guard_bytes: int) -> None:
    """Whatever MemFree is, the decision is the same."""
    limits = Limits.at(guard_bytes)
    assert decide(as_samples(rows), limits) == decide(as_samples(rows, free_bytes=free_bytes), limits)


@given(series, memory_bytes, memory_bytes)
def test_more_memory_is_never_judged_harder(
    rows: list[tuple[float, int, int]], more_bytes: int, guard_bytes: int
) -> None:
    """The same readings with more memory everywhere never get a harder verdict."""
    limits = Limits.at(guard_bytes)
    before, after = decide(as_samples(rows), limits), decide(as_samples(rows, more_bytes), limits)
    assert SEVERITY.index(after.action) <= SEVERITY.index(before.action)


@given(st.integers(1, 200), memory_bytes, st.floats(0.01, 2.0))
def test_a_steady_reading_never_aborts(n_samples: int, available_bytes: int, every_s: float) -> None:
    """As long as nothing changes, only the guard itself can abort."""
    samples = readings([available_bytes / GIB] * n_samples, every_s)
    assert decide(samples, Limits.at(samples[-1].available_bytes)).action is Action.WARN


@given(series, memory_bytes)
def test_below_the_guard_always_aborts(rows: list[tuple[float, int, int]], guard_bytes: int) -> None:
    """Nothing that happened before makes up for a reading below the guard."""
    samples = as_samples(rows)
    if samples[-1].available_bytes < guard_bytes:
        assert decide(samples, Limits.at(guard_bytes)).action.severity >= Action.ABORT.severity
