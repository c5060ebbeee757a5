"""Keeps keys and passwords out of what is shown and written."""

from __future__ import annotations

import shlex

from launcher import address

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
    """A URL, or any text with one in it, without what stands before the @."""
    return address.without_user_info(url)
