"""Keeps keys and passwords out of what is shown and written."""

from __future__ import annotations

import shlex

from launcher.address import without_user_info
from launcher.redaction import HIDDEN, without_secrets
from scripts.collect.scrub import scrub


def redacted_command(program: str, arguments: list[str], api_key: str | None) -> str:
    """The command line as typed, without the key, wherever it stands, and without the secrets of what it starts."""
    words = [argument.replace(api_key, HIDDEN) if api_key else argument for argument in arguments]
    return shlex.join([*program.split(), *(scrub(word, ()) for word in without_secrets(words))])


def without_password(url: str) -> str:
    """A URL, or any text with one in it, without what stands before the @."""
    return without_user_info(url)
