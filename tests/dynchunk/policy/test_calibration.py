"""The sweep: what every rank decides alike, what the entry rank concludes, and that it ends in every case."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy import latency
from dynchunk.policy.calibration import Shared, Update, arm, is_long, why_no_sweep
from dynchunk.policy.fit import Fit, Refusal, Sample
from dynchunk.policy.latency import Model
from dynchunk.policy.learner import SHAPES_KEPT, Learner

Timing = Callable[[int, int], float]

TRUTH = latency.from_ms(a=2.5e-5, b=0.015, c=3, gamma=0.002)
BASE, FLOOR, ALIGN, PROMPT = 2048, 256, 64, 16_384


def exact(model: Model = TRUTH) -> Timing:
    return lambda prefix, tokens: latency.in_ms(latency.predict(model, prefix, tokens))


class Rig:
    """An entry rank and another one. Updates reach both between two requests; the other one measures nothing."""

    def __init__(self, learner: Learner | None = None) -> None:
        self.learner = learner or Learner()
        self.entry, self.other = Shared(), Shared()
        self.updates: list[Update] = []
        self.chunks_run: list[int] = []

    def serve(self, times: Timing, prompt: int = PROMPT, chunk: int = BASE, *, prompt_over: bool = True) -> None:
        """One long request, each chunk as both ranks would size it."""
        ordinal = self.entry.begin()
        assert self.other.begin() == ordinal
        prefix = 0
        news: list[Update | None] = []
        while prefix < prompt:
            sizes = [
                arm(ordinal, chunk, FLOOR, ALIGN) if rank.calibrating else chunk for rank in (self.entry, self.other)
            ]
            assert sizes[0] == sizes[1]
            tokens = min(sizes[0], prompt - prefix)
            self.chunks_run.append(tokens)
            news.append(self.learner.timed(ordinal, prefix, tokens, times(prefix, tokens)))
            prefix += tokens
        if prompt_over:
            news.append(self.learner.request_over())
        for update in news:
            if update is not None:
                self.updates.append(update)
                for rank in (self.entry, self.other):
                    rank.adopt(pickle.loads(pickle.dumps(update)))
        assert self.entry == self.other


@pytest.mark.parametrize(
    ("ordinal", "chunk", "expected"),
    [
        (0, 2048, 2048),
        (1, 2048, 512),
        (2, 2048, 2048),
        (1, 1024, 256),
        (1, 960, 448),
        (1, 512, 256),
        (1, 448, 448),
        (7, 1472, 320),
    ],
)
def test_arms(ordinal: int, chunk: int, expected: int) -> None:
    """Whole and quarter in turn; half where a quarter is below the floor, and nothing smaller than the floor."""
    assert arm(ordinal, chunk, FLOOR, ALIGN) == expected


@given(st.integers(0, 100), st.integers(1, 40_000), st.integers(0, 5000), st.sampled_from([1, 16, 64, 256]))
def test_an_arm_keeps_the_memory_line(ordinal: int, chunk: int, floor: int, align: int) -> None:
    """Never above what the memory rule allows, so the line holds during the sweep; never below the floor it allows."""
    size = arm(ordinal, chunk, floor, align)
    assert size <= chunk
    assert size >= min(chunk, floor)
    assert size > 0


def test_equal_arms_are_known_beforehand() -> None:
    """Where floor and largest chunk are one size, every rank knows without measuring that nothing can be learned."""
    assert why_no_sweep(2048, 256, 64) is None
    assert why_no_sweep(512, 256, 64) is None
    assert "one size" in (why_no_sweep(448, 256, 64) or "")


def test_long_requests() -> None:
    """A request of a single chunk teaches nothing and is not counted."""
    assert is_long(4096, 2048)
    assert not is_long(4095, 2048)


def test_three_requests_give_the_model() -> None:
    """The first is discarded, two arms follow, and all ranks have the model; from then on chunks are not halved."""
    rig = Rig()
    for _ in range(3):
        rig.serve(exact())
    assert [update.calibrating for update in rig.updates] == [False]
    model = rig.other.model
    assert model is not None
    for name in ("a", "b", "c", "gamma"):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6)
    assert set(rig.chunks_run) == {2048, 512}
    rig.chunks_run.clear()
    for _ in range(4):
        rig.serve(exact())
    assert set(rig.chunks_run) == {2048}
    assert len(rig.updates) == 1
    assert rig.learner.running_error < 1e-6


def test_without_being_told_that_a_request_is_over() -> None:
    """The next long request's first chunk is occasion enough."""
    rig = Rig()
    for _ in range(4):
        rig.serve(exact(), prompt_over=False)
    assert rig.other.model is not None


