"""What this process's scheduler runs under, and what it has counted. Filled when the scheduler is ready.

One scheduler a process, so the module is the one place. Everything that decides about chunks in here is the same on
every rank: it comes from settings that were compared at start and from updates that all ranks adopt at one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import lcm
from typing import TYPE_CHECKING, Any

from dynchunk import journal
from dynchunk.agreement import Outbox
from dynchunk.latency_sizing import LatencySizing
from dynchunk.policy.admission import Cut
from dynchunk.policy.turns import Turns

if TYPE_CHECKING:
    from dynchunk.cache_release import CacheRelease, Device
    from dynchunk.peak import PeakMeter
    from dynchunk.policy.budget import Budget
    from dynchunk.prefill_log import PrefillLog
    from dynchunk.prime_cache import PrimeCache

limits: Budget | None = None
# The engine's own chunk size, for which its buffers are made.
static_tokens = 0
# Whether an operator has changed the budget while the engine serves.
set_by_operator = False
# Cause -> tokens, for every floor this engine has; DYNCHUNK_CHUNK_MIN is one of them.
floors: dict[str, int] = {}
# What the engine aligns cuts to; asked late, because the engine sets it after the sizer.
truncation_align: Callable[[], int | None] = type(None)
# Whose pass it is while a long request is open.
turns: Turns = Turns(every=0)
# How long chunks may take.
latency = LatencySizing()
# Updates of this rank on their way to all ranks.
outbox = Outbox()
release: CacheRelease | None = None
primed: PrimeCache | None = None
meter: PeakMeter | None = None
# What the meter's figures are true of: engine, model, layout, device.
belongs_to: dict[str, str] = {}
# This rank's GPU; None without one.
device: Device | None = None
# Follows the long prefill in flight, where somebody reads of it.
prefills: PrefillLog | None = None
# Who wants to know how long each prefill took (patches/model_runner.Prefill, ms); filled before the hook is installed.
listeners: list[Callable[[Any, float], None]] = []
# Who wants to know that one who looks on was taken out, by its name.
when_broken: list[Callable[[str], None]] = []
# What is left to do when the engine has nothing to run; called over and over then.
when_idle: list[Callable[[], None]] = []
# The long request that is out of sight for one pass, which belongs to waiting requests (patches/turns.py).
hidden: Any = None
# Set on every rank alike once our own code has failed: the engine's own sizes count from then on.
degraded = False
counts: Counter[str] = Counter()
_said: set[str] = set()
_cut: tuple[Cut, str] = (Cut(1, 1), "page")
_cut_from: tuple[Any, ...] = (None, None, 0)
KEYS_REMEMBERED = 1000


def active() -> Budget | None:
    """The limits to decide by; None before the scheduler is ready and after our own code has failed."""
    return None if degraded else limits


def degrade(reason: str) -> None:
    """Fall back to the engine's own sizes for good. Said once."""
    global degraded
    if not degraded:
        degraded = True
        # Ranks fail alike, because they decide from the same state. Should one ever fail alone where requests enter,
        # this takes the others along at one step.
        outbox.post("degrade", reason)
        journal.record("budget", journal.REFUSED, f"the engine's own chunk sizes count from now on: {reason}")


def broke(name: str, error: Exception) -> None:
    """One who looked on at forwards has been taken out."""
    journal.record(name, journal.REFUSED, f"broken, and off from now on: {error!r}")
    for tell in when_broken:
        tell(name)


def cut() -> tuple[Cut, str]:
    """Where a request may be cut now, and what sets the floor. Asked for every chunk, so the answer is kept."""
    global _cut, _cut_from
    now = (limits, truncation_align(), id(floors))
    if now[0] is not _cut_from[0] or now[1:] != _cut_from[1:]:
        page = limits.page if limits is not None else 1
        _cut, _cut_from = _work_out_cut(lcm(page, now[1] or 1)), now
    return _cut


def _work_out_cut(align: int) -> tuple[Cut, str]:
    cause, floor = max(floors.items(), key=lambda item: item[1], default=("page", align))
    if align > floor:
        cause, floor = "alignment", align
    return Cut(align, -(-floor // align) * align), cause


def say_once(key: str, sentence: str) -> None:
    """A sentence in the log, once for each key."""
    if len(_said) >= KEYS_REMEMBERED:
        _said.clear()
    if key not in _said:
        _said.add(key)
        journal.say(sentence)


def counters() -> dict[str, Any]:
    """Counts since start, as plain JSON values."""
    state: dict[str, Any] = {
        "budget_in_force": None if limits is None else limits.budget,
        "counts": dict(sorted(counts.items())),
        "floors": dict(floors),
        "degraded": degraded,
        "latency": latency.state(),
    }
    if release is not None:
        state["empty_cache"] = {"calls": release.calls, "ms": round(release.ms, 1)}
    if primed is not None:
        state["prime_cache"] = primed.state()
    if meter is not None:
        state["coefficient"] = meter.fit().state() | {"belongs_to": belongs_to}
    if device is not None:
        state["device"] = {
            "free_bytes": device.available_bytes(),
            "unused_reserved_bytes": device.unused_reserved_bytes(),
        }
    return state
