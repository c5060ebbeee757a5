"""Numbers and JSON of others: what passes, and that nothing else does."""

from __future__ import annotations

import math

import pytest

from dynchunk import values


@pytest.mark.parametrize("value", [0, 1, 1.5, 1000])
def test_a_number_within_its_limits(value: float) -> None:
    """As it is, as a float."""
    assert values.number(value, 0, 1000) == value


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 10**400, -1, 1000.1, True, "1", None, [1]])
def test_what_is_no_such_number(value: object) -> None:
    """One sentence, with the value cut short and the limits."""
    with pytest.raises(ValueError, match="not a number from 0 to 1,000") as caught:
        values.number(value, 0, 1000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "", "9" * 5000])
def test_what_is_no_json(text: str) -> None:
    """Always a ValueError, whatever Python's own reader makes of it."""
    with pytest.raises(ValueError, match=r"."):
        values.parsed(text)
