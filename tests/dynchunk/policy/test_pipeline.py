"""Cutting a prompt for a pipeline: known measurements, and the laws that hold for every model, budget and length."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dynchunk.policy import latency
from dynchunk.policy.budget import PREFIX, SEQUENCE, Budget, chunk_tokens
from dynchunk.policy.budget import cost as product
from dynchunk.policy.cutting import (
    SMALL_PART,
    Band,
    Choice,
    Rules,
    bands,
    by_memory_alone,
    chunk,
    equal,
    promise,
    wanted,
)
from dynchunk.policy.latency import TICKS_PER_MS
from dynchunk.policy.pipeline import Cost, best, choose, cost, makespan

AMPLE = 10**15
# ROCm/ATOM pull request 2007 and its guide: Kimi-K2.5-MXFP4, pipeline of 4, prompts of 131,072 tokens, one at a time.
KIMI = latency.from_ms(a=3.25e-7, b=6.03e-3, c=26.1, gamma=5.39e-4)
KIMI_RULES = Rules(Budget(AMPLE, PREFIX, 64, 64, 32_768), KIMI, latency.sizes(least=256, most=32_768, page=64))
PROMPT = 131_072


def span_ms(rules: Rules, choice: Choice, stages: int, total: int, prefix: int = 0) -> float:
    return latency.in_ms(makespan(cost(rules.model, bands(rules, choice, prefix, total)), stages))


def cut(rules: Rules, choice: Choice, total: int, prefix: int = 0) -> list[tuple[int, int]]:
    """(prefix, tokens) of each chunk, one by one."""
    chunks = []
    while prefix < total:
        tokens = chunk(rules, choice, prefix, total - prefix)
        assert tokens > 0
        chunks.append((prefix, tokens))
        prefix += tokens
    assert prefix == total
    return chunks


def flow_line(times: list[int], stages: int) -> int:
    """The last exit from the last stage, followed chunk by chunk and stage by stage."""
    free = [0] * stages
    for time in times:
        ready = 0
        for stage in range(stages):
            ready = free[stage] = max(ready, free[stage]) + time
    return free[-1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(1, 6))
def test_makespan_is_a_flow_line(times: list[int], stages: int) -> None:
    """The closed form is what chunks that follow each other through equal stages take."""
    assert makespan(Cost(sum(times), max(times), len(times)), stages) == flow_line(times, stages)


@pytest.mark.parametrize(("size", "measured_ms"), [(32_768, 14_896), (16_384, 11_459), (8192, 10_121), (4096, 10_297)])
def test_against_published_measurements(size: int, measured_ms: float) -> None:
    """The simulated time of fixed chunks is within 6 % of the time to first token that was measured."""
    assert span_ms(KIMI_RULES, by_memory_alone(size), 4, PROMPT) == pytest.approx(measured_ms, rel=0.06)


@pytest.mark.parametrize(
    ("size", "predicted_ms"), [(32_768, 14_729), (16_384, 11_306), (8192, 9766), (4096, 9684), (2048, 11_105)]
)
def test_against_published_predictions(size: int, predicted_ms: float) -> None:
    """The same authors' prediction from the same coefficients, as far as these are rounded."""
    assert span_ms(KIMI_RULES, by_memory_alone(size), 4, PROMPT) == pytest.approx(predicted_ms, rel=0.002)


def test_the_best_cut_of_the_published_case() -> None:
    """Nobody has to name a size: the choice beats every fixed one, and the ladder that was tuned by hand."""
    chosen = span_ms(KIMI_RULES, best(KIMI_RULES, 4, 0, PROMPT), 4, PROMPT)
    by_hand = equal(KIMI, 32_768, 32_768)
    times = [latency.predict(KIMI, p, t) for p, t in cut(KIMI_RULES, by_hand, PROMPT)]
    assert chosen < latency.in_ms(flow_line(times, 4))
    for size in (2048, 4096, 8192, 16_384, 32_768):
        assert chosen < span_ms(KIMI_RULES, by_memory_alone(size), 4, PROMPT) * 0.93


