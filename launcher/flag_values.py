"""The engine's flags off its command line, under all their names. Text only."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.flags import could_mean, name_of, value_of


def value(words: Sequence[str], *names: str) -> str | None:
    """The value of a flag under the first of its names that is given; None without any."""
    return next((found for name in names if (found := value_of(words, name)) is not None), None)


def number(words: Sequence[str], *names: str) -> float | None:
    """The same as a number; None as well where it is none, which the engine will refuse itself."""
    text = value(words, *names)
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def whole(words: Sequence[str], *names: str) -> int | None:
    """The same, whole."""
    found = number(words, *names)
    return None if found is None else int(found)


def given(words: Sequence[str], *names: str) -> bool:
    """Whether a flag without a value is there."""
    return any(could_mean(name_of(word), names) for word in words)
