"""DYNCHUNK_BUDGET=auto: the budget from the memory that is free at start and what a row and key costs.

budget = (headroom x 85 % - what is held however small the chunk) / c, in whole millions of token^2. The smallest
headroom of all ranks counts and the largest c, so that one answer holds everywhere. Integers only: every rank works it
out for itself from the same reports and must come to the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from dynchunk.policy.coefficient import Fit

MIB = 1 << 20
MARGIN_PERCENT = 15
QUANTUM = 1_000_000  # token^2
LARGEST = 10**15  # what DYNCHUNK_BUDGET accepts
CHANGE_WORTH_A_WORD_PERCENT = 10
# Page tables and the like grow with rows x keys even where the scores are cut into tiles.
TABLES_MILLIBYTES = 300


class NoHeadroomError(ValueError):
    """Not even the smallest budget fits into the memory that is free."""


@dataclass(frozen=True)
class Path:
    """What one attention path of the engine takes, for one row and one token of the prefix, on each rank.

    millibytes: thousandths of a byte without a score limit. limits_percent: where the scores keep a limit, so many
    percent of it are held instead and only `grows_millibytes` grow; None: this path keeps none. source: who says so.
    """

    millibytes: int
    limits_percent: int | None
    source: str
    grows_millibytes: int = TABLES_MILLIBYTES


# Measured where it says so; the rest follows from the buffers' types in SGLang 0.5.20 to 0.5.23.
PATHS = {
    "v41-dev": Path(14_500, None, "12.2 to 14.5 B measured on GB10, development builds of SGLang, DeepSeek-V4.1"),
    "v41": Path(6_030, 250, "V4.1 scores fp32 and its masks; in tiles up to 2.5 limits, measured with stub kernels"),
    "v41-torch": Path(192_000, 308, "V4.1 torch scoring, 3.08 limits measured on a CPU"),
    "v4": Path(1_000, 100, "V4 scores: 4 B for every fourth token"),
    "v4-whole": Path(1_300, None, "V4 scores of a whole chunk (0.5.20, ROCm): 4 B for every fourth token, and tables"),
    "v4-torch": Path(
        230_000,
        100,
        "V4 torch fallback: 919 B for every fourth token, measured on a CPU, 64 heads; in parts its result stays",
        1_300,
    ),
    "dsa": Path(4_000, 100, "DSA scores fp32"),
    "dsa-torch": Path(20_200, None, "DSA torch scoring and top-k: 14 + 6.2 B"),
    "kpool": Path(1_000, 100, "scores of pooled keys: 4 B for every fourth token"),
    "reference": Path(24_000, None, "the CPU reference platform: fp32 scores of its 6 heads"),
}


@dataclass(frozen=True)
class Coefficient:
    """c and what is held beside it. source: where they are from, for the derivation."""

    millibytes: int
    base_bytes: int
    source: str


@dataclass(frozen=True)
class Derived:
    """The budget in token^2, and one line that shows how it came about."""

    budget: int
    text: str


def headroom_bytes(
    *,
    driver_free: int,
    reserved: int,
    allocated: int,
    mem_available: int | None = None,
    guard: int = 0,
) -> int:
    """What a chunk may take on one rank: what the device has left, and what the allocator holds unused. Bytes.

    mem_available: given where GPU memory is host memory. It then stands for the device's own figure, which counts the
    page cache as taken, and `guard` bytes of it stay untouched.
    """
    free = driver_free if mem_available is None else mem_available - guard
    return max(0, free) + max(0, reserved - allocated)


def of_path(name: str, score_limit_bytes: int) -> Coefficient:
    """The coefficient of a path in PATHS. score_limit_bytes: the limit in force, 0 where there is none."""
    path = PATHS[name]
    if path.limits_percent is None or score_limit_bytes <= 0:
        return Coefficient(path.millibytes, 0, f"{name}: {path.source}")
    held = score_limit_bytes * path.limits_percent // 100
    return Coefficient(
        path.grows_millibytes, held, f"{name} in tiles of {score_limit_bytes / MIB:,.0f} MiB: {path.source}"
    )


def of_fit(fit: Fit, source: str) -> Coefficient | None:
    """The coefficient of a measured line, rounded up; None where the fit is not to be trusted."""
    if not fit.trusted:
        return None
    return Coefficient(ceil(fit.bytes_per_pair * 1000), fit.base_bytes, source)


def derive(headrooms: Mapping[str, int], coefficients: Mapping[str, Coefficient], own_rows: int = 0) -> Derived:
    """One budget for all ranks. headrooms: bytes by rank; coefficients: by rank, usually the same one.

    own_rows: token^2 by which rows x keys can exceed the budget (policy/budget.own_rows). They take memory as well.
    Raises NoHeadroomError with the numbers and what to do.
    """
    rank, headroom = min(headrooms.items(), key=lambda item: (item[1], item[0]))
    usable = headroom * (100 - MARGIN_PERCENT) // 100
    pairs, c = min(
        ((max(0, usable - c.base_bytes) * 1000 // max(1, c.millibytes), c) for c in coefficients.values()),
        key=lambda found: (found[0], found[1].millibytes, found[1].source),
    )
    budget = min(LARGEST, max(0, pairs - own_rows) // QUANTUM * QUANTUM)
    rows = f" less {own_rows:,} of a chunk's own rows" if own_rows else ""
    of_all = f", the least of {len(headrooms)} ranks" if len(headrooms) > 1 else ""
    text = (
        f"({headroom:,} bytes free on {rank}{of_all}, less {MARGIN_PERCENT} %, less {c.base_bytes:,}) / "
        f"{c.millibytes / 1000:g} B{rows} = {budget:,} token^2 ({c.source})"
    )
    if budget < QUANTUM:
        raise NoHeadroomError(
            f"DYNCHUNK_BUDGET=auto: {text}: nothing is left for a chunk; lower CHUNKED_PREFILL_SIZE, "
            "MEM_FRACTION_STATIC or DYNCHUNK_INDEXER_SCORE_MIB, or set a budget"
        )
    return Derived(budget, text)


def advice(in_force: int, at_start: Mapping[str, int], measured: Fit, own_rows: int = 0) -> Derived | None:
    """The budget that measured forwards call for, from the headroom at start; None where it is about the one in force.

    own_rows: as for `derive`.
    `text` is for the log. A raise is for the entry rank to post to all ranks; this decides nothing by itself.
    """
    c = of_fit(measured, measured.in_words())
    if c is None:
        return None
    try:
        better = derive(at_start, {"measured": c}, own_rows)
    except NoHeadroomError as error:
        return Derived(QUANTUM, str(error))
    if abs(better.budget - in_force) * 100 < CHANGE_WORTH_A_WORD_PERCENT * in_force:
        return None
    if better.budget > in_force:
        # A raise has to hold for the dearest forwards as well, of which a median knows nothing.
        dearest = Coefficient(ceil(measured.worst_bytes_per_pair * 1000), 0, f"the dearest forwards; {c.source}")
        better = min(better, derive(at_start, {"measured": dearest}, own_rows), key=lambda found: found.budget)
        if (better.budget - in_force) * 100 < CHANGE_WORTH_A_WORD_PERCENT * in_force:
            return None
    verb = "allows" if better.budget > in_force else "calls for"
    return Derived(
        better.budget, f"what was measured {verb} a budget of {better.budget:,} instead of {in_force:,}: {better.text}"
    )
