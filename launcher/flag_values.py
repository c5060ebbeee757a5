"""The engine's flags off its command line, under all their names. Text only."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.flags import could_mean, name_of, value_of


def value(words: Sequence[str], *names: str) -> str | None:
    """The value of a flag under the first of its names that is given; None without any."""
    return next((found for name in names if (found := value_of(words, name)) is not None), None)


def number(words: Sequence[str], *names: str) -> float | None:
    """The same as a finite number; None as well where it is none, which the engine will refuse itself."""
    try:
        found = float(value(words, *names) or "nan")
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def count(words: Sequence[str], *names: str) -> int | None:
    """The same as a whole number of 1 or more, written as the engine's parser takes it: no 4.0, no 4e0."""
    try:
        found = int(value(words, *names) or "0")
    except ValueError:
        return None
    return found if found > 0 else None


def given(words: Sequence[str], *names: str) -> bool:
    """Whether a flag without a value is there."""
    return any(could_mean(name_of(word), names) for word in words)