def test_the_first_request_is_discarded() -> None:
    """A process's first long request, 60 times slower, leaves no trace in the model."""
    rig = Rig()
    rig.serve(lambda prefix, tokens: 60 * exact()(prefix, tokens))
    for _ in range(2):
        rig.serve(exact())
    assert rig.other.model is not None
    assert rig.other.model.a == pytest.approx(TRUTH.a, rel=1e-6)


def test_first_hits_of_a_size_are_discarded() -> None:
    """A size that compiles its kernels when it is first run does no harm."""
    hit: set[int] = set()

    def compiling(prefix: int, tokens: int) -> float:
        slow = 1 if tokens in hit else 30
        hit.add(tokens)
        return slow * exact()(prefix, tokens)

    rig = Rig()
    for _ in range(3):
        rig.serve(compiling)
    assert rig.other.model is not None
    assert rig.learner.fit is not None
    assert rig.learner.fit.set_aside == 0


def test_wild_noise_ends_after_eight_refused_fits() -> None:
    """60 % of noise: one update with the reason, fixed chunks from then on, and nothing kept."""
    chance = random.Random(7)
    rig = Rig()
    for _ in range(30):
        rig.serve(lambda p, t: exact()(p, t) * max(0.05, 1 + chance.gauss(0, 0.6)))
    assert len(rig.updates) == 1
    update = rig.updates[0]
    assert update.model is None
    assert not update.calibrating
    assert "8 fits were refused" in update.reason
    # Requests 0 (discarded), 1 (one size only), 2 to 9.
    assert rig.chunks_run[10 * 8 + 5 * 24 :] == [2048] * 8 * 20
    assert not any(rig.learner._arms[k].shapes for k in (0, 1))
    assert not rig.learner._sizes_seen


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_flat_times_give_no_model_however_often_they_are_looked_at(noise: float) -> None:
    """Every chunk takes 50 ms whatever its size: eight looks at the noise find no attention in it by chance."""
    for seed in range(12):
        chance = random.Random(seed)
        rig = Rig()
        while rig.entry.calibrating:
            rig.serve(lambda p, t: 50 * chance.gauss(1, noise), chance.choice([8_000, 60_000, 150_000]))  # noqa: B023
        assert rig.entry.model is None


def test_one_size_ends_after_eight_requests() -> None:
    """Where every long request runs in one size whatever its arm, calibration does not go on for ever."""
    learner = Learner()
    updates = []
    for ordinal in range(20):
        news = [learner.timed(ordinal, prefix, 2048, exact()(prefix, 2048)) for prefix in range(0, PROMPT, 2048)]
        updates += [update for update in news if update is not None]
    assert len(updates) == 1
    assert updates[0].model is None
    assert not updates[0].calibrating
    assert "8 long requests, and only 1 of at least 2 chunk sizes seen" in updates[0].reason


def test_no_attempt_without_something_new() -> None:
    """Asking again and again does not use up the attempts."""
    calls = []

    def refuse(samples: Sequence[Sample]) -> Fit | Refusal:
        calls.append(len(samples))
        return Refusal("of a test")

    rig = Rig(Learner(fitted_by=refuse))
    for _ in range(4):
        rig.serve(exact())
        for _ in range(50):
            assert rig.learner.request_over() is None
    assert calls == sorted(set(calls))
    assert len(calls) == 2


def test_an_exception_in_the_fit_is_a_refusal() -> None:
    """A fault of ours ends calibration in the usual way, with its name in the reason."""

    def broken(samples: Sequence[Sample]) -> Fit | Refusal:
        raise ZeroDivisionError("of a test")

    rig = Rig(Learner(fitted_by=broken))
    for _ in range(20):
        rig.serve(exact())
    assert len(rig.updates) == 1
    assert "ZeroDivisionError" in rig.updates[0].reason


