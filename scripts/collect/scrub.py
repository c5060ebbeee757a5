"""Takes secrets out of text: the ones we know by value, and what looks like one. Pure.

Known are the values of variables whose names say so (API_KEY, HF_TOKEN, ...) and of such flags. What looks like one:
whatever has such a name (launcher.redaction says which), tokens of well-known shapes, and what URLs have
before their @.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from dynchunk.values import parsed
from launcher.redaction import HIDDEN, is_count, is_secret_name, secrets_in, without_named, without_secrets

# Shorter ones would be found in every other word.
LEAST_CHARACTERS = 4
# What switches say, and where a shell is: no secrets, whatever the variable's name.
_COMMON_VALUES = {"none", "null", "true", "false", "auto", "default"}
_NO_SECRETS = {"PWD", "OLDPWD"}

_SHAPES = (
    (re.compile(r"(Bearer\s+)[^\s\"']+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"(:(?:\\?/){2})[^\s\"']{0,1000}@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(?:nvapi-|gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|gsk_|npm_|dckr_pat_)[\w-]{6,}"), HIDDEN),
    (re.compile(r"\b(?:hf_|sk-)(?:(?=[\w-]*[0-9A-Z])[\w-]{8,}|[\w-]{16,})"), HIDDEN),
    (re.compile(r"\b(?:A[KS]IA[A-Z0-9]{12,}|AIza[\w-]{20,})"), HIDDEN),
    (re.compile(r"\beyJ[\w-]{6,}\.[\w-]+(?:\.[\w-]*)*"), HIDDEN),
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(?=-----END|\Z)", re.DOTALL), rf"\1{HIDDEN}"),
)


def known_secrets(environ: Mapping[str, str]) -> set[str]:
    """The values in an environment that must not be shown anywhere, those of flags in EXTRA_ARGS included."""
    values = {value.strip() for name, value in environ.items() if is_secret_name(name) and name not in _NO_SECRETS}
    try:
        values |= secrets_in(shlex.split(environ.get("EXTRA_ARGS", "")))
    except ValueError:  # unbalanced quotes: then none of it can be told apart
        values.add(environ["EXTRA_ARGS"].strip())
    return {value for value in values if len(value) >= LEAST_CHARACTERS and value.lower() not in _COMMON_VALUES}


def scrub(text: str, secrets: Iterable[str]) -> str:
    """`text` without the secrets, and without what looks like one."""
    text = _without_known(text, secrets)
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    return without_named(text)


def _without_known(text: str, secrets: Iterable[str]) -> str:
    """Without the secrets as they are and as JSON writes them."""
    written = {form for secret in secrets for form in (secret, json.dumps(secret)[1:-1])}
    for secret in sorted(written, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def scrub_data(value: Any, secrets: Iterable[str]) -> Any:
    """The same for what JSON holds: members with a secret's name lose their value, unless that is none or a switch."""
    secrets = list(secrets)
    if isinstance(value, dict):
        return {
            scrub(str(name), secrets): HIDDEN if _is_secret(str(name), member) else scrub_data(member, secrets)
            for name, member in value.items()
        }
    if isinstance(value, list):
        shown = without_secrets([str(member) for member in value])
        return [HIDDEN if word == HIDDEN else scrub_data(m, secrets) for m, word in zip(value, shown, strict=True)]
    if isinstance(value, str):
        return scrub(value, secrets)
    return value if _without_known(str(value), secrets) == str(value) else HIDDEN


def scrub_json(text: str, secrets: Iterable[str]) -> str:
    """Text that should be JSON, or a row of it on each line, scrubbed as such; as any text where it is none."""
    secrets = list(secrets)
    try:
        shown = json.dumps(scrub_data(parsed(text), secrets), indent=1) + "\n"
    except (ValueError, RecursionError):
        shown = "".join(_json_line(line, secrets) for line in text.splitlines(keepends=True))
    return _without_known(shown, secrets)


def _json_line(line: str, secrets: list[str]) -> str:
    try:
        return json.dumps(scrub_data(parsed(line), secrets)) + "\n"
    except (ValueError, RecursionError):
        return scrub(line, secrets)


def _is_secret(name: str, member: Any) -> bool:
    nothing = member is None or isinstance(member, bool) or member == ""
    return is_secret_name(name) and not nothing and not is_count(name, member)