@st.composite
def rules(draw: st.DrawFn) -> Rules:
    """Models from fast to slow, budgets from tight to none, pages and sizes of all kinds."""
    model = latency.from_ms(
        a=10.0 ** draw(st.floats(-9, -4)),
        b=10.0 ** draw(st.floats(-4, -1)),
        c=draw(st.floats(0, 100)),
        gamma=draw(st.one_of(st.just(0.0), st.floats(1e-6, 1e-2))),
    )
    page = draw(st.sampled_from([16, 64, 96, 256]))
    low = draw(st.integers(1, 8))
    high = low + draw(st.integers(0, 100))
    budget = Budget(
        10 ** draw(st.integers(7, 12)), draw(st.sampled_from([PREFIX, SEQUENCE])), page, low * page, high * page
    )
    return Rules(budget, model, latency.sizes(draw(st.integers(1, high * page)), high * page, page))


@st.composite
def choices(draw: st.DrawFn, r: Rules) -> Choice:
    most = draw(st.sampled_from(range(r.allowed.least, r.allowed.most + 1, r.allowed.align)))
    ceiling = draw(st.one_of(st.none(), st.integers(1, 10**6).map(lambda us: us * TICKS_PER_MS // 1000)))
    return Choice(most, ceiling, promised=draw(st.booleans()))


lengths = st.integers(1, 200_000)
prefixes = st.integers(0, 300_000)


@settings(deadline=None)
@given(st.data(), rules(), prefixes, lengths)
def test_bands_are_the_chunks(data: st.DataObject, r: Rules, prefix: int, length: int) -> None:
    """Going from size to size gives the very chunks that cutting one by one gives, and the same cost."""
    choice = data.draw(choices(r))
    total = prefix + length
    assume(length // r.allowed.least < 20_000)
    chunks = cut(r, choice, total, prefix)
    banded = list(bands(r, choice, prefix, total))
    assert [(b.prefix + k * b.tokens, b.tokens) for b in banded for k in range(b.chunks)] == chunks
    times = [latency.predict(r.model, p, t) for p, t in chunks]
    assert cost(r.model, banded) == Cost(sum(times), max(times), len(times))


@settings(deadline=None)
@given(st.data(), rules(), prefixes, lengths)
def test_both_limits_hold(data: st.DataObject, r: Rules, prefix: int, length: int) -> None:
    """Memory holds in every chunk that is not the memory rule's own floor; a promised time in all above the least."""
    choice = data.draw(choices(r))
    for p, tokens in cut(r, choice, prefix + length, prefix):
        assert tokens <= r.limits.chunk_max
        if tokens > chunk_tokens(r.limits, p):
            assert product(r.limits, p, tokens) <= r.limits.budget
        if choice.ceiling is not None and choice.promised and tokens > r.allowed.least:
            assert latency.predict(r.model, p, tokens) <= choice.ceiling
        if choice.ceiling is not None and tokens > r.allowed.least:
            assert latency.predict(r.model, p, tokens) <= choice.ceiling * (SMALL_PART + 1) // SMALL_PART
        if tokens > choice.most:
            assert tokens - choice.most < max(r.allowed.least, choice.most // SMALL_PART + 1)


@st.composite
def long_prompts(draw: st.DrawFn, r: Rules) -> int:
    """Of four of the largest chunks, or more: shorter ones are all remainder."""
    return draw(st.integers(4, 60)) * r.limits.chunk_max + draw(st.integers(0, r.limits.chunk_max))


@settings(deadline=None, max_examples=60)
@given(st.data(), rules(), st.integers(2, 8), st.booleans())
def test_never_worse_than_a_fixed_size(data: st.DataObject, r: Rules, stages: int, cached: bool) -> None:
    """In the model, no fixed size from the largest down in halves is better, and none at all by more than 2 %."""
    length = data.draw(long_prompts(r))
    prefix = length // 3 // 64 * 64 if cached else 0
    chosen = span_ms(r, best(r, stages, prefix, length), stages, length, prefix)
    sizes = list(range(r.allowed.least, r.allowed.most + 1, r.allowed.align))
    for size in sizes[:: max(len(sizes) // 40, 1)]:
        assert chosen <= span_ms(r, by_memory_alone(size), stages, length, prefix) * 1.02
    half = r.allowed.most
    while half > r.allowed.least:
        assert chosen <= span_ms(r, by_memory_alone(half), stages, length, prefix)
        half = max(half // 2, r.allowed.least)


@settings(deadline=None, max_examples=60)
@given(st.data(), rules(), st.integers(2, 8))
def test_near_the_best_of_all_ceilings(data: st.DataObject, r: Rules, stages: int) -> None:
    """A search through 200 ceilings finds nothing that is better by more than 5 %."""
    length = data.draw(long_prompts(r))
    chosen = span_ms(r, best(r, stages, 0, length), stages, length)
    longest = cost(r.model, bands(r, by_memory_alone(r.allowed.most), 0, length)).longest
    for k in range(1, 201):
        assert chosen <= span_ms(r, Choice(r.allowed.most, longest * k // 200), stages, length) * 1.05


@given(rules(), st.integers(1, 8), prefixes, lengths)
def test_one_stage_takes_what_memory_allows(r: Rules, stages: int, prefix: int, length: int) -> None:
    """Without a pipeline there is nothing to even out, in `choose` as in `best`."""
    assert best(r, 1, prefix, prefix + length) == choose(r, 1, prefix, prefix + length) == Choice(r.allowed.most)


@pytest.mark.parametrize("length", [5000, 20_001, 65_535, 100_000, 131_073, 499_999])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_similar_prompts_share_a_decision(stages: int, length: int) -> None:
    """A decision made for a slightly longer prompt costs this one little."""
    chosen = choose(KIMI_RULES, stages, 0, length)
    exact = best(KIMI_RULES, stages, 0, length)
    assert span_ms(KIMI_RULES, chosen, stages, length) <= span_ms(KIMI_RULES, exact, stages, length) * 1.05


def test_decisions_are_few() -> None:
    """Prompts of every length from 100,000 to 110,000 tokens need no more than a few dozen decisions."""
    assert len({choose(KIMI_RULES, 4, 0, total) for total in range(100_000, 110_000, 7)}) <= 40


@pytest.mark.parametrize("promised", [False, True])
def test_no_round_for_192_tokens(promised: bool) -> None:
    """A small remainder joins the chunk before; where the ceiling is a promise, only within it."""
    r = Rules(Budget(10**12, PREFIX, 64, 256, 4096), KIMI, latency.sizes(least=256, most=4096, page=64))
    first = latency.predict(KIMI, 0, 2048)
    exact, tight = Choice(4096, first * 2, promised=promised), Choice(4096, first, promised=promised)
    assert wanted(r, exact, 0, 2048 + 192) == 2240
    assert wanted(r, tight, 0, 2048 + 192) == (2048 if promised else 2240)
    assert wanted(r, tight, 0, 2048 + 257) == 2048


def test_memory_keeps_a_remainder_apart() -> None:
    """Where the budget has no room for the remainder, it stays a chunk of its own, whatever latency would like."""
    tight = Rules(Budget(2048 * 100_000, PREFIX, 64, 256, 4096), KIMI, latency.sizes(least=256, most=4096, page=64))
    generous = Choice(4096, 10**6 * TICKS_PER_MS)
    assert wanted(tight, Choice(2048), 100_000, 2240) == 2048
    assert chunk(tight, generous, 100_000, 2240) == 2048


def test_equal_falls_back_to_the_fixed_chunk() -> None:
    """Where the prefix's rebuild has eaten the time of a first chunk, chunks are no longer shrunk."""
    model = latency.from_ms(a=2.5e-5, b=0.015, c=3, gamma=0.002)
    r = Rules(Budget(10**12, PREFIX, 64, 64, 2048), model, latency.sizes(least=64, most=2048, page=64))
    choice = equal(model, 2048, 2048)
    assert wanted(r, choice, 65_536, 10**6) == 64
    assert wanted(r, choice, 70_000, 10**6) == 2048
    half = equal(model, 2048, 2048, Fraction(1, 2))
    assert wanted(r, half, 2048, 10**6) == 1472


@given(rules(), prefixes, lengths)
def test_a_promise_is_made_of_ticks(r: Rules, prefix: int, length: int) -> None:
    """However short the promised time, there is progress: the least chunk runs."""
    assert chunk(r, promise(r.allowed.most, 1), prefix, length) >= min(length, r.limits.page)


def test_a_million_tokens_are_few_bands() -> None:
    """What a decision costs does not follow the prompt's length: a ladder has as many bands as sizes."""
    r = Rules(Budget(2 * 10**8, PREFIX, 64, 256, 2048), KIMI, latency.sizes(least=256, most=2048, page=64))
    found = list(bands(r, by_memory_alone(2048), 0, 1_000_000))
    assert len(found) <= 2048 // 64 + 1
    assert found[0] == Band(0, 2048, 48)
