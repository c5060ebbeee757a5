"""The fit of bytes against rows x keys: what it finds, and what it refuses to call a line."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy import coefficient
from dynchunk.policy.budget import Budget, chunk_tokens
from dynchunk.policy.coefficient import MIB, Forward, fit

GIB = 1 << 30
LIMITS = Budget(200_000_000, "prefix", page=64, chunk_min=256, chunk_max=2048)


def shapes(last_tokens: int = 400_000) -> list[tuple[int, int]]:
    """(rows, keys) of a long prompt's chunks under the default budget."""
    prefix, found = 0, []
    while prefix < last_tokens:
        rows = chunk_tokens(LIMITS, prefix)
        prefix += rows
        found.append((rows, prefix))
    return found


def line(bytes_per_pair: float, base_bytes: int, noise: float = 0.0) -> list[Forward]:
    chance = random.Random(1)
    return [
        Forward(r, k, round((base_bytes + bytes_per_pair * r * k) * (1 + noise * chance.uniform(-1, 1))))
        for r, k in shapes()
    ]


@given(st.floats(0.5, 250), st.integers(0, GIB))
def test_an_exact_line_is_found(bytes_per_pair: float, base_bytes: int) -> None:
    """Any coefficient of the known paths, above any base, comes back."""
    found = fit(line(bytes_per_pair, base_bytes))
    assert found.trusted
    assert found.bytes_per_pair == pytest.approx(bytes_per_pair, rel=0.01)
    assert found.base_bytes == pytest.approx(base_bytes, abs=2 * MIB)


def test_noise_of_five_percent() -> None:
    """Real forwards scatter; c is right within 5 %."""
    assert fit(line(14, 100 * MIB, noise=0.05)).bytes_per_pair == pytest.approx(14, rel=0.05)


def test_a_fifth_of_wild_forwards_changes_nothing() -> None:
    """Autotuning in a first forward, or others' memory: a fifth of the forwards with 5 GiB more, c within 5 %."""
    forwards = line(14, 0)
    wild = [f._replace(peak_bytes=f.peak_bytes + 5 * GIB) if i % 5 == 0 else f for i, f in enumerate(forwards)]
    assert fit(wild).bytes_per_pair == pytest.approx(14, rel=0.05)


def test_many_chunks_at_the_budget_do_not_outweigh_the_others() -> None:
    """Beyond the first 100,000 tokens every chunk has nearly the same rows x keys; their noise is not the slope."""
    forwards = line(6, 50 * MIB, noise=0.03)
    at_budget = [f for f in forwards if f.rows < 2048]
    assert len(at_budget) > 4 * (len(forwards) - len(at_budget))
    assert fit(forwards + at_budget * 5).bytes_per_pair == pytest.approx(6, rel=0.05)


def test_two_chunk_sizes_are_not_enough() -> None:
    """From fewer than three sizes nothing is believed, however many forwards there are."""
    forwards = [Forward(r, k, 14 * r * k) for r in (1024, 2048) for k in range(2048, 100_000, 2048)]
    found = fit(forwards)
    assert not found.trusted
    assert "chunk sizes seen: 2, wanted: 3" in found.in_words()
    assert fit([*forwards, *(Forward(512, k, 14 * 512 * k) for k in (50_000, 60_000))]).trusted


def test_the_ends_of_prompts_are_no_sizes() -> None:
    """Whole chunks of one size and what was left of six prompts: a cost of keys alone must not pass for one of both."""
    whole = [Forward(2048, k, 1152 * k) for k in range(2048, 100_000, 2048)]
    tails = [Forward(r, k, 1152 * k) for r, k in ((17, 30_001), (333, 44_333), (900, 50_900), (1201, 61_201))]
    assert not fit(whole + tails).trusted


def test_equal_products_are_not_enough() -> None:
    """Three sizes with the same rows x keys say nothing about a slope."""
    found = fit([Forward(r, 10**8 // r, 10**9 + i) for i, r in enumerate([512, 1024, 2048] * 5)])
    assert (found.kind, found.trusted) == (coefficient.UNKNOWN, False)


def test_a_bounded_path_is_no_line() -> None:
    """Row tiles under a limit: bytes rise to the limit and stay there. No coefficient, and the height is said."""
    found = fit([Forward(r, k, min(4 * r * k, 256 * MIB)) for r, k in shapes()])
    assert (found.kind, found.highest_bytes) == (coefficient.BOUNDED, 256 * MIB)
    assert "256 MiB" in found.in_words()


def test_a_constant_is_bounded() -> None:
    """Nothing grows, not even at first."""
    assert fit([Forward(r, k, 100 * MIB) for r, k in shapes()]).kind == coefficient.BOUNDED


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_a_step_function_is_reported_as_one(steps: int) -> None:
    """Some kernels round their workspace up in large steps; a line through that would promise too much."""
    height, width = GIB, 210_000_000 // steps
    found = fit([Forward(r, k, height * (1 + r * k // width)) for r, k in shapes(150_000)])
    assert found.kind == coefficient.STEPS
    assert not found.trusted
    assert "step function" in found.in_words()


def test_many_small_steps_are_a_line() -> None:
    """Rounding to 2 MiB is no step function."""
    found = fit([Forward(r, k, -(-14 * r * k // (2 * MIB)) * 2 * MIB) for r, k in shapes()])
    assert found.kind == coefficient.LINE


def test_scatter_is_said_to_be_scatter() -> None:
    """Peaks that have nothing to do with rows x keys give no coefficient."""
    chance = random.Random(2)
    found = fit([Forward(r, k, chance.randrange(4 * GIB)) for r, k in shapes()])
    assert (found.kind, found.trusted) == (coefficient.SCATTERED, False)


def test_the_worst_ratio_covers_the_larger_forwards() -> None:
    """Whatever the shape, bytes <= worst x rows x keys holds in the upper half: a safe figure without a line."""
    forwards = [Forward(r, k, 3 * GIB if r * k > 10**8 else GIB) for r, k in shapes()]
    found = fit(forwards)
    upper = sorted(forwards, key=lambda f: f.rows * f.keys)[len(forwards) // 2 :]
    assert all(f.peak_bytes <= found.worst_bytes_per_pair * f.rows * f.keys * 1.000001 for f in upper)


def test_no_forwards() -> None:
    """Before the first long prompt there is a state to show all the same."""
    assert fit([]).state()["trusted"] is False
