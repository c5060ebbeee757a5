"""What two sides' answers say when laid side by side. Pure.

Two answers are the same if every token is, with its log probability within a tolerance. Floating-point sums taken in
another order may turn a choice between two tokens that are as good as equally likely; everything after it is then
another text. So up to and at the first token that differs the rule stays the same: both tokens' log probabilities
agree between the sides within the tolerance. That is a tie. Any other difference is none that rounding explains.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.verify.compare_prompts import Prompt, final_number

SIGNIFICANT = 0.05
TOO_LONG = "above the context length"


class Candidate(NamedTuple):
    """A token that the engine thought likely at one position."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Answer:
    """What one side said to the prompt of one line. refused: why it said nothing; all the rest is then empty.

    candidates: the likeliest two of each position. itl_ms: milliseconds before each token but the first.
    chunk_tokens: the prefill's chunks, empty where no trace tells.
    """

    line: int
    refused: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    candidates: tuple[tuple[Candidate, ...], ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: float = 0.0
    itl_ms: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()


class Likeness(str, enum.Enum):
    """How two answers to one prompt compare."""

    EQUAL = "equal"
    TIE = "equal up to a tie"
    DRIFTED = "equal tokens, log probabilities apart"
    DIFFERENT = "different"
    ONE_SIDED = "answered by one side only"
    TOO_LONG = TOO_LONG
    REFUSED = "refused by both sides"


COMPARED = (Likeness.EQUAL, Likeness.TIE, Likeness.DRIFTED, Likeness.DIFFERENT)
APART = (Likeness.DRIFTED, Likeness.DIFFERENT, Likeness.ONE_SIDED)


@dataclass(frozen=True)
class Pair:
    """Both answers to one prompt. gaps: |difference of log probabilities| of each token of the common beginning.

    first_different: the position of the first token that is not the same, None where all are.
    """

    line: int
    likeness: Likeness
    gaps: tuple[float, ...] = ()
    first_different: int | None = None
    detail: str = ""


def compare(a: Answer, b: Answer, tolerance: float) -> Pair:
    """Lay two answers side by side. tolerance: of log probabilities, in nats."""
    if a.refused or b.refused:
        return _without_answer(a, b)
    if a.prompt_tokens != b.prompt_tokens:
        detail = f"the sides read the prompt as {a.prompt_tokens:,} and {b.prompt_tokens:,} tokens"
        return Pair(a.line, Likeness.DIFFERENT, (), 0, detail)
    common = _common(a.tokens, b.tokens)
    gaps = tuple(_gap(_logprob(a, position), _logprob(b, position)) for position in range(common))
    first_different = None if common == len(a.tokens) == len(b.tokens) else common
    worst = max(gaps, default=0.0)
    if worst > tolerance:
        likeness = Likeness.DRIFTED if first_different is None else Likeness.DIFFERENT
        detail = f"log probability apart by {worst:.4g} at token {gaps.index(worst)}"
    elif first_different is None:
        likeness, detail = Likeness.EQUAL, ""
    else:
        tie, detail = _at_the_fork(a, b, common, tolerance)
        likeness = Likeness.TIE if tie else Likeness.DIFFERENT
    return Pair(a.line, likeness, gaps, first_different, detail)


def mcnemar_p(only_a: int, only_b: int) -> float:
    """McNemar's exact test, two-sided: how likely a split at least this uneven is if both sides are equally good.

    only_a, only_b: prompts that only this side got right.
    """
    n = only_a + only_b
    tail: int = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1))
    return min(1.0, 2 * tail / (1 << n))


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def several_chunks(answers: Iterable[Answer], flags: dict[str, Any], *, dynamic: bool) -> dict[str, Any]:
    """How many prompts were prefilled in more than one chunk, in which sizes, and how that is known.

    Where no trace tells: a server that is asked one prompt at a time cuts what is not cached by its chunk size. Under
    DynChunk no chunk is larger, so that is the least there can have been.
    """
    answered = [answer for answer in answers if not answer.refused]
    traced = [answer.chunk_tokens for answer in answered if answer.chunk_tokens]
    if traced and len(traced) == len(answered):
        sizes = {tokens for chunks in traced for tokens in chunks[:-1]}  # the last is what was left
        return {
            "prompts": sum(len(chunks) > 1 for chunks in traced),
            "at_least": False,
            "chunks": sum(map(len, traced)),
            "sizes_tokens": sorted(sizes, reverse=True),
            "source": "DynChunk's trace",
        }
    static_tokens = int(flags.get("chunked_prefill_size") or 0)
    if static_tokens <= 0:
        return {"prompts": 0, "at_least": False, "source": "the engine does not cut prompts, or does not say how"}
    several = sum(answer.prompt_tokens - answer.cached_tokens > static_tokens for answer in answered)
    return {
        "prompts": several,
        "at_least": dynamic,
        "sizes_tokens": [static_tokens] if several and not dynamic else [],
        "source": f"computed: tokens not cached, over the engine's chunk size of {static_tokens:,}",
    }


