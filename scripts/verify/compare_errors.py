"""How compare ends. What the server does wrong is a MemguardError, which ends compare with EXIT_ERROR as well."""

from __future__ import annotations

from scripts.verify.errors import EXIT_INTERRUPTED, MemguardError

EXIT_SAME = 0
EXIT_DIFFERENT = 1
EXIT_ERROR = 2

__all__ = ["EXIT_DIFFERENT", "EXIT_ERROR", "EXIT_INTERRUPTED", "EXIT_SAME", "CompareError"]


class CompareError(MemguardError):
    """A reason why the two sides were not compared that the operator can do something about."""

    exit_code = EXIT_ERROR
