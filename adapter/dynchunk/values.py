"""Numbers and JSON that others wrote, checked before anything is worked out with them.

JSON takes 1e999 for infinity, `inf` and `nan` pass for numbers on a command line, and a whole number may have hundreds
of digits: each of them breaks arithmetic somewhere far from where it came in.
"""

from __future__ import annotations

import json
from typing import Any

from dynchunk.shortened import shortened

MOST_GIB = 1_000_000


def number(value: object, low: float, high: float) -> float:
    """A finite number from `low` to `high`, as a flag or JSON gives it. Raises ValueError that repeats the value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{shortened(repr(value))}: not a number from {_plain(low)} to {_plain(high)}")
    return float(value)


def parsed(text: str) -> Any:
    """JSON as Python values. Raises ValueError, also for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(limit: float) -> str:
    """Whole numbers with their digits grouped, not as powers of ten."""
    return f"{limit:,.0f}" if limit == int(limit) else f"{limit:g}"
