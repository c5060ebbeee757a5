"""Whose pass it is while a long request is open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynchunk.policy.turns import Turn, Turns


def passes(turns: Turns, n: int, *, waiting: bool, decoding: bool) -> str:
    """N passes as letters: c a chunk, w waiting, d decoding."""
    seen = ""
    for _ in range(n):
        turn = turns.next(long_open=True, waiting=waiting, decoding=decoding)
        seen += {Turn.STOCK: "c", Turn.WAITING: "w", Turn.DECODE: "d"}[turn]
        if turn is Turn.STOCK:
            turns.chunk_ran()
    return seen


def test_after_n_chunks_the_others_get_a_pass_each() -> None:
    """Four chunks, one pass for waiting requests, one for decoding, and again."""
    assert passes(Turns(4), 14, waiting=True, decoding=True) == "ccccwdccccwdcc"


def test_nobody_waiting_costs_nothing() -> None:
    """Without others the long request runs as in the stock engine."""
    assert passes(Turns(4), 10, waiting=False, decoding=False) == "cccccccccc"
    assert passes(Turns(4), 10, waiting=False, decoding=True) == "ccccdccccd"


def test_zero_is_the_stock_order() -> None:
    """DYNCHUNK_INTERLEAVE=0."""
    assert passes(Turns(0), 10, waiting=True, decoding=True) == "cccccccccc"


def test_every_slot_of_a_pipeline_decodes() -> None:
    """A pipeline of two keeps two batches in flight, and each has decoding requests of its own."""
    assert passes(Turns(2, slots=2), 10, waiting=True, decoding=True) == "ccwddccwdd"


def test_a_new_long_request_starts_afresh() -> None:
    """What one long request owed, the next one does not."""
    turns = Turns(4)
    passes(turns, 3, waiting=True, decoding=True)
    turns.next(long_open=False, waiting=True, decoding=True)
    assert passes(turns, 5, waiting=True, decoding=True) == "ccccw"


@given(st.integers(1, 10), st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=200))
def test_the_long_request_always_goes_on(every: int, slots: int, world: list[tuple[bool, bool]]) -> None:
    """Between two chunks there are never more than one pass for waiting requests and one decode pass a slot."""
    turns = Turns(every, slots)
    others = 0
    for waiting, decoding in world:
        turn = turns.next(long_open=True, waiting=waiting, decoding=decoding)
        if turn is Turn.STOCK:
            turns.chunk_ran()
            others = 0
        else:
            others += 1
        assert others <= 1 + slots
