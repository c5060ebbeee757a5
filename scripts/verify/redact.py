"""Keeps keys and passwords out of what is shown and written."""

from __future__ import annotations

import shlex
from urllib.parse import urlsplit, urlunsplit

_HIDDEN = "***"


def redacted_command(program: str, arguments: list[str], api_key: str | None) -> str:
    """The command line as typed, without the key, wherever it stands."""
    shown = []
    hide_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide_next:
            shown.append(_HIDDEN)
        elif name == "--api-key" and equals:
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(without_password(argument.replace(api_key, _HIDDEN) if api_key else argument))
        hide_next = argument == "--api-key"
    return shlex.join([*program.split(), *shown])


def without_password(url: str) -> str:
    """A URL without what stands before its @; any other text as it is."""
    parts = urlsplit(url)
    if not parts.scheme or "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc=f"{_HIDDEN}@{parts.netloc.rpartition('@')[2]}"))
