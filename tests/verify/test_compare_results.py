"""When two answers are the same, and what is counted."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.verify.compare_prompts import Prompt
from scripts.verify.compare_results import (
    Answer,
    Candidate,
    Likeness,
    agreement,
    compare,
    exact_match,
    latency,
    mcnemar_p,
    percentile,
    several_chunks,
)

TOLERANCE = 0.1


def said(*pairs: tuple[int, float, int, float], **more: object) -> Answer:
    """An answer of (token, log probability, second likeliest token, its log probability)."""
    return Answer(
        1,
        tokens=tuple(token for token, *_ in pairs),
        logprobs=tuple(logprob for _, logprob, *_ in pairs),
        candidates=tuple((Candidate(t, lp), Candidate(t2, lp2)) for t, lp, t2, lp2 in pairs),
        **{"prompt_tokens": 10, **more},  # type: ignore[arg-type]
    )


FIRST = (7, -0.2, 8, -2.0)


def test_equal() -> None:
    """The same tokens, log probabilities within the tolerance."""
    pair = compare(said(FIRST, (9, -0.5, 3, -1)), said(FIRST, (9, -0.58, 3, -1)), TOLERANCE)
    assert pair.likeness is Likeness.EQUAL
    assert pair.first_different is None
    assert pair.gaps == pytest.approx((0, 0.08))


def test_equal_tokens_with_log_probabilities_apart() -> None:
    """Beyond the tolerance the answers are apart although they read alike."""
    pair = compare(said(FIRST, (9, -0.5, 3, -1)), said(FIRST, (9, -0.65, 3, -1)), TOLERANCE)
    assert pair.likeness is Likeness.DRIFTED
    assert "0.15 at token 1" in pair.detail


def test_a_tie() -> None:
    """Another token where both sides think both tokens as good as equally likely; what follows does not count."""
    a = said(FIRST, (5, -0.70, 6, -0.72), (1, -0.1, 2, -3))
    b = said(FIRST, (6, -0.69, 5, -0.73), (3, -0.9, 4, -1))
    pair = compare(a, b, TOLERANCE)
    assert pair.likeness is Likeness.TIE
    assert pair.first_different == 1
    assert len(pair.gaps) == 1


@pytest.mark.parametrize(
    "other",
    [
        (6, -0.2, 5, -1.5),  # b is sure of what a thinks second
        (4, -0.69, 5, -0.73),  # a did not think of it at all
        (6, -0.69, 3, -0.73),  # b does not think of a's at all
    ],
)
def test_another_token_that_is_no_tie(other: tuple[int, float, int, float]) -> None:
    """Rounding does not explain it."""
    pair = compare(said(FIRST, (5, -0.70, 6, -0.72)), said(FIRST, other), TOLERANCE)
    assert pair.likeness is Likeness.DIFFERENT
    assert pair.first_different == 1
    assert "at token 1: 5: " in pair.detail


def test_a_tie_does_not_hide_a_drift_before_it() -> None:
    """Log probabilities that were apart before the first different token are no rounding."""
    a = said((7, -0.2, 8, -2.0), (5, -0.70, 6, -0.72))
    b = said((7, -0.5, 8, -2.0), (6, -0.69, 5, -0.73))
    assert compare(a, b, TOLERANCE).likeness is Likeness.DIFFERENT


def test_an_answer_that_ends_early_is_different() -> None:
    """One side stopped where the other went on."""
    pair = compare(said(FIRST), said(FIRST, FIRST), TOLERANCE)
    assert pair.likeness is Likeness.DIFFERENT
    assert pair.first_different == 1
    assert "ends after 1 tokens" in pair.detail


def test_prompts_that_were_read_differently_are_different() -> None:
    """Another tokenizer or a cut prompt: the same answer proves nothing then."""
    pair = compare(said(FIRST), said(FIRST, prompt_tokens=11), TOLERANCE)
    assert pair.likeness is Likeness.DIFFERENT
    assert "10 and 11 tokens" in pair.detail


def test_log_probabilities_that_are_no_numbers() -> None:
    """On both sides they agree; on one they are apart, and no infinity reaches the figures."""
    broken = Answer(1, tokens=(7,), logprobs=(None,), candidates=((),), prompt_tokens=10)
    assert compare(broken, broken, TOLERANCE).likeness is Likeness.EQUAL
    pair = compare(said(FIRST), broken, TOLERANCE)
    assert pair.likeness is Likeness.DRIFTED
    assert agreement([pair])["logprob_gap_max"] is None


def test_refusals() -> None:
    """Both sides: left out, and too long is counted by itself. One side: apart."""
    long = Answer(1, refused="above the context length: 9 tokens, at most 5 fit")
    other = Answer(1, refused="no such adapter")
    too_long = compare(long, long, TOLERANCE)
    assert (too_long.likeness, too_long.detail) == (Likeness.TOO_LONG, "9 tokens, at most 5 fit")
    assert compare(long, other, TOLERANCE).likeness is Likeness.REFUSED
    one_sided = compare(said(FIRST), long, TOLERANCE)
    assert one_sided.likeness is Likeness.ONE_SIDED
    assert one_sided.detail.startswith("b: above the context length")
    counts = agreement([one_sided, compare(long, long, TOLERANCE)])
    assert counts["apart"] == 1
    assert counts["compared"] == 0
    assert counts["counts"]["above the context length"] == 1


def test_agreement_adds_up() -> None:
    """Every pair is in one count; the mean is over tokens, not over prompts; the first difference is a position."""
    equal = compare(said(FIRST, (9, -0.5, 3, -1)), said(FIRST, (9, -0.52, 3, -1)), TOLERANCE)
    tie = compare(said(FIRST, (5, -0.70, 6, -0.72)), said(FIRST, (6, -0.69, 5, -0.73)), TOLERANCE)
    different = compare(said((1, -0.1, 2, -9.0)), said((3, -0.1, 4, -9.0)), TOLERANCE)
    found = agreement([equal, tie, different])
    assert sum(found["counts"].values()) == 3
    assert (found["compared"], found["tokens_equal"], found["apart"]) == (3, 1, 1)
    assert found["common_tokens"] == 3
    assert found["logprob_gap_max"] == pytest.approx(0.02)
    assert found["logprob_gap_mean"] == pytest.approx(0.02 / 3)
    assert (found["first_different_earliest"], found["first_different_median"]) == (0, 0.5)


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"),
    # By hand: twice the lower tail of Binomial(n, 1/2).
    [(0, 0, 1.0), (1, 0, 1.0), (0, 5, 2 / 32), (0, 6, 2 / 64), (1, 9, 22 / 1024), (3, 3, 1.0), (2, 8, 112 / 1024)],
)
def test_mcnemar(only_a: int, only_b: int, p: float) -> None:
    """The exact probabilities."""
    assert mcnemar_p(only_a, only_b) == pytest.approx(p)


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_share_of_coins_at_least_as_uneven(only_a: int, only_b: int) -> None:
    """Against another way to count: Pascal's triangle, every split summed that is at least as far from even."""
    n = only_a + only_b
    row = [1]
    for _ in range(n):
        row = [1, *(x + y for x, y in pairwise(row)), 1]
    uneven = sum(ways for k, ways in enumerate(row) if abs(2 * k - n) >= abs(only_a - only_b))
    assert mcnemar_p(only_a, only_b) == pytest.approx(uneven / 2**n)
    assert mcnemar_p(only_a, only_b) == mcnemar_p(only_b, only_a)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_covers_its_share(values: list[float], share: float) -> None:
    """It is one of the values, at least the share is at or below it, and fewer are below any smaller one."""
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-9
    assert sum(value < found for value in values) < share * len(values) + 1e-9
    assert percentile([], 0.5) is None


