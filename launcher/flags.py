"""The engine's command line as argparse reads it: flags may be shortened to any unique beginning, and have aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from launcher.address import without_user_info

HIDDEN = "***"
# What the engine keeps secrets in, by its full name, because a flag may be shortened; and what others are likely named.
SECRET_FLAGS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
SECRET_ENDINGS = ("-key", "-password", "-secret", "-token")
_SECRET_MEMBER = re.compile(r'("[^"]*(?:key|password|secret|token|credential)"\s*:\s*)"(?:[^"\\]|\\.)*"', re.IGNORECASE)


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


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command line that may be shown: no keys, no passwords of URLs, no secrets in JSON."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        flag = name_of(word)
        secret = flag.endswith(SECRET_ENDINGS) or bool(could_mean(flag, SECRET_FLAGS))
        if hide_next:
            shown.append(HIDDEN)
        elif secret and "=" in word:
            shown.append(f"{flag}={HIDDEN}")
        else:
            shown.append(without_user_info(_SECRET_MEMBER.sub(rf'\1"{HIDDEN}"', word)))
        hide_next = secret and "=" not in word and not hide_next
    return shown
