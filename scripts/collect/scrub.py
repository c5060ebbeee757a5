"""Takes secrets out of text: the ones we know by value, and what looks like one. Pure.

Known are the values of variables whose names say so (API_KEY, HF_TOKEN, ...) and of such flags. What looks like one:
keys in headers, tokens of well-known shapes, passwords in URLs, members of JSON and assignments with such names.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.flags import without_secrets

HIDDEN = "***"
# Shorter ones would be found in every other word.
LEAST_CHARACTERS = 4

# `tokens` are counted; a `token` is kept secret.
_NAME = r"(?:keys?|token|passwords?|passwd|secrets?|credentials?)"
_SECRET_NAME = re.compile(rf"(?:^|[_-]){_NAME}$", re.IGNORECASE)
_SHAPES = (
    (re.compile(r"(Bearer\s+)[^\s\"',]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(?:hf|sk|ghp|gho|github_pat|glpat|xox[abp]|AKIA)[_-]?[A-Za-z0-9_-]{16,}"), HIDDEN),
    (re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"), HIDDEN),
    # A member of JSON or of Python's dict, an assignment, a flag.
    (re.compile(rf"([\"'][\w-]*{_NAME}[\"']\s*:\s*)([\"'])(?:(?!\2).)*\2", re.IGNORECASE), rf"\1\2{HIDDEN}\2"),
    (re.compile(rf"(\b(?:\w+_)?{_NAME}\s*=\s*)(?!\s)[^\s,)]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(rf"(--[\w-]*{_NAME}[= ])\S+", re.IGNORECASE), rf"\1{HIDDEN}"),
)


def is_secret_name(name: str) -> bool:
    """Whether a variable or a member of JSON of this name holds a secret."""
    return bool(_SECRET_NAME.search(name))


def known_secrets(environ: Mapping[str, str]) -> set[str]:
    """The values in an environment that must not be shown anywhere, those of flags in EXTRA_ARGS included."""
    values = {value.strip() for name, value in environ.items() if is_secret_name(name)}
    try:
        words = shlex.split(environ.get("EXTRA_ARGS", ""))
    except ValueError:  # unbalanced quotes: then none of it can be told apart
        values.add(environ["EXTRA_ARGS"].strip())
    else:
        hidden = [word for word, shown in zip(words, without_secrets(words), strict=True) if word != shown]
        values |= {word.partition("=")[2] or word for word in hidden}
    return {value for value in values if len(value) >= LEAST_CHARACTERS}


def scrub(text: str, secrets: Iterable[str]) -> str:
    """`text` without the secrets, and without what looks like one."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    return text


def scrub_data(value: Any, secrets: Iterable[str]) -> Any:
    """The same for what JSON holds: members with a secret's name lose their value."""
    secrets = list(secrets)
    if isinstance(value, dict):
        return {
            name: HIDDEN if is_secret_name(str(name)) and member not in (None, "") else scrub_data(member, secrets)
            for name, member in value.items()
        }
    if isinstance(value, list):
        return [scrub_data(member, secrets) for member in value]
    return scrub(value, secrets) if isinstance(value, str) else value
