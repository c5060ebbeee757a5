"""The latency model and what is solved with it: known values, and the laws that hold for all models."""

from __future__ import annotations

import math
import pickle
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dynchunk.policy import latency
from dynchunk.policy.latency import TICKS_PER_MS, Model, Sizes

EXAMPLE = latency.from_ms(a=2.5e-5, b=0.015, c=3, gamma=0.002)
SMALL = latency.sizes(least=64, most=2048, page=64)
# Fitted on Kimi-K2.5-MXFP4, four pipeline stages: ROCm/ATOM pull request 2007 and its guide.
KIMI = latency.from_ms(a=3.25e-7, b=6.03e-3, c=26.1, gamma=5.39e-4)


@pytest.mark.parametrize(
    ("prefix", "chunk"),
    [(0, 2048), (2048, 896), (4096, 512), (8192, 256), (16_384, 128), (67_788, 64), (67_789, None), (70_000, None)],
)
def test_equal_known_values(prefix: int, chunk: int | None) -> None:
    """The worked example: shrinking, rounded to the nearest step where steps are coarse, given up beyond 67,788."""
    assert latency.equal_chunk(EXAMPLE, SMALL, 2048, prefix) == chunk


def test_equal_stands_down_where_a_chunk_costs_little_beside_the_forward() -> None:
    """49 ms for each forward and hardly anything for its tokens: smaller chunks would only pay the 49 ms again."""
    bound_by_launch = latency.from_ms(a=3e-9, b=0, c=49, gamma=0)
    assert all(latency.equal_chunk(bound_by_launch, SMALL, 2048, prefix) is None for prefix in (0, 2048, 90_000))


def test_exhausted_after() -> None:
    """The prefix at which the rebuild has eaten a first chunk's time is known beforehand."""
    assert latency.exhausted_after(EXAMPLE, 2048) == 67_788
    assert latency.exhausted_after(latency.from_ms(a=1e-6, b=0.01, c=1, gamma=0), 2048) is None


def test_equal_published_sequence() -> None:
    """A published ladder of 128k tokens, 13 chunks of 572 ms each, comes out size by size."""
    allowed = latency.sizes(least=4096, most=32_768, page=64)
    chunks = []
    while sum(chunks) < 131_072:
        chunk = latency.equal_chunk(KIMI, allowed, 32_768, sum(chunks))
        assert chunk is not None
        chunks.append(min(chunk, 131_072 - sum(chunks)))
    assert chunks == [32_768, 16_192, 12_416, 10_368, 9088, 8192, 7488, 6912, 6464, 6080, 5760, 5504, 3840]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any machine from far faster than today's to a laptop."""
    return latency.from_ms(
        a=draw(st.floats(1e-10, 1e-4)),
        b=draw(st.floats(0, 1)),
        c=draw(st.floats(0, 500)),
        gamma=draw(st.floats(0, 0.1)),
    )


@st.composite
def allowed_sizes(draw: st.DrawFn) -> Sizes:
    page = draw(st.sampled_from([1, 16, 64, 96, 256]))
    most = draw(st.integers(page, 40_000))
    return latency.sizes(draw(st.integers(1, most)), most, page)


prefixes = st.integers(0, 2_000_000)
tokens = st.integers(1, 70_000)


@given(models(), prefixes, tokens)
def test_prediction_is_the_formula(model: Model, prefix: int, x: int) -> None:
    """The integers say what the formula says."""
    a, b, c, gamma = (k / TICKS_PER_MS for k in (model.a, model.b, model.c, model.gamma))
    expected = c + gamma * prefix + b * x + a * (2 * prefix * x + x * x)
    assert math.isclose(latency.in_ms(latency.predict(model, prefix, x)), expected, rel_tol=1e-9, abs_tol=1e-12)


@given(models(), prefixes, tokens)
def test_whole_ticks_change_nothing(model: Model, prefix: int, x: int) -> None:
    """A model that went through ms, as people and files write it, predicts the same within a millionth."""
    again = latency.from_ms(*(latency.in_ms(k) for k in (model.a, model.b, model.c, model.gamma)))
    first, second = (latency.predict(m, prefix, x) for m in (model, again))
    assert abs(first - second) <= first / 10**6


