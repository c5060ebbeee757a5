"""What the next size of a ramp will take, going by the sizes before. Pure.

A chunk's memory goes with its new tokens times the keys they see. Under a static chunk that grows with the prompt;
under a budget it does not, from some length on. A line through sizes in tokens would stop a ramp there that has nothing
to fear, so the line is through this product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynchunk.policy.budget import Budget, chunk_tokens, most_pairs
from scripts.verify import engine


def largest_product(size_tokens: int, facts: Mapping[str, Any]) -> int:
    """token^2: the most new tokens x (prefix and new tokens) of any chunk of a prompt of this size.

    facts: of the engine, see `engine.facts`. An engine that tells no chunk size is taken for one with a fixed one.
    """
    chunk = _chunk(facts)
    if chunk is None:
        return size_tokens
    return most_pairs(chunk, size_tokens)


def projected_low_bytes(taken: Sequence[tuple[int, int]], next_product: int, available_bytes: int) -> int | None:
    """MemAvailable at the worst moment of the next size, on the line through the last two different products.

    taken: (product, bytes that MemAvailable fell by) of the sizes that passed, smallest first. None: too few.
    """
    if len(taken) < 2:
        return None
    last_product, last_bytes = taken[-1]
    at_most_bytes = max(n_bytes for product, n_bytes in taken if product == last_product)
    if next_product <= last_product:
        return available_bytes - at_most_bytes
    before = next(((product, n_bytes) for product, n_bytes in reversed(taken) if product < last_product), (0, 0))
    slope = max(0.0, (last_bytes - before[1]) / (last_product - before[0]))
    return available_bytes - round(at_most_bytes + slope * (next_product - last_product))


def _chunk(facts: Mapping[str, Any]) -> Callable[[int], int] | None:
    """Prefix -> the chunk that the engine will run on it."""
    static = facts["flags"].get("chunked_prefill_size")
    if engine.dynchunk_active(facts):
        effective = facts["dynchunk"][0].get("effective") or {}
        try:
            limits = Budget(**{name: effective[name] for name in Budget.__dataclass_fields__})
        except KeyError:
            return None
        return lambda prefix_tokens: chunk_tokens(limits, prefix_tokens)
    return (lambda _: int(static)) if static and int(static) > 0 else None
