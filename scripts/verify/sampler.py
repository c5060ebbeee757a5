"""The thread that reads memory and pulls the trigger.

The host may be seconds from freezing when it matters, so the thread imports, forks and opens nothing once it runs, and
asks neither driver nor Docker. It decides itself, because the main thread waits for the server or draws. What it calls
must return at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from scripts.verify.decide import IDLE, Action, Decision, Limits, Sample, decide
from scripts.verify.errors import MemguardError
from scripts.verify.host import Host
from scripts.verify.own_memory import OwnMemory

INTERVAL_S = 0.1
SLOWEST_PROMISED_S = 0.25

_MCL_CURRENT, _MCL_FUTURE = 1, 2
_CAP_IPC_LOCK = 1 << 14
_NICE = -10


class Sampler(threading.Thread):
    """Reads until `end`. Once armed it calls `on_danger` in its own thread whenever a decision to abort or to escalate
    is harder than those before it. `phase` and `running` go into the samples: whoever knows them sets them. `own`: set
    to judge by what the engine's processes take, from the next reading on.

    keep: the number of samples kept, for a watch without end; None: all.
    """

    def __init__(
        self,
        host: Host,
        on_danger: Callable[[Decision, Sample], None],
        interval_s: float = INTERVAL_S,
        keep: int | None = None,
    ) -> None:
        super().__init__(name="memguard-sampler", daemon=True)
        self.samples: list[Sample] = []  # grows at its end only (but for `keep`), so that other threads may read it
        self.latest = Decision(Action.CONTINUE, "")
        self.phase = IDLE
        self.running: int | None = None
        self.own: OwnMemory | None = None
        self._host = host
        self._on_danger = on_danger
        self._interval_s = interval_s
        self._keep = keep
        self._limits: Limits | Mapping[str, Limits] | None = None
        self._told = Action.WARN
        self._error: Exception | None = None
        self._ended = threading.Event()
        # Unix time that cannot jump: a clock that is set during the ramp must not look like a fall.
        self._epoch_s = time.time() - time.monotonic()

    def arm(self, limits: Limits | Mapping[str, Limits]) -> None:
        """From now on, decide; what was told before may be told again."""
        self._told = Action.WARN
        self._limits = limits

    def now_s(self) -> float:
        """Unix seconds on the clock of the samples."""
        return self._epoch_s + time.monotonic()

    def end(self) -> None:
        """Stop, and wait until it has."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def check(self) -> None:
        """Raise if the thread has failed: a ramp must not go on unguarded."""
        if self._error is not None:
            raise MemguardError(f"the memory sampler failed: {self._error}") from self._error

    def run(self) -> None:
        """The loop of the thread."""
        due_s = time.monotonic()
        try:
            while not self._ended.wait(max(0.0, due_s - time.monotonic())):
                self._step()
                due_s = max(due_s + self._interval_s, time.monotonic())
        except Exception as error:
            self._error = error
        finally:
            self._host.close()

    def _step(self) -> None:
        reading, host_bytes = self._host.read(), None
        if self.own is not None:
            host_bytes = reading.available_bytes
            reading = reading._replace(available_bytes=self.own.judged_bytes(host_bytes))
        self.samples.append(Sample(self.now_s(), *reading, self.running, self.phase, host_bytes))
        if self._keep is not None and len(self.samples) > 2 * self._keep:
            del self.samples[: -self._keep]
        limits = self._limits
        if limits is None:
            return
        decision = decide(self.samples, limits)
        self.latest = decision
        if decision.action.severity > self._told.severity:
            self._told = decision.action
            self._on_danger(decision, self.samples[-1])


def hold_ground() -> bool:
    """Keep this process from being swapped out, or kept waiting for a CPU, just when it is needed.

    As far as the system lets it; False where the memory could not be locked. For all of the process: a main thread that
    waits for a CPU with the interpreter's lock in its hand keeps the sampler waiting too.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    # With a limit, locking what comes later as well would end in a failed allocation.
    later = _MCL_FUTURE if _may_lock_without_limit() else 0
    try:
        return int(ctypes.CDLL(None).mlockall(_MCL_CURRENT | later)) == 0
    except (OSError, AttributeError):
        return False


def let_go() -> None:
    """Nothing is watched any more: drawing plots needs no locked memory."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).munlockall()


def _may_lock_without_limit() -> bool:
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        return True
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return bool(int(status.partition("CapEff:")[2].split(None, 1)[0], 16) & _CAP_IPC_LOCK)
    except (OSError, ValueError, IndexError):
        return False
