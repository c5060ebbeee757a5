"""The fit: what it finds again, and what it refuses."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynchunk.policy import latency
from dynchunk.policy.fit import COEFFICIENTS, Fit, Refusal, Sample, fit
from dynchunk.policy.latency import Model
from dynchunk.policy.least_squares import condition, solve

Timing = Callable[[int, int], float]

# Fitted on Kimi-K2.5-MXFP4, four pipeline stages: ROCm/ATOM pull request 2007 and its guide.
KIMI = latency.from_ms(a=3.25e-7, b=6.03e-3, c=26.1, gamma=5.39e-4)


def timing(model: Model) -> Timing:
    return lambda prefix, tokens: latency.in_ms(latency.predict(model, prefix, tokens))


def sweep(times: Timing, base: int, chunks: int, *, parts: Sequence[int] = (1, 4)) -> list[Sample]:
    """The chunks of prompts of `chunks` x `base` tokens, one prompt in the base and one in a quarter of it."""
    return [
        Sample(prefix, base // part, times(prefix, base // part))
        for part in parts
        for prefix in range(0, base * chunks, base // part)
    ]


def noisy(times: Timing, noise: float, chance: random.Random) -> Timing:
    return lambda prefix, tokens: times(prefix, tokens) * max(0.05, 1 + chance.gauss(0, noise))


def worst_error(found: Fit, model: Model, samples: Sequence[Sample]) -> float:
    """How far a prediction is off the planted truth at the most, as a share of it."""
    return max(
        abs(latency.predict(found.model, prefix, tokens) / latency.predict(model, prefix, tokens) - 1)
        for prefix, tokens, _ in samples
    )


@st.composite
def planted(draw: st.DrawFn) -> tuple[Model, int, int]:
    """A model, a base chunk and how many of them a prompt has: attention is 5 % of the longest chunk, or more."""
    model = latency.from_ms(
        a=draw(st.floats(1e-9, 1e-5)),
        b=draw(st.floats(1e-4, 0.1)),
        c=draw(st.floats(0.1, 100)),
        gamma=draw(st.one_of(st.just(0.0), st.floats(1e-6, 1e-2))),
    )
    base, chunks = draw(st.sampled_from([512, 2048, 8192, 32_768])), draw(st.integers(4, 16))
    last = base * (chunks - 1)
    attention = model.a * (2 * last + base) * base
    assume(attention > 0.05 * latency.predict(model, last, base))
    return model, base, chunks


unhurried = settings(deadline=None)  # a fit of hundreds of shapes, on a machine that may be busy
# Not hypothesis's own random numbers: those it makes as even as it can.
seeds = st.integers(0, 2**32)


@unhurried
@given(planted())
def test_exact_timings_give_the_coefficients_back(case: tuple[Model, int, int]) -> None:
    """Without noise every coefficient comes back; those that are zero, within rounding."""
    model, base, chunks = case
    samples = sweep(timing(model), base, chunks)
    found = fit(samples)
    assert isinstance(found, Fit)
    assert found.set_aside == 0
    assert worst_error(found, model, samples) < 1e-8
    largest = {"a": 2 * base * base * chunks, "b": base, "c": 1, "gamma": base * chunks}
    whole = latency.predict(model, base * chunks, base)
    for name in COEFFICIENTS:
        assert abs(getattr(found.model, name) - getattr(model, name)) * largest[name] < 1e-7 * whole


@unhurried
@given(planted(), st.sampled_from([0.03, 0.1]), seeds)
def test_noisy_timings_are_described_or_refused(case: tuple[Model, int, int], noise: float, seed: int) -> None:
    """A model that passes is near the truth: 5 standard errors of at most 5 %, at every chunk it has seen."""
    model, base, chunks = case
    chance = random.Random(seed)
    samples = [s for _ in range(4) for s in sweep(noisy(timing(model), noise, chance), base, chunks)]
    found = fit(samples)
    if isinstance(found, Fit):
        off = [
            abs(latency.predict(found.model, p, t) - latency.predict(model, p, t)) / latency.TICKS_PER_MS
            for p, t, _ in samples
        ]
        mean_ms = sum(ms for _, _, ms in samples) / len(samples)
        longest_ms = max(latency.in_ms(latency.predict(model, p, t)) for p, t, _ in samples)
        assert max(off) < 0.25 * max(mean_ms, longest_ms)


@pytest.mark.parametrize(
    ("noise", "base", "chunks", "repeats", "within"),
    [(0.03, 2048, 16, 1, 0.08), (0.03, 32_768, 4, 4, 0.08), (0.1, 2048, 64, 1, 0.15), (0.1, 2048, 32, 4, 0.12)],
)
def test_ordinary_noise_is_accepted(noise: float, base: int, chunks: int, repeats: int, within: float) -> None:
    """3 % and 10 % of noise: nearly every sweep of an ordinary size gives a model, near the truth everywhere."""
    accepted = 0
    for seed in range(20):
        chance = random.Random(seed)
        samples = [s for _ in range(repeats) for s in sweep(noisy(timing(KIMI), noise, chance), base, chunks)]
        found = fit(samples)
        if isinstance(found, Fit):
            accepted += 1
            assert worst_error(found, KIMI, samples) < within
    assert accepted >= 18


@pytest.mark.parametrize("factor", [3.0, 10.0, 60.0])
def test_outliers_do_not_count(factor: float) -> None:
    """One chunk in 20 takes many times as long: set aside, and the coefficients are those of the others."""
    for seed in range(20):
        chance = random.Random(seed)
        clean = sweep(noisy(timing(KIMI), 0.01, chance), 2048, 16)
        hit = set(chance.sample(range(len(clean)), len(clean) // 20))
        samples = [Sample(p, t, ms * factor if k in hit else ms) for k, (p, t, ms) in enumerate(clean)]
        found = fit(samples)
        assert isinstance(found, Fit)
        assert found.set_aside >= len(hit)
        assert worst_error(found, KIMI, samples) < 0.05


def test_one_slow_timing_of_a_shape_does_not_count() -> None:
    """A first timing of 7,234 ms among chunks of 220 ms changes no coefficient by 1 %, the shape being seen again."""
    usual = latency.from_ms(a=1e-6, b=0.05, c=10, gamma=1e-4)
    samples = sweep(timing(usual), 4096, 8) * 2
    found, plain = fit([Sample(0, 4096, 7234.0), *samples]), fit(samples)
    assert isinstance(found, Fit)
    assert isinstance(plain, Fit)
    for name in COEFFICIENTS:
        assert getattr(found.model, name) == pytest.approx(getattr(plain.model, name), rel=0.01)


@unhurried
@given(planted(), st.integers(1, 4))
def test_one_size_is_refused(case: tuple[Model, int, int], repeats: int) -> None:
    """However many prompts in one chunk size: what they say cannot be told apart."""
    model, base, chunks = case
    found = fit(sweep(timing(model), base, chunks, parts=[1] * repeats))
    assert isinstance(found, Refusal)
    assert "1 of at least 2 chunk sizes" in found.reason


@unhurried
@given(planted(), st.integers(1, 511))
def test_one_size_and_a_remainder_is_refused(case: tuple[Model, int, int], remainder: int) -> None:
    """The short last chunk of one prompt is a second size, but no second line."""
    model, base, chunks = case
    times = timing(model)
    end = base * chunks
    found = fit([*sweep(times, base, chunks + 2, parts=[1]), Sample(end, remainder, times(end, remainder))])
    assert isinstance(found, Refusal)
    assert "alike" in found.reason


def test_nearly_equal_sizes_are_refused() -> None:
    """2048 and 2032 are two sizes by number only."""
    times = timing(KIMI)
    found = fit([Sample(p, t, times(p, t)) for t in (2048, 2032) for p in range(0, 8192, 2048)])
    assert isinstance(found, Refusal)
    assert "condition" in found.reason


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize(
    "flat", [lambda p, t: 100.0, lambda p, t: 3 + 0.015 * t, lambda p, t: 3 + 0.015 * t + 1e-3 * p]
)
def test_no_attention_growth_is_refused(flat: Timing, noise: float) -> None:
    """Time that does not follow the attention area leaves nothing to equalise, whatever else it follows."""
    for seed in range(20):
        found = fit(sweep(noisy(flat, noise, random.Random(seed)), 2048, 16))
        assert isinstance(found, Refusal)
        assert "attention" in found.reason or noise


def test_falling_with_attention_is_refused() -> None:
    """A negative a is refused, never clamped."""
    found = fit(sweep(lambda p, t: 500 + 0.015 * t - 1e-7 * (2 * p + t) * t, 2048, 16))
    assert isinstance(found, Refusal)
    assert "attention" in found.reason


@unhurried
@given(planted(), st.integers(1, 4), seeds, st.booleans())
def test_wild_noise_is_refused(case: tuple[Model, int, int], repeats: int, seed: int, bell: bool) -> None:
    """60 % of noise is no basis for sizes, bell-shaped or even."""
    model, base, chunks = case
    chance = random.Random(seed)

    def wild(prefix: int, tokens: int) -> float:
        off = chance.gauss(0, 0.6) if bell else chance.uniform(-1, 1)
        return timing(model)(prefix, tokens) * max(0.05, 1 + off)

    assert isinstance(fit([s for _ in range(repeats) for s in sweep(wild, base, chunks)]), Refusal)


@pytest.mark.parametrize("name", ["b", "c", "gamma"])
def test_negative_coefficients_are_left_out(name: str) -> None:
    """What comes out negative is zero in the model, and the others are those of the best fit without it."""
    planted = {"a": 3e-6, "b": 6e-3, "c": 26.1, "gamma": 5e-4} | {name: {"b": -4e-3, "c": -9, "gamma": -1e-4}[name]}

    def times(prefix: int, tokens: int) -> float:
        p = planted
        area = 2 * prefix * tokens + tokens * tokens
        return p["c"] + p["gamma"] * prefix + p["b"] * tokens + p["a"] * area

    found = fit(sweep(times, 4096, 8))
    assert isinstance(found, Fit), found
    assert getattr(found.model, name) == 0
    assert name in found.without
    clamped = latency.from_ms(**(planted | {name: 0.0}))
    assert found.model.a != clamped.a


@pytest.mark.parametrize("samples", [[], [Sample(0, 512, 3.0)] * 40])
def test_too_little(samples: list[Sample]) -> None:
    """Nothing, or one shape many times, is said to be too little."""
    found = fit(samples)
    assert isinstance(found, Refusal)
    assert "at least" in found.reason


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0, -5.0])
def test_nonsense_is_refused(wrong: float) -> None:
    """A clock that answers nonsense ends in a refusal, not in an exception or a model."""
    found = fit(sweep(lambda p, t: wrong, 2048, 8))
    assert isinstance(found, Refusal)


numbers = st.integers(-20, 20)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.integers(1, 9)), min_size=4, max_size=12))
def test_least_squares_against_exact_arithmetic(points: list[tuple[int, int, int, int]]) -> None:
    """The weighted solution solves the normal equations, which are checked in exact fractions."""
    columns = [[float(x) for x, _, _, _ in points], [float(y) for _, y, _, _ in points]]
    values, weights = [float(v) for _, _, v, _ in points], [float(w) for _, _, _, w in points]
    assume(condition([[x * w for x, w in zip(c, weights, strict=True)] for c in columns]) < 1000)
    found = [Fraction(value) for value in solve(columns, values, weights).coefficients]
    for column in columns:
        gradient = sum(
            Fraction(x) * w * w * (v - found[0] * a - found[1] * b)
            for x, (a, b, v, w) in zip(map(int, column), points, strict=True)
        )
        assert abs(gradient) < Fraction(1, 10**6)


def test_condition_numbers() -> None:
    """Orthogonal columns 1, dependent ones infinite, and the angle between two in between: cot of half of it."""
    assert condition([[1.0, 0.0, 0.0], [0.0, 7.0, 0.0]]) == pytest.approx(1)
    assert condition([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]) == math.inf
    assert condition([[1.0, 2.0], [0.0, 0.0]]) == math.inf
    angle = 0.2
    assert condition([[1.0, 0.0], [math.cos(angle), math.sin(angle)]]) == pytest.approx(1 / math.tan(angle / 2))
