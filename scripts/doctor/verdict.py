"""What a check comes to."""

from __future__ import annotations

import enum
from dataclasses import dataclass

GIB = 1 << 30


class Level(enum.Enum):
    """How a check ended. NOT_CHECKED: there was nothing to go by, so it is neither good nor bad."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Check:
    """One check. reason: what was found, with its figures. cure: what to do; empty where there is nothing to do."""

    name: str
    level: Level
    reason: str
    cure: str = ""


def ok(name: str, reason: str) -> Check:
    """Nothing to do."""
    return Check(name, Level.OK, reason)


def warn(name: str, reason: str, cure: str) -> Check:
    """Works, but not as it looks, or only with luck."""
    return Check(name, Level.WARN, reason, cure)


def fail(name: str, reason: str, cure: str) -> Check:
    """Will not start, will hang, or will run out of memory."""
    return Check(name, Level.FAIL, reason, cure)


def not_checked(name: str, reason: str) -> Check:
    """Nothing to go by, and why."""
    return Check(name, Level.NOT_CHECKED, reason)


def gib(value_bytes: float) -> str:
    """Bytes for people."""
    return f"{value_bytes / GIB:.2f} GiB"