def latency(answers: Iterable[Answer]) -> dict[str, float | None]:
    """Milliseconds to the first token (of each prompt) and between tokens (of all answers)."""
    answered = [answer for answer in answers if answer.tokens]
    first = [answer.ttft_ms for answer in answered]
    between = [gap for answer in answered for gap in answer.itl_ms]
    return {
        "ttft_median_ms": statistics.median(first) if first else None,
        "ttft_p95_ms": percentile(first, 0.95),
        "itl_median_ms": statistics.median(between) if between else None,
        "itl_p95_ms": percentile(between, 0.95),
    }


def exact_match(prompts: Sequence[Prompt], a: Sequence[Answer], b: Sequence[Answer]) -> dict[str, Any] | None:
    """Questions whose final number is right, by side; None where nothing was asked that has a right answer."""
    right = [
        (final_number(said_a.text) == prompt.expected, final_number(said_b.text) == prompt.expected)
        for prompt, said_a, said_b in zip(prompts, a, b, strict=True)
        if prompt.expected is not None and not said_a.refused and not said_b.refused
    ]
    if not right:
        return None
    only_a, only_b = right.count((True, False)), right.count((False, True))
    return {
        "questions": len(right),
        "a_right": sum(on_a for on_a, _ in right),
        "b_right": sum(on_b for _, on_b in right),
        "only_a_right": only_a,
        "only_b_right": only_b,
        "mcnemar_p": mcnemar_p(only_a, only_b),
    }


def agreement(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Counts of each likeness, the share of equal tokens, log probabilities and first differences over all pairs."""
    compared = [pair for pair in pairs if pair.likeness in COMPARED]
    gaps = [gap for pair in compared for gap in pair.gaps if math.isfinite(gap)]
    firsts = [pair.first_different for pair in compared if pair.first_different is not None]
    return {
        "counts": {kind.value: sum(pair.likeness is kind for pair in pairs) for kind in Likeness},
        "compared": len(compared),
        "tokens_equal": len(compared) - len(firsts),
        "common_tokens": len(gaps),
        "logprob_gap_max": max(gaps, default=None),
        "logprob_gap_mean": math.fsum(gaps) / len(gaps) if gaps else None,
        "first_different_earliest": min(firsts, default=None),
        "first_different_median": statistics.median(firsts) if firsts else None,
        "apart": sum(pair.likeness in APART for pair in pairs),
    }


def _without_answer(a: Answer, b: Answer) -> Pair:
    if not (a.refused and b.refused):
        side, reason = ("a", a.refused) if a.refused else ("b", b.refused)
        return Pair(a.line, Likeness.ONE_SIDED, detail=f"{side}: {reason}")
    both_long = a.refused.startswith(TOO_LONG) and b.refused.startswith(TOO_LONG)
    likeness = Likeness.TOO_LONG if both_long else Likeness.REFUSED
    said = [answer.refused.removeprefix(f"{likeness.value}: ") for answer in (a, b)]
    return Pair(a.line, likeness, detail=said[0] if said[0] == said[1] else f"a: {said[0]}; b: {said[1]}")


def _at_the_fork(a: Answer, b: Answer, position: int, tolerance: float) -> tuple[bool, str]:
    """Whether the choice at the first different token was a tie, and what it was between."""
    if position >= min(len(a.tokens), len(b.tokens)):
        return False, f"one answer ends after {position} tokens, the other goes on"
    on_a, on_b = _likely(a, position), _likely(b, position)
    chosen = a.tokens[position], b.tokens[position]
    seen = [f"{token}: {_said(on_a.get(token))} on a, {_said(on_b.get(token))} on b" for token in chosen]
    tie = all(_gap(on_a.get(token), on_b.get(token)) <= tolerance for token in chosen) and all(
        token in on_a and token in on_b for token in chosen
    )
    return tie, f"at token {position}: " + "; ".join(seen)


def _likely(answer: Answer, position: int) -> dict[int, float | None]:
    """Log probabilities known at one position: the two likeliest tokens and the one taken."""
    known: dict[int, float | None] = {}
    if position < len(answer.candidates):
        known |= {candidate.token: candidate.logprob for candidate in answer.candidates[position]}
    known[answer.tokens[position]] = _logprob(answer, position)
    return known


def _logprob(answer: Answer, position: int) -> float | None:
    return answer.logprobs[position] if position < len(answer.logprobs) else None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _gap(x: float | None, y: float | None) -> float:
    """Distance of two log probabilities. An engine says None for what is no number: alike on both sides, or not."""
    if x is None or y is None:
        return 0.0 if x is y else math.inf
    return abs(x - y)


def _said(logprob: float | None) -> str:
    return "not among the two likeliest" if logprob is None else f"{logprob:.4f}"
