"""What the operator asked for, and what tests put in the place of the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from scripts.verify.decide import ESCALATE_S
from scripts.verify.guard import PATIENCE_S
from scripts.verify.host import KMSG, PROC
from scripts.verify.machine import CHECKOUT
from scripts.verify.sampler import INTERVAL_S, hold_ground


@dataclass(frozen=True)
class Options:
    """Exactly one of guard_bytes and headroom_bytes is given.

    start_guard_bytes: the guard while an engine starts. launch: the command that starts the engine, empty if it runs
    already. signals: whether the engine may be signalled. past_projection: go on although the guard is expected.
    own_memory: judge what the engine's own processes take, with headroom_bytes only.
    """

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
    start_guard_bytes: int = 0
    launch: tuple[str, ...] = ()
    signals: bool = True
    past_projection: bool = False
    own_memory: bool = False
    image: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """Where things are, and how fast they go."""

    console: Console
    logs: Path = CHECKOUT / "logs"
    proc: Path = PROC
    kmsg: Path = KMSG
    sample_interval_s: float = INTERVAL_S
    baseline_s: float = 1.0
    tick_s: float = 0.25
    look_s: float = 1.0
    abort_wait_s: float = 120.0
    recovery_s: float = 60.0
    escalate_s: float = ESCALATE_S
    patience_s: float = PATIENCE_S
    start_s: float = 3600.0
    hold_ground: Callable[[], bool] = hold_ground
