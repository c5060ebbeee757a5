"""What a chunk holds for a moment on each of the engine's attention paths, tensor by tensor where that is known.

The totals are those of auto_budget.PATHS, so that a plan and DYNCHUNK_BUDGET=auto count alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dynchunk.policy import auto_budget
from dynchunk.policy.auto_budget import Path

MILLI = 1000
# V4 keeps every fourth key at the most; V4.1 has layers that keep them all.
V4_TOKENS_PER_KEY = 4


class Part(NamedTuple):
    """One tensor of rows x keys: bytes for each row and key, and how many tokens of the prefix share a key."""

    name: str
    key_bytes: int
    tokens_per_key: int = 1


# The dense scoring of DeepSeek-V4.1 before the engine cut it into tiles (development builds of September 2026).
DENSE_V41 = "v41-dense"
SCORES = Part("scores", 4)
DENSE_PARTS = (Part("logits", 4), Part("mask", 1), Part("its second copy", 1))
PATHS = {
    DENSE_V41: Path(6_000, None, "fp32 scores and two bool masks of the dense V4.1 path; 6.03 B measured on a CPU"),
    **auto_budget.PATHS,
}
PARTS = {
    DENSE_V41: DENSE_PARTS,
    "v4": (Part("logits", 4, tokens_per_key=4),),
    "dsa": (Part("logits", 4),),
    "kpool": (Part("logits", 4, tokens_per_key=4),),
}


@dataclass(frozen=True)
class Cost:
    """What a row and a key of the prefix cost, in thousandths of a byte, and how the total is bounded.

    bound_bytes: held instead of the scores where the engine cuts them into tiles, or None; grows_millibytes: what
    grows beside them. source: who says so. measured: in an engine, on whatever part of the rows one of its ranks has.
    """

    millibytes: int
    bound_bytes: int | None
    source: str
    parts: tuple[Part, ...] = ()
    grows_millibytes: int = auto_budget.TABLES_MILLIBYTES
    measured: bool = False


def of_path(name: str, score_limit_bytes: int) -> Cost:
    """The cost of a path. score_limit_bytes: the limit in force on the score buffers, 0 where there is none."""
    path = PATHS[name]
    bound, tiles = None, ""
    if path.limits_percent is not None and score_limit_bytes > 0:
        bound = score_limit_bytes * path.limits_percent // 100
        tiles = f" in tiles of {score_limit_bytes / auto_budget.MIB:,.0f} MiB"
    return Cost(path.millibytes, bound, f"{name}{tiles}: {path.source}", PARTS.get(name, ()), path.grows_millibytes)


def transient_bytes(cost: Cost, rows: int, keys: int) -> int:
    """What `rows` new tokens that see `keys` tokens hold for a moment. Rounds up."""
    whole = ceil_div(rows * keys * cost.millibytes, MILLI)
    if cost.bound_bytes is None:
        return whole
    # Scores that fill no tile are all there is; beside full tiles, page tables still grow.
    return min(whole, cost.bound_bytes + ceil_div(rows * keys * cost.grows_millibytes, MILLI))


def part_bytes(part: Part, rows: int, keys: int) -> int:
    """One tensor of it. Rounds the keys up, as the engine does."""
    return rows * ceil_div(keys, part.tokens_per_key) * part.key_bytes


def pairs_within(cost: Cost, limit_bytes: int) -> int:
    """The most rows x keys that hold at most `limit_bytes`. Rounds down; 0 where none does."""
    whole = max(limit_bytes, 0) * MILLI // max(cost.millibytes, 1)
    if cost.bound_bytes is None:
        return whole
    return max(whole, max(limit_bytes - cost.bound_bytes, 0) * MILLI // cost.grows_millibytes)


def tokens_per_key(architectures: object, compress_ratios: object) -> int | None:
    """The fewest tokens that share a key of a DeepSeek-V4 or V4.1, from its config.json; None for any other model."""
    first = next(iter(architectures), None) if isinstance(architectures, list | tuple) else None
    if not isinstance(first, str) or not first.startswith("DeepseekV4"):
        return None
    found = compress_ratios if isinstance(compress_ratios, list | tuple) else ()
    return min((one for one in found if type(one) is int and one > 0), default=1)


def ceil_div(number: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-number // by)