@given(models(), prefixes, st.integers(0, 10**21))
def test_tokens_within_is_exact(model: Model, prefix: int, ticks: int) -> None:
    """What is solved keeps the time, and one token more would not."""
    x = latency.tokens_within(model, prefix, ticks)
    assert latency.work(model, prefix, x) <= ticks
    assert latency.work(model, prefix, x + 1) > ticks


@given(models(), tokens, st.integers(0, 10**21))
def test_prefix_within_is_exact(model: Model, x: int, ticks: int) -> None:
    """The longest prefix keeps the time, and one longer would not; negative if none does."""
    prefix = latency.prefix_within(model, x, ticks)
    assert latency.predict(model, prefix + 1, x) > ticks
    if prefix >= 0:
        assert latency.predict(model, prefix, x) <= ticks


@given(models(), allowed_sizes(), prefixes)
def test_equal_costs_what_the_base_does(model: Model, allowed: Sizes, prefix: int) -> None:
    """Unless a limit decides, a solved chunk costs what the first did, to a step; only small ones are rounded up."""
    chunk = latency.equal_chunk(model, allowed, allowed.most, prefix)
    assume(chunk is not None)
    assert chunk is not None
    first = latency.predict(model, 0, allowed.most)
    if chunk > allowed.least:
        down = chunk if chunk > 2 * allowed.align else chunk - allowed.align
        assert latency.predict(model, prefix, down) <= first
    if chunk < allowed.most:
        assert latency.predict(model, prefix, chunk + allowed.align) > first


@given(models(), allowed_sizes(), prefixes, st.fractions(0, 1))
def test_equal_stays_inside_its_limits(model: Model, allowed: Sizes, prefix: int, smooth: Fraction) -> None:
    """Never below the least, never above base or most, always aligned; less smoothing never makes it smaller."""
    chunk = latency.equal_chunk(model, allowed, allowed.most, prefix, smooth)
    solved = latency.equal_chunk(model, allowed, allowed.most, prefix)
    assert (chunk is None) == (solved is None)
    if chunk is not None and solved is not None:
        assert allowed.least <= solved <= chunk <= allowed.most
        assert chunk % allowed.align == 0


def test_smoothing_zero_is_the_base() -> None:
    """0 switches the solver off without switching the mode."""
    assert latency.equal_chunk(EXAMPLE, SMALL, 2048, 16_384, Fraction(0)) == 2048


@given(models(), allowed_sizes(), prefixes, st.integers(0, 10**21))
def test_ceiling(model: Model, allowed: Sizes, prefix: int, ceiling: int) -> None:
    """Above the least, the time is kept; below the most, a step more would break it."""
    chunk = latency.ceiling_chunk(model, allowed, prefix, ceiling)
    assert allowed.least <= chunk <= allowed.most
    assert chunk % allowed.align == 0
    if chunk > allowed.least:
        assert latency.predict(model, prefix, chunk) <= ceiling
    if chunk < allowed.most:
        assert latency.predict(model, prefix, chunk + allowed.align) > ceiling


@given(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from([1, 16, 96, 256]), st.sampled_from([1, 64, 512]))
def test_sizes_are_whole(least: int, most: int, page: int, align: int) -> None:
    """Whatever is asked for, steps are pages, and the least is not above the most."""
    assume(most >= page)
    allowed = latency.sizes(least, most, page, align)
    assert allowed.align % page == allowed.least % allowed.align == allowed.most % allowed.align == 0
    assert 0 < allowed.least <= allowed.most <= most


@pytest.mark.parametrize("wrong", [(0, 1, 1, 1), (-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)])
def test_impossible_models_are_refused(wrong: tuple[float, ...]) -> None:
    """Time that does not grow with attention, or is negative, is no model."""
    with pytest.raises(ValueError, match="a above 0"):
        latency.from_ms(*wrong)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_not_numbers(wrong: float) -> None:
    """Nothing that is not a finite number becomes a coefficient."""
    with pytest.raises(ValueError, match=r"finite|NaN"):
        latency.from_ms(1e-6, wrong, 1, 0)


def test_a_model_travels() -> None:
    """What arrives on another rank is what was sent."""
    assert pickle.loads(pickle.dumps(KIMI)) == KIMI
