"""Reading the engine's flags off a command line, as its argparse would. Text only."""

from __future__ import annotations

from collections.abc import Sequence


def value(words: Sequence[str], *names: str) -> str | None:
    """The value of a flag under any of its names: the last one counts; None where it is not given."""
    found = None
    for index, word in enumerate(words):
        name, separator, rest = word.partition("=")
        if name in names:
            found = rest if separator else words[index + 1] if index + 1 < len(words) else None
    return found


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
    return any(word in names for word in words)
