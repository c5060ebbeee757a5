"""From timings to a latency model, or the reason why there is none.

Runs on one rank only and uses floats: what it finds is rounded to whole ticks (latency.py) before any rank sizes a
chunk with it.

How: the median for each shape; least squares of the relative error, because timings are off by a share of themselves
and small chunks must count as much as large ones; far-off shapes weigh less and less (Huber), and if few they are set
aside in the end; a coefficient that comes out negative is left out and the rest fitted again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, median_low
from typing import NamedTuple

from dynchunk.policy.latency import Model, from_ms
from dynchunk.policy.least_squares import Solution, condition, solve

# What has to be there before a fit means anything, and how good it has to be. The shares are of the mean chunk time.
LEAST_SHAPES = 6
LEAST_PREFIXES = 3
LEAST_SIZES = 2  # with one size 2*L*x + x*x is a line in L, and a, gamma and c cannot be told apart
MOST_RMS_SHARE = 0.25
MOST_CONDITION = 100.0
MOST_STDERR_SHARE = 0.05
# Attention has to show: in the time of the chunk that has most of it, and beyond doubt (standard errors). Up to eight
# looks at the same noise would come upon three standard errors by chance, in one server of eight.
LEAST_AREA_SHARE = 0.05
LEAST_AREA_STDERRS = 4.0
# Shapes this far off (in robust standard deviations) weigh less, or are set aside as long as they are few.
DOUBTED = 1.5
FAR_OFF = 6.0
MOST_SET_ASIDE = 0.1
LEAST_DEVIATION = 0.003  # a share of the chunk's time: nothing is far off only because the rest is exact
ROUNDS = 6

COEFFICIENTS = ("a", "b", "c", "gamma")


class Sample(NamedTuple):
    """One timed chunk: `tokens` new ones on a prefix of `prefix`, in ms."""

    prefix: int
    tokens: int
    ms: float


@dataclass(frozen=True)
class Fit:
    """A model, and how well it describes what was measured.

    shapes: (prefix, tokens) pairs it stands on. set_aside: pairs left out as far off. rms_share: root mean square of
    the errors, as a share of the mean chunk time. stderr_share: the largest standard error of a prediction, as a share
    of the mean, or of the chunk's own time where that is longer. condition: of the scaled design. without:
    coefficients that came out negative and were left out.
    """

    model: Model
    shapes: int
    set_aside: int
    rms_share: float
    stderr_share: float
    condition: float
    without: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """Why these timings give no model: one phrase."""

    reason: str


def lacking(samples: Iterable[Sample]) -> str | None:
    """What is missing for an attempt, as a phrase; None if nothing is."""
    shapes = {(sample.prefix, sample.tokens) for sample in samples}
    for have, least, what in (
        (len({tokens for _, tokens in shapes}), LEAST_SIZES, "chunk sizes"),
        (len({prefix for prefix, _ in shapes}), LEAST_PREFIXES, "prefixes"),
        (len(shapes), LEAST_SHAPES, "shapes"),
    ):
        if have < least:
            return f"{have} of at least {least} {what} seen"
    return None


def fit(samples: Sequence[Sample]) -> Fit | Refusal:
    """The model that describes these timings best, if it describes them well enough."""
    missing = lacking(samples)
    if missing is not None:
        return Refusal(missing)
    wrong = next((sample.ms for sample in samples if not 0 < sample.ms < inf), None)
    if wrong is not None:
        return Refusal(f"a chunk took {wrong} ms by this rank's clock")
    points = _medians(samples)
    known = condition([_column(points, name) for name in COEFFICIENTS])
    if known > MOST_CONDITION:
        return Refusal(
            "chunk sizes and prefixes are too much alike to tell the coefficients apart "
            f"(condition {known:,.0f}, at most {MOST_CONDITION:.0f})"
        )
    names = list(COEFFICIENTS)
    while True:
        kept, solution = _robust(points, names)
        found = dict(zip(names, solution.coefficients, strict=True))
        negative = [name for name in names[1:] if found[name] < 0]
        if not negative:
            return _judged(kept, names, solution, known, set_aside=len(points) - len(kept))
        # Without the one that takes away the most, another may come out positive.
        names.remove(min(negative, key=lambda name: found[name] * fmean(_column(kept, name))))


def _medians(samples: Iterable[Sample]) -> list[Sample]:
    """One sample for each shape. Of two timings the quicker: what disturbs a timing makes it longer."""
    times = defaultdict(list)
    for sample in samples:
        times[sample.prefix, sample.tokens].append(sample.ms)
    return [Sample(*shape, median_low(ms)) for shape, ms in sorted(times.items())]


def _column(points: Sequence[Sample], name: str) -> list[float]:
    """What a coefficient is multiplied with, for each point."""
    if name == "a":
        return [float((2 * point.prefix + point.tokens) * point.tokens) for point in points]
    if name == "b":
        return [float(point.tokens) for point in points]
    return [1.0] * len(points) if name == "c" else [float(point.prefix) for point in points]


def _robust(points: Sequence[Sample], names: Sequence[str]) -> tuple[list[Sample], Solution]:
    """The points that count, and the coefficients that make their relative errors least."""
    columns, times = [_column(points, name) for name in names], [point.ms for point in points]
    expected, doubts = times, [1.0] * len(points)
    errors, deviation = [0.0] * len(points), LEAST_DEVIATION
    for _ in range(ROUNDS):
        solution = solve(columns, times, [doubt / ms for doubt, ms in zip(doubts, expected, strict=True)])
        # Far from the solution, a prediction can be near zero or below.
        expected = [max(ms, measured / 10) for ms, measured in zip(solution.predicted, times, strict=True)]
        errors = [
            abs(measured - predicted) / ms
            for measured, predicted, ms in zip(times, solution.predicted, expected, strict=True)
        ]
        deviation = max(1.4826 * median(errors), LEAST_DEVIATION)
        doubts = [sqrt(min(1.0, DOUBTED * deviation / error)) if error else 1.0 for error in errors]
    near = [k for k, error in enumerate(errors) if error <= FAR_OFF * deviation]
    if len(near) < len(points) * (1 - MOST_SET_ASIDE):
        near = list(range(len(points)))  # too many to be accidents: the fit has to stand with them, or fall
    kept = [points[k] for k in near]
    columns = [_column(kept, name) for name in names]
    return kept, solve(columns, [point.ms for point in kept], [1 / expected[k] for k in near])


def _judged(
    points: Sequence[Sample], names: Sequence[str], solution: Solution, known: float, *, set_aside: int
) -> Fit | Refusal:
    """The fit if it passes, or why not."""
    area = max(_column(points, "a"))
    growth, growth_stderr = solution.coefficients[0], solution.coefficient_stderrs[0]
    most_ms = max(solution.predicted)
    if growth * area < LEAST_AREA_SHARE * most_ms or growth < LEAST_AREA_STDERRS * growth_stderr:
        return Refusal("no growth with attention area beyond noise: every chunk of a size takes the same time")
    mean_ms = fmean(point.ms for point in points)
    errors = [point.ms - ms for point, ms in zip(points, solution.predicted, strict=True)]
    rms_share = sqrt(fmean(error * error for error in errors)) / mean_ms
    if rms_share > MOST_RMS_SHARE:
        return Refusal(f"timings are off by {rms_share:.0%} of the mean, at most {MOST_RMS_SHARE:.0%}")
    stderr_share = max(
        stderr / max(ms, mean_ms) for stderr, ms in zip(solution.stderrs, solution.predicted, strict=True)
    )
    if stderr_share > MOST_STDERR_SHARE:
        return Refusal(f"predictions are uncertain by {stderr_share:.1%}, at most {MOST_STDERR_SHARE:.0%}")
    found = dict.fromkeys(COEFFICIENTS, 0.0) | dict(zip(names, solution.coefficients, strict=True))
    without = tuple(name for name in COEFFICIENTS if name not in names)
    return Fit(from_ms(**found), len(points), set_aside, rms_share, stderr_share, known, without)
