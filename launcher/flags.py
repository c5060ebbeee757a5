"""The engine's command line as argparse reads it: flags may be shortened to any unique beginning, and have aliases."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def name_of(word: str) -> str:
    """The flag in a word of the command line, without `=value`; empty for anything else."""
    name = word.partition("=")[0]
    return name if name.startswith("--") and name != "--" else ""


def could_mean(name: str, flags: Iterable[str]) -> list[str]:
    """The flags that argparse may take `name` for: itself where it is one of them, else all that begin with it."""
    flags = list(flags)
    return [name] if name in flags else [flag for flag in flags if name and flag.startswith(name)]


def value_of(words: Sequence[str], flag: str) -> str | None:
    """What the last `flag` among `words`, shortened or not, is given; None without it."""
    found = None
    for index, word in enumerate(words):
        if could_mean(name_of(word), [flag]):
            separate = words[index + 1] if index + 1 < len(words) else ""
            found = word.partition("=")[2] if "=" in word else separate
    return found


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
