"""What a chunk costs in time, and which chunk costs what is wanted. Exact integers, so that every rank agrees.

A forward of x new tokens on a prefix of L takes t(L, x) = c + gamma*L + b*x + a*(2*L*x + x*x): c for each forward,
gamma for work that follows the prefix alone (latents that are rebuilt), b for work that follows the new tokens, a for
the attention area. The coefficients are fitted once, on one rank (fit.py), rounded to ticks, and travel as integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

# A tick is 1e-15 ms. The smallest coefficient, a, is around 3e-7 ms on today's machines, 3e8 ticks: rounding to whole
# ticks changes no prediction by more than a billionth.
TICKS_PER_MS = 10**15


@dataclass(frozen=True)
class Model:
    """The four coefficients in ticks: a each token^2, b each new token, c each forward, gamma each prefix token."""

    a: int
    b: int
    c: int
    gamma: int

    def __post_init__(self) -> None:
        """Raises ValueError where a is not positive or another is negative: nothing could be solved for then."""
        if self.a <= 0 or min(self.b, self.c, self.gamma) < 0:
            raise ValueError(f"a latency model needs a above 0 and the others at least 0, got {self}")


def from_ms(a: float, b: float, c: float, gamma: float) -> Model:
    """A model from coefficients in ms. Raises ValueError as Model does, and where a number is not finite."""
    try:
        return Model(*(round(Fraction(value) * TICKS_PER_MS) for value in (a, b, c, gamma)))
    except OverflowError as error:
        raise ValueError(f"a latency model needs finite coefficients: {error}") from error


def in_ms(ticks: int) -> float:
    """Ticks as ms, for people."""
    return ticks / TICKS_PER_MS


def from_ms_time(ms: float) -> int:
    """A time in ms as ticks."""
    return round(Fraction(ms) * TICKS_PER_MS)


def predict(model: Model, prefix: int, tokens: int) -> int:
    """What a chunk of `tokens` on `prefix` takes, in ticks."""
    return model.c + model.gamma * prefix + work(model, prefix, tokens)


def work(model: Model, prefix: int, tokens: int) -> int:
    """The part of it that the new tokens cause: all but c and gamma*L. Ticks."""
    return (model.b + model.a * (2 * prefix + tokens)) * tokens


def tokens_within(model: Model, prefix: int, ticks: int) -> int:
    """The most new tokens whose `work` on `prefix` is at most `ticks`; 0 where none is. Rounds down, exactly."""
    if ticks <= 0:
        return 0
    # The positive root of a*x^2 + slope*x - ticks. Flooring the square root first changes nothing: the divisor and
    # what is subtracted are integers.
    slope = model.b + 2 * model.a * prefix
    return (isqrt(slope * slope + 4 * model.a * ticks) - slope) // (2 * model.a)


def prefix_within(model: Model, tokens: int, ticks: int) -> int:
    """The longest prefix on which `tokens` new ones take at most `ticks` in all; negative where none does."""
    each = model.gamma + 2 * model.a * tokens
    return (ticks - model.c - (model.b + model.a * tokens) * tokens) // each


@dataclass(frozen=True)
class Sizes:
    """What a latency-sized chunk may be, in tokens.

    least: the smallest, where the model asks for less. most: the largest (base, static or batch limit, whichever is
    least). align: sizes are multiples of it. `least` and `most` are, too, and least <= most.
    """

    least: int
    most: int
    align: int

    def fit(self, tokens: int) -> int:
        """The nearest allowed size that is not above `tokens`, or the least."""
        return max(min(tokens // self.align * self.align, self.most), self.least)


def sizes(least: int, most: int, page: int, align: int = 64) -> Sizes:
    """Sizes made whole: multiples of the page that are at least `align`, the least rounded up, the most down.

    Where even one such step is above `most`, single pages are the step. `most` is at least a page.
    """
    step = -(-align // page) * page
    step = step if step <= most else page
    top = most // step * step
    return Sizes(min(max(-(-least // step), 1) * step, top), top, step)


def equal_chunk(model: Model, allowed: Sizes, base: int, prefix: int, smooth: Fraction = Fraction(1)) -> int | None:
    """The chunk on `prefix` that takes as long as the first one, of `base` tokens, did; None for the fixed chunk.

    c is paid by both, so it is left out. None where rebuilding the prefix alone takes as long (`exhausted_after`): no
    chunk can match then, and smaller ones would rebuild it more often. None too where c is most of what the base takes:
    a smaller chunk pays it again and is hardly quicker. smooth: 1 is the solver's answer, 0 the base,
    between them a blend.
    """
    wanted = work(model, 0, base)
    left = wanted - model.gamma * prefix
    if left <= 0 or model.c > wanted:
        return None
    solved = tokens_within(model, prefix, left)
    blended = base + smooth.numerator * (solved - base) // smooth.denominator
    # Down to a whole step, as everywhere; but where that would lose more than a third of a small chunk, the step above
    # is as near (122 tokens in steps of 64 are 128).
    if 3 * (blended % allowed.align) > blended:
        blended += allowed.align
    return allowed.fit(min(blended, base))


def exhausted_after(model: Model, base: int) -> int | None:
    """The longest prefix that leaves any time for new tokens in a chunk as long as the first; None if all do."""
    return (work(model, 0, base) - 1) // model.gamma if model.gamma else None


def ceiling_chunk(model: Model, allowed: Sizes, prefix: int, ceiling: int) -> int:
    """The largest chunk on `prefix` that takes at most `ceiling` ticks, but never less than the least."""
    return allowed.fit(tokens_within(model, prefix, ceiling - model.c - model.gamma * prefix))


OFF, EQUAL, PIPELINE, CEILING = "off", "equal", "pipeline", "ceiling"


@dataclass(frozen=True)
class Mode:
    """What chunks are sized for. kind: OFF, EQUAL, PIPELINE or CEILING; ceiling: ticks, with CEILING alone."""

    kind: str = OFF
    ceiling: int = 0


def parse_mode(text: str) -> Mode:
    """What DYNCHUNK_LATENCY asks for, in the spelling that settings.py makes of it: `off`, `250ms`."""
    if text in (OFF, EQUAL, PIPELINE):
        return Mode(text)
    return Mode(CEILING, int(text.removesuffix("ms")) * TICKS_PER_MS)
