"""Where the sizes before lead to: by the product that memory goes with, not by the length of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from scripts.verify.projection import largest_product, projected_low_bytes

GIB = 2**30
STOCK: dict[str, Any] = {"flags": {"chunked_prefill_size": 2_048}, "dynchunk": []}
EFFECTIVE = {"budget": 200_000_000, "rule": "prefix", "page": 64, "chunk_min": 256, "chunk_max": 2_048, "static": 2_048}
BUDGET: dict[str, Any] = {**STOCK, "dynchunk": [{"mode": "on", "effective": EFFECTIVE}]}


def test_a_static_chunk_takes_more_with_every_token() -> None:
    """The last whole chunk sees all before it and itself."""
    assert largest_product(2_048 * 40, STOCK) == 2_048 * 2_048 * 40
    assert largest_product(1_000, STOCK) == 1_000_000


def test_under_a_budget_it_stays_where_it_is() -> None:
    """Up to 97,656 tokens as with a static chunk; from there on it keeps to the budget, 2 % more at the most."""
    assert largest_product(90_000, BUDGET) == largest_product(90_000, STOCK)
    for size in (128_000, 256_000, 500_000):
        assert 195_000_000 < largest_product(size, BUDGET) <= 204_200_000
    assert largest_product(1_000_000, BUDGET) > 255_000_000  # the floor is above the budget there


@pytest.mark.parametrize(
    "facts",
    [
        {"flags": {}, "dynchunk": []},
        {"flags": {"chunked_prefill_size": -1}, "dynchunk": []},
        {"flags": {"chunked_prefill_size": 2_048}, "dynchunk": [{"mode": "on"}]},
    ],
)
def test_an_engine_that_tells_nothing_is_taken_to_grow(facts: dict[str, Any]) -> None:
    """Then the length of the prompt has to do."""
    assert largest_product(64_000, facts) == 64_000


def test_projection_goes_on_from_the_last_two_sizes() -> None:
    """64 took 1 GiB, 128 took 2: 256 will take 4."""
    taken = [(32, GIB), (64, GIB), (128, 2 * GIB)]
    assert projected_low_bytes(taken, 256, 10 * GIB) == 6 * GIB


def test_a_size_that_asks_no_more_takes_no_more() -> None:
    """On the budget's plateau: as much as the worst of the sizes there, whatever it is longer."""
    taken = [(64, GIB), (200, 3 * GIB), (200, 2 * GIB)]
    assert projected_low_bytes(taken, 200, 10 * GIB) == 7 * GIB
    assert projected_low_bytes(taken, 199, 10 * GIB) == 7 * GIB


def test_projection_needs_two_sizes_and_never_promises_memory_back() -> None:
    """One size says nothing about the next; a size that took less than the one before is taken for noise."""
    assert projected_low_bytes([(64, GIB)], 128, 10 * GIB) is None
    assert projected_low_bytes([(64, 2 * GIB), (128, GIB)], 256, 10 * GIB) == 9 * GIB


def test_the_default_ramp_of_a_budget_is_not_stopped() -> None:
    """14.5 bytes a pair and 3.5 GiB to spare: the static chunk is stopped before 128k, the budget at no size."""
    for facts, stopped_at in ((STOCK, 128_000), (BUDGET, None)):
        taken: list[tuple[int, int]] = []
        stopped = None
        for size in (64_000, 96_000, 128_000, 160_000, 200_000, 256_000, 320_000, 400_000, 500_000):
            product = largest_product(size, facts)
            low = projected_low_bytes(taken, product, round(5.0 * GIB))
            if low is not None and low < 1.5 * GIB:
                stopped = size
                break
            taken.append((product, round(14.5 * product)))
        assert stopped == stopped_at
