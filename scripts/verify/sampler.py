"""The thread that reads MemAvailable and pulls the trigger.

The host may be seconds from freezing when it matters, so the thread imports, forks and opens nothing once it runs:
/proc/meminfo stays open and is read again from its start. It decides itself, because the main thread waits for
the server or draws. What it calls must return at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scripts.verify.decide import Action, Decision, Limits, Sample, decide
from scripts.verify.errors import MemguardError

MEMINFO = Path("/proc/meminfo")
INTERVAL_S = 0.1
SLOWEST_PROMISED_S = 0.25

_READ_BYTES = 8192
_MCL_CURRENT = 1
_NICE = -10


class Meminfo:
    """An open /proc/meminfo."""

    def __init__(self, path: Path = MEMINFO) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise MemguardError(f"cannot read {path}: {error.strerror}; memguard needs Linux") from None
        try:
            self.read()
        except ValueError:
            os.close(self._fd)
            raise MemguardError(f"{path} has no MemAvailable; memguard needs Linux 3.14 or later") from None

    def read(self) -> tuple[int, int, int]:
        """(MemAvailable, MemFree, SwapFree) in bytes."""
        data = os.pread(self._fd, _READ_BYTES, 0)
        return _field_bytes(data, b"MemAvailable:"), _field_bytes(data, b"MemFree:"), _field_bytes(data, b"SwapFree:")

    def close(self) -> None:
        """Give the file back."""
        os.close(self._fd)


class Sampler(threading.Thread):
    """Reads until `end`. Once armed it calls `on_abort` with the first decision to abort, once, in its own thread."""

    def __init__(
        self, meminfo: Meminfo, on_abort: Callable[[Decision, Sample], None], interval_s: float = INTERVAL_S
    ) -> None:
        super().__init__(name="memguard-sampler", daemon=True)
        self.samples: list[Sample] = []  # grows at its end only, so that other threads may read it
        self.latest = Decision(Action.CONTINUE, "")
        self._meminfo = meminfo
        self._on_abort = on_abort
        self._interval_s = interval_s
        self._limits: Limits | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()
        # Unix time that cannot jump: a clock that is set during the ramp must not look like a fall.
        self._epoch_s = time.time() - time.monotonic()

    def arm(self, limits: Limits) -> None:
        """From now on, decide."""
        self._limits = limits

    def disarm(self) -> None:
        """Go on reading, decide nothing."""
        self._limits = None

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
            self._meminfo.close()

    def _step(self) -> None:
        self.samples.append(Sample(self.now_s(), *self._meminfo.read()))
        limits = self._limits
        if limits is None:
            return
        self.latest = decide(self.samples, limits)
        if self.latest.action is Action.ABORT:
            self._limits = None
            self._on_abort(self.latest, self.samples[-1])


def hold_ground() -> bool:
    """Keep this process from being swapped out, or kept waiting for a CPU, just when it is needed.

    As far as the system lets it; False where the memory could not be locked. For all of the process: a main thread that
    waits for a CPU with the interpreter's lock in its hand keeps the sampler waiting too.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    try:
        return int(ctypes.CDLL(None).mlockall(_MCL_CURRENT)) == 0
    except (OSError, AttributeError):
        return False


def _field_bytes(data: bytes, name: bytes) -> int:
    start = data.index(name) + len(name)
    return int(data[start : data.index(b"kB", start)]) * 1024