def test_latency() -> None:
    """Median and 95th percentile of first tokens and of the gaps of all answers; refused prompts do not count."""
    answers = [said(FIRST, ttft_ms=float(n), itl_ms=(1.0, 3.0)) for n in range(1, 21)]
    found = latency([*answers, Answer(1, refused="too long")])
    assert found == {"ttft_median_ms": 10.5, "ttft_p95_ms": 19.0, "itl_median_ms": 2.0, "itl_p95_ms": 3.0}
    assert set(latency([]).values()) == {None}


def test_several_chunks_from_the_trace() -> None:
    """Where every answer's chunks are known they are counted; the rest at a prompt's end is no size."""
    answers = [said(FIRST, chunk_tokens=(512, 384, 17)), said(FIRST, chunk_tokens=(300,))]
    found = several_chunks(answers, {"chunked_prefill_size": 512}, dynamic=True)
    assert found["prompts"] == 1
    assert found["sizes_tokens"] == [512, 384]
    assert found["source"] == "DynChunk's trace"
    assert not found["at_least"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_several_chunks_computed(dynamic: bool) -> None:
    """Without a trace: what was not cached, over the engine's chunk size; for DynChunk that is the least."""
    answers = [said(FIRST, prompt_tokens=n, cached_tokens=c) for n, c in ((512, 0), (513, 0), (1_000, 600))]
    found = several_chunks(answers, {"chunked_prefill_size": 512}, dynamic=dynamic)
    assert found["prompts"] == 1
    assert found["at_least"] is dynamic
    assert "computed" in found["source"]
    assert found["sizes_tokens"] == ([] if dynamic else [512])
    assert several_chunks(answers, {"chunked_prefill_size": -1}, dynamic=dynamic)["prompts"] == 0


def test_exact_match() -> None:
    """Both answers of each question are read; prompts without a right answer and refused ones are left out."""
    prompts = [Prompt(n, 9, text="q", expected="4") for n in range(4)] + [Prompt(9, 9, text="no question")]
    texts_a, texts_b = ["4", "#### 4", "5", "4", "4"], ["4.0", "5", "4", "4", "4"]
    a = [Answer(1, text=text) for text in texts_a]
    b = [Answer(1, text=text) for text in texts_b]
    b[3] = Answer(1, refused="too long")
    found = exact_match(prompts, a, b)
    assert found == {
        "questions": 3,
        "a_right": 2,
        "b_right": 2,
        "only_a_right": 1,
        "only_b_right": 1,
        "mcnemar_p": 1.0,
    }
    assert exact_match(prompts[4:], a[4:], b[4:]) is None


@given(st.lists(st.floats(0, 0.09), min_size=1, max_size=30))
def test_within_the_tolerance_means_equal(gaps: list[float]) -> None:
    """Whatever the gaps, each below the tolerance: equal, and none of them lost."""
    a = said(*((n, -1.0, 0, -9.0) for n in range(1, len(gaps) + 1)))
    b = said(*((n, -1.0 - gap, 0, -9.0) for n, gap in enumerate(gaps, start=1)))
    pair = compare(a, b, TOLERANCE)
    assert pair.likeness is Likeness.EQUAL
    *_, total = accumulate(gaps)
    assert math.fsum(pair.gaps) == pytest.approx(total, abs=1e-9)
