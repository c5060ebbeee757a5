"""What the operator asked for, and what tests put in the place of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from scripts.verify.machine import CHECKOUT
from scripts.verify.sampler import INTERVAL_S, MEMINFO, hold_ground


@dataclass(frozen=True)
class Options:
    """Exactly one of guard_bytes and headroom_bytes is given."""

    url: str
    sizes_tokens: tuple[int, ...]
    command: str
    api_key: str | None = field(default=None, repr=False)
    guard_bytes: int | None = None
    headroom_bytes: int | None = None
    label: str | None = None
    trace: Path | None = None
    server_log: Path | None = None
    timeout_s: float = 3600.0
    out: Path | None = None
    append: Path | None = None


@dataclass(frozen=True)
class Surroundings:
    """Where things are, and how fast they go."""

    console: Console
    logs: Path = CHECKOUT / "logs"
    meminfo: Path = MEMINFO
    sample_interval_s: float = INTERVAL_S
    baseline_s: float = 1.0
    tick_s: float = 0.25
    abort_wait_s: float = 120.0
    recovery_s: float = 60.0
    hold_ground: Callable[[], bool] = hold_ground
