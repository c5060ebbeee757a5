"""What one row and key costs in bytes: bytes = base + c x rows x keys, fitted to measured forwards.

A first forward with autotuning in it, or a neighbour's allocation, must not move the result, so slope and base are
medians. What does not follow a line is said to be what it is (a step function, a bounded path), never fitted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

MIB = 1 << 20
# From one size of chunk alone, a cost of rows and keys cannot be told from one of keys.
CHUNK_SIZES_WANTED = 3
PREFIXES_OF_A_SIZE = 2
SIZES_APART = 1.15
FORWARDS_WANTED = 9
SPREAD_WANTED = 2.0  # the largest rows x keys is at least so many times the smallest
BINS = 32  # under a budget most chunks have the same rows x keys; they must not outweigh the others
BINS_WANTED = 5
LINE_TOLERANCE = 0.05  # typical distance from the line, as a share of what the line spans
GROWTH_WORTH_A_WORD_BYTES = 16 * MIB
JUMP_TIMES = 4.0  # a step: bytes move so many times faster than rows x keys do

UNKNOWN = "unknown"
LINE = "line"
BOUNDED = "bounded"
STEPS = "steps"
SCATTERED = "scattered"


class Forward(NamedTuple):
    """One measured prefill forward. keys: prefix and new tokens. peak_bytes: above what was live afterwards."""

    rows: int
    keys: int
    peak_bytes: int


@dataclass(frozen=True)
class Fit:
    """What the forwards say. bytes_per_pair and base_bytes are those of a line (0 unless kind is LINE).

    worst_bytes_per_pair: the largest bytes / (rows x keys) among the larger half of the forwards.
    """

    kind: str
    forwards: int
    chunk_sizes: int
    bytes_per_pair: float = 0.0
    base_bytes: int = 0
    highest_bytes: int = 0
    worst_bytes_per_pair: float = 0.0
    missing: str = ""

    @property
    def trusted(self) -> bool:
        """Whether a budget may be derived from it."""
        return self.kind == LINE

    def state(self) -> dict[str, Any]:
        """For /server_info, as plain JSON values."""
        return {
            "kind": self.kind,
            "trusted": self.trusted,
            "forwards": self.forwards,
            "chunk_sizes": self.chunk_sizes,
            "bytes_per_pair": round(self.bytes_per_pair, 3),
            "base_bytes": self.base_bytes,
            "highest_bytes": self.highest_bytes,
            "worst_bytes_per_pair": round(self.worst_bytes_per_pair, 3),
            "in_words": self.in_words(),
        }

    def in_words(self) -> str:
        """One sentence for people."""
        seen = f"{self.forwards} forwards of {self.chunk_sizes} sizes"
        highest = f"the highest took {self.highest_bytes / MIB:,.0f} MiB"
        if self.kind == UNKNOWN:
            return f"c is not known yet: {self.missing}"
        if self.kind == LINE:
            return f"c = {self.bytes_per_pair:.2f} B for a row and key above {self.base_bytes / MIB:,.0f} MiB ({seen})"
        if self.kind == BOUNDED:
            return f"the peak does not grow with rows x keys: something bounds it; {highest} ({seen})"
        if self.kind == STEPS:
            return f"the peak is a step function of rows x keys, no line fits it; {highest} ({seen})"
        return f"the peaks follow no line, something else allocates; {highest} ({seen})"


def fit(forwards: Iterable[Forward]) -> Fit:
    """The coefficient, or why there is none. Forwards in any order; those without rows or keys are left out."""
    points = sorted((f.rows * f.keys, f.peak_bytes, f.rows) for f in forwards if f.rows > 0 and f.keys > 0)
    sizes = _sizes(points)
    missing = _missing(points, sizes)
    if missing:
        return Fit(
            UNKNOWN, len(points), sizes, highest_bytes=max((y for _, y, _ in points), default=0), missing=missing
        )
    xs, ys = _binned(points)
    slope, base = _line(xs, ys)
    tolerance = max(GROWTH_WORTH_A_WORD_BYTES, LINE_TOLERANCE * max(ys))
    upper = len(xs) // 4
    if abs(_grows_by(xs[upper:], ys[upper:])) < tolerance:
        level = median(ys[upper:])
        kind = BOUNDED if median(abs(y - level) for y in ys[upper:]) < tolerance else SCATTERED
    elif _jumps(xs, ys):
        kind = STEPS
    else:
        distance = median(abs(y - base - slope * x) for x, y in zip(xs, ys, strict=True))
        kind = LINE if distance <= LINE_TOLERANCE * slope * (xs[-1] - xs[0]) else SCATTERED
    larger = points[len(points) // 2 :]
    return Fit(
        kind,
        len(points),
        sizes,
        bytes_per_pair=slope if kind == LINE else 0.0,
        base_bytes=max(0, round(base)) if kind == LINE else 0,
        highest_bytes=max(y for _, y, _ in points),
        worst_bytes_per_pair=max(y / x for x, y, _ in larger),
    )


def _sizes(points: Sequence[tuple[int, int, int]]) -> int:
    """Chunk sizes that tell something: seen on several prefixes, and well apart. The ends of prompts are no size."""
    keys_of = defaultdict(set)
    for pairs, _, rows in points:
        keys_of[rows].add(pairs // rows)
    found, last = 0, 0.0
    for rows in sorted(keys_of):
        if len(keys_of[rows]) >= PREFIXES_OF_A_SIZE and rows >= last * SIZES_APART:
            found, last = found + 1, rows
    return found


def _missing(points: Sequence[tuple[int, int, int]], sizes: int) -> str:
    if sizes < CHUNK_SIZES_WANTED:
        return f"chunk sizes seen: {sizes}, wanted: {CHUNK_SIZES_WANTED}"
    if len(points) < FORWARDS_WANTED:
        return f"forwards seen: {len(points)}, wanted: {FORWARDS_WANTED}"
    if points[-1][0] < SPREAD_WANTED * points[0][0] or len(_binned(points)[0]) < BINS_WANTED:
        return f"rows x keys lies between {points[0][0]:,} and {points[-1][0]:,}, too close for a line"
    return ""


def _binned(points: Sequence[tuple[int, int, int]]) -> tuple[list[float], list[float]]:
    """Medians of rows x keys and of bytes, for equal stretches of rows x keys. Points ascend."""
    low, high = points[0][0], points[-1][0]
    bins: dict[int, list[tuple[int, int]]] = {}
    for x, y, _ in points:
        bins.setdefault(min(BINS - 1, (x - low) * BINS // max(1, high - low)), []).append((x, y))
    return [float(median(x for x, _ in b)) for b in bins.values()], [
        float(median(y for _, y in b)) for b in bins.values()
    ]


def _line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """(slope, base): the median slope of pairs half the points apart, and the median of what is left.

    One wild point spoils one pair, so nearly a quarter of the points may be wild; and there is no quadratic work.
    """
    half = (len(xs) + 1) // 2
    slopes = [(ys[i + half] - ys[i]) / (xs[i + half] - xs[i]) for i in range(len(xs) - half) if xs[i + half] > xs[i]]
    slope = median(slopes) if slopes else 0.0
    return slope, median(y - slope * x for x, y in zip(xs, ys, strict=True))


def _grows_by(xs: Sequence[float], ys: Sequence[float]) -> float:
    """By how much the line through the points rises from the first to the last."""
    return _line(xs, ys)[0] * (xs[-1] - xs[0])


def _jumps(xs: Sequence[float], ys: Sequence[float]) -> bool:
    """Whether most of the rise happens in places where rows x keys hardly moves. xs ascend."""
    run, rise = xs[-1] - xs[0], max(ys) - min(ys)
    # Of three neighbours the middle value, so that a single wild point is no jump.
    smooth = [ys[0], *(median(ys[i - 1 : i + 2]) for i in range(1, len(ys) - 1)), ys[-1]]
    jumped = fell = 0.0
    for i in range(1, len(xs)):
        up, along = (smooth[i] - smooth[i - 1]) / rise, (xs[i] - xs[i - 1]) / run
        fell -= min(up, 0.0)
        if up > JUMP_TIMES * along and up > LINE_TOLERANCE:
            jumped += up
    return jumped > 0.5 > fell
