"""Why memguard stops, as exceptions. Each has the sentence for the operator and the exit code.

MemguardError
├── ServerGoneError     nobody answers at the URL, or the connection broke
├── WrongKeyError       the server wants another API key
├── ServerTimeoutError  no answer in time
├── RefusedError        the server answered 400: this request is wrong, the next may be right
└── RecordError         the report's folder or a file in it cannot be written
"""

from __future__ import annotations

EXIT_PASSED = 0
EXIT_ERROR = 1
EXIT_GUARD = 2
EXIT_INTERRUPTED = 130


class MemguardError(Exception):
    """A reason to stop that the operator can do something about."""

    exit_code = EXIT_ERROR


class ServerGoneError(MemguardError):
    """Nobody answers at the URL, or the connection broke."""


class WrongKeyError(MemguardError):
    """The server wants another API key."""


class ServerTimeoutError(MemguardError):
    """The server took longer than it was given."""


class RefusedError(MemguardError):
    """The server answered 400."""


class RecordError(MemguardError):
    """The report's folder or a file in it cannot be written."""