def test_requests_that_take_turns_are_one_occasion_each() -> None:
    """Two interleaved requests do not use up an attempt with every chunk."""
    calls = []

    def refuse(samples: Sequence[Sample]) -> Fit | Refusal:
        calls.append(len(samples))
        return Refusal("of a test")

    learner = Learner(fitted_by=refuse)
    for first in range(0, 6, 2):
        for prefix in range(0, PROMPT, 512):
            for ordinal, tokens in ((first, 2048), (first + 1, 512)):
                if prefix % tokens == 0:
                    learner.timed(ordinal, prefix, tokens, exact()(prefix, tokens))
    assert len(calls) <= 4


def test_a_model_that_stops_being_true_is_learned_anew() -> None:
    """Chunks that take twice as long drop the model on all ranks, and the new one predicts them."""
    rig = Rig()
    for _ in range(3):
        rig.serve(exact())
    slower = latency.from_ms(a=5e-5, b=0.03, c=6, gamma=0.004)
    for _ in range(12):
        rig.serve(exact(slower))
    assert [(u.model is not None, u.calibrating) for u in rig.updates] == [(True, False), (False, True), (True, False)]
    assert "dropped" in rig.updates[1].reason
    assert rig.other.model is not None
    assert rig.other.model.a == pytest.approx(slower.a, rel=1e-6)


def test_learning_anew_ends_as_well() -> None:
    """A machine that changes for ever gets three new models, then fixed chunks."""
    rig = Rig()
    for k in range(60):
        factor = 3.0 ** (k // 6)
        rig.serve(lambda p, t, factor=factor: factor * exact()(p, t))
    assert sum(update.model is not None for update in rig.updates) == 4
    assert sum(update.calibrating for update in rig.updates) == 3
    assert not rig.other.calibrating
    assert rig.other.model is None
    assert "learned anew 3 times" in rig.updates[-1].reason


def test_a_single_odd_chunk_drops_nothing() -> None:
    """60 times the predicted time once, and 12 % of noise always, are no reason."""
    chance = random.Random(3)
    rig = Rig(Learner(model=TRUTH))
    for _ in range(40):
        odd = chance.randrange(8) * 2048
        rig.serve(lambda p, t, odd=odd: exact()(p, t) * (60 if p == odd else 1) * max(0.05, 1 + chance.gauss(0, 0.12)))
    assert rig.updates == []
    assert 0.05 < rig.learner.running_error < 0.25


def test_a_saved_model_is_watched() -> None:
    """A model from a file that is not true here is dropped, and learned from what is measured."""
    rig = Rig(Learner(model=latency.from_ms(a=1e-7, b=1e-3, c=1, gamma=0)))
    for rank in (rig.entry, rig.other):
        rank.adopt(Update(TRUTH, calibrating=False, reason="from a file"))
    for _ in range(10):
        rig.serve(exact())
    assert [update.calibrating for update in rig.updates] == [True, False]
    assert rig.other.model is not None
    assert rig.other.model.a == pytest.approx(TRUTH.a, rel=1e-6)


def test_very_long_prompts_keep_memory_and_time_bounded() -> None:
    """A million tokens have thousands of shapes: a few hundred are kept, from the beginning to the end."""
    rig = Rig()
    seen: list[Sequence[Sample]] = []

    def watch(samples: Sequence[Sample]) -> Fit | Refusal:
        seen.append(samples)
        return Refusal("of a test")

    rig.learner = Learner(fitted_by=watch)
    for _ in range(3):
        rig.serve(exact(), prompt=1_000_000)
    assert len(seen) == 1
    assert len(seen[0]) <= 2 * SHAPES_KEPT
    for tokens in (512, 2048):
        prefixes = [sample.prefix for sample in seen[0] if sample.tokens == tokens]
        assert len(prefixes) > SHAPES_KEPT // 4
        assert min(prefixes) < 20_000
        assert max(prefixes) > 950_000
