"""What a batch may hold: the laws of admission."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy.admission import Ask, Cut, Load, admit, continue_chunk, rows_that_fit
from dynchunk.policy.budget import PREFIX, SEQUENCE, Budget

B = 200_000_000


def limits(rule: str = PREFIX, budget: int = B) -> Budget:
    return Budget(budget, rule, page=64, chunk_min=256, chunk_max=2048)


CUT = Cut(align=64, floor=256)


@pytest.mark.parametrize("rule", [PREFIX, SEQUENCE])
def test_a_first_chunk_on_a_cached_prefix(rule: str) -> None:
    """150,016 cached tokens, static 2048: the first chunk is 1,280 rows under either rule."""
    ask = Ask(prefix=150_016, remaining=50_000, charge=50_048, room=2048, may_cut=True, alone=True)
    granted = admit(limits(rule), Load(), ask, CUT)
    assert granted is not None
    assert granted.tokens == 1280
    assert not granted.at_floor


loads = st.builds(Load, st.integers(0, 4096), st.integers(0, 1_000_000))
rules = st.sampled_from([PREFIX, SEQUENCE])
tokens = st.integers(0, 1_000_000)


def cost(b: Budget, load: Load, prefix: int, new: int) -> int:
    after = Load(load.rows, load.longest)
    after.add(b, prefix, new)
    return after.rows * after.longest


@given(rules, st.integers(1, 10**12), loads, tokens, st.integers(1, 100_000))
def test_what_fits_is_exact(rule: str, budget: int, load: Load, prefix: int, wanted: int) -> None:
    """The answer keeps the budget, and one row more would not (or was not wanted)."""
    b = limits(rule, budget)
    fits = rows_that_fit(b, load, prefix, wanted)
    assert 0 <= fits <= wanted
    if fits:
        assert cost(b, load, prefix, fits) <= budget
    if fits < wanted:
        assert cost(b, load, prefix, fits + 1) > budget


@given(rules, st.integers(1, 10**12), loads, tokens, st.integers(1, 10**6), st.integers(1, 4096), st.booleans())
def test_admission_keeps_the_budget_or_is_the_floor(
    rule: str, budget: int, load: Load, prefix: int, remaining: int, room: int, may_cut: bool
) -> None:
    """Whatever is granted keeps the budget, unless it is marked as the floor; nothing is cut that may not be."""
    b = limits(rule, budget)
    ask = Ask(prefix, remaining, -(-remaining // 64) * 64, room, may_cut, alone=False)
    granted = admit(b, load, ask, CUT)
    if granted is None:
        return
    assert 0 < granted.tokens <= min(remaining, 2048)
    assert not granted.at_floor
    assert cost(b, load, prefix, granted.tokens) <= budget
    if granted.tokens < remaining:
        assert may_cut
        assert granted.tokens % 64 == 0


@given(rules, st.integers(1, 10**12), tokens, st.integers(1, 10**6), st.integers(1, 4096))
def test_a_request_alone_always_progresses(rule: str, budget: int, prefix: int, remaining: int, room: int) -> None:
    """However small the budget and whatever the engine has left: somebody alone gets at least something."""
    ask = Ask(prefix, remaining, -(-remaining // 64) * 64, room, may_cut=True, alone=True)
    granted = admit(limits(rule, budget), Load(), ask, CUT)
    assert granted is not None
    assert granted.tokens > 0


@given(rules, st.integers(1, 10**12), loads, tokens, st.integers(1, 10**6), st.sampled_from([64, 256, 4096]))
def test_a_continuing_chunk(rule: str, budget: int, load: Load, prefix: int, remaining: int, align: int) -> None:
    """It always progresses, ends on the boundary unless it finishes, and exceeds the budget at the floor only."""
    cut = Cut(align, -(-256 // align) * align)
    b = limits(rule, budget)
    granted = continue_chunk(b, load, prefix, remaining, cut)
    assert 0 < granted.tokens <= remaining
    if granted.tokens < remaining:
        assert (prefix + granted.tokens) % align == 0
    if not granted.at_floor:
        assert cost(b, load, prefix, granted.tokens) <= budget
    else:
        assert granted.tokens < cut.floor + align


def test_the_engines_own_cut_stands() -> None:
    """Where the engine's chunk is nearly used up and the budget is not, its small piece is not refused."""
    ask = Ask(prefix=0, remaining=5000, charge=5056, room=128, may_cut=True, alone=False)
    granted = admit(limits(), Load(rows=1900, longest=0), ask, CUT)
    assert granted is not None
    assert granted.tokens == 128


def test_a_scrap_of_the_budget_is_not_worth_a_chunk() -> None:
    """Where the budget leaves less than the floor in company, the request waits for a pass of its own."""
    ask = Ask(prefix=100_000, remaining=5000, charge=5056, room=2048, may_cut=True, alone=False)
    assert admit(limits(), Load(rows=1900, longest=1000), ask, CUT) is None
